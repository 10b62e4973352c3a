"""Draft models and MTP layers with which an engine cannot draft, and the memory of a draft model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemorl.errors import ConfigError, Problem
from nemorl.generation.torch_engine import plan
from nemorl.generation.vllm_engine import plan as vllm_plan
from nemorl.generation.vllm_engine.plan import problems as vllm_problems
from nemorl.models.eagle3 import write_head
from nemorl.models.eagle3_shape import Eagle3Shape
from nemorl.models.layout import hf_tensors, mtp_tensors
from nemorl.models.registry import load_shape
from nemorl.plan.problems import file_problems, plan_run
from tests.plan.conftest import Configure
from tests.plan.models import with_layers, write_model, write_weights
from tests.plan.test_recompute import machine

SMALL = {"hidden_size": 64, "num_hidden_layers": 2}
VLLM = ("generation.backend=vllm", "cluster.gpus_per_node=8")


def of_model(folder: Path) -> str:
    return f"generation.speculation={{method: draft_model, model_path: {folder}}}"


def torch_problems(configure: Configure, *overrides: str) -> list[Problem]:
    experiment = configure(*overrides)
    return list(plan.problems(experiment, load_shape(experiment.policy.model_path), installed=False))


def test_a_smaller_model_of_the_same_tokens_drafts(configure: Configure, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", **SMALL)
    assert torch_problems(configure, of_model(draft)) == []
    experiment = configure(*VLLM, of_model(draft))
    shape = load_shape(experiment.policy.model_path)
    assert list(vllm_problems(experiment, shape, installed=False)) == []


def test_draft_models_that_cannot_draft_are_refused(
    configure: Configure, tmp_path: Path, model: Path
) -> None:
    other = write_model(tmp_path / "other", vocab_size=1008)
    named = write_model(tmp_path / "named", **SMALL)
    for folder, token in ((model, "a"), (named, "b")):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {token: 0}}}), encoding="utf-8")
    experts = write_model(
        tmp_path / "experts",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
    )
    (experts / "tokenizer.json").write_text("{}", encoding="utf-8")
    for folder, fix in (
        (tmp_path / "nowhere", "there is no such folder: name one with config.json"),
        (model, "a draft of the policy's own model takes as long as its tokens: name a smaller model"),
        (other, "its vocabulary has 1008 tokens and the policy's 1000"),
        (named, "its tokenizer is another than the policy's: token 0 is 'b' there"),
        (experts, "drafts by dense Llama-like models only, and this one has experts"),
    ):
        (problem,) = torch_problems(configure, of_model(folder))
        assert (problem.field, problem.value) == ("generation.speculation.model_path", str(folder))
        assert fix in problem.fix


@pytest.mark.parametrize("fields", [None, "{", '{"architectures": ["Unheard"], "vocab_size": 1000}'])
def test_a_draft_model_that_cannot_be_read_is_a_problem_of_the_plan(
    configure: Configure, tmp_path: Path, fields: str | None
) -> None:
    """The plan counts its memory, too, which is unknown then."""
    folder = tmp_path / "draft"
    if fields is not None:
        folder.mkdir()
        (folder / "config.json").write_text(fields, encoding="utf-8")
    found = plan_run(configure(of_model(folder)), machine(10**12)).problems
    assert {problem.field for problem in found} == {"generation.speculation.model_path"}
    assert {problem.value for problem in found} == {str(folder)}


def test_mtp_requires_layers_of_the_model(configure: Configure, model: Path) -> None:
    def found() -> list[Problem]:
        experiment = configure(*VLLM, "generation.speculation={method: mtp}")
        shape = load_shape(experiment.policy.model_path)
        return list(vllm_problems(experiment, shape, installed=False))

    (problem,) = found()
    assert problem.field == "generation.speculation.method"
    assert "names no layers for further tokens (num_nextn_predict_layers or" in problem.fix
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8"
    )
    assert found() == []


MTP = "generation.speculation={method: mtp}"


def test_the_embedded_engine_drafts_by_layers_that_the_family_reads(
    configure: Configure, model: Path
) -> None:
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    (problem,) = torch_problems(configure, MTP)
    assert (problem.field, problem.value) == ("generation.speculation.method", "mtp")
    assert "no layers for further tokens of this family (llama): use prompt_lookup" in problem.fix
    with_layers(model, 1)
    assert torch_problems(configure, MTP) == []
    write_weights(model / "model.safetensors", hf_tensors(load_shape(model)))
    (problem,) = file_problems(configure(MTP))
    assert problem.field == "policy.model_path"
    assert "first model.mtp_layers.0.token_layernorm.weight" in problem.fix


def test_the_memory_of_an_engine_has_the_layers_that_draft(configure: Configure, model: Path) -> None:
    """Once as loaded, and where the policy trains them also as they are received."""
    with_layers(model, 1)
    shape = load_shape(model)
    elements = sum(map(math.prod, mtp_tensors(load_shape(model, with_mtp=True)).values()))
    plain, drafting = (plan.memory(configure(*args), shape, 1000) for args in ((), (MTP,)))
    assert drafting.weights - plain.weights == 4 * elements
    assert drafting.staging - plain.staging == 2 * 4 * elements
    # a layer more, and a hidden state
    assert drafting.kv_cache / plain.kv_cache == pytest.approx((7 * 2 * 4 * 16 + 128) / (6 * 2 * 4 * 16))
    trained = "policy.multi_token_prediction={}"
    plain, drafting, both = (
        vllm_plan.memory(configure(*VLLM, "generation.update=reload", *args), shape, 1000)
        for args in ((), (MTP,), (MTP, trained))
    )
    assert drafting.weights - plain.weights == both.weights - plain.weights == 4 * elements
    assert drafting.staging == plain.staging
    assert both.staging - plain.staging >= 4 * elements


@pytest.mark.parametrize(
    ("overrides", "field", "fix"),
    [
        (
            ("generation.backend=vllm", MTP),
            "speculation.method",
            "on a CPU the logprobs of vLLM 0.32 are wrong",
        ),
        (
            (*VLLM, MTP, "generation.vllm_kwargs={speculative_config: {method: ngram}}"),
            "vllm_kwargs.speculative_config",
            "generation.speculation has the drafts; remove one of the two",
        ),
        (
            (*VLLM, MTP, "generation.pipeline_parallel_size=2"),
            "pipeline_parallel_size",
            "with stages the drafts of mtp keep weights that the policy trains; set it to 1",
        ),
        (
            (*VLLM, MTP, "policy.quantization={format: int8}"),
            "speculation.method",
            "vLLM's loader would quantize the weights of drafts as the policy's; use prompt_lookup",
        ),
        (
            ("generation.backend=megatron", MTP),
            "speculation.method",
            "the policy's processes do not sample by the layers for further tokens; use prompt_lookup",
        ),
        (
            ("generation.backend=megatron", "generation.speculation={method: draft_model, model_path: d}"),
            "speculation.method",
            "the policy's processes hold no second model; use prompt_lookup, or backend torch or vllm",
        ),
    ],
)
def test_engines_that_cannot_draft_so_say_why(
    configure: Configure, overrides: tuple[str, ...], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(*overrides)
    (problem,) = [p for p in refused.value.problems if p.field == f"generation.{field}"]
    assert fix in problem.fix


EAGLE3 = "generation.speculation={method: eagle3, model_path: %s}"


def test_a_head_of_the_model_drafts(configure: Configure, tmp_path: Path) -> None:
    plain = configure(*VLLM)
    shape = load_shape(plain.policy.model_path)
    head = Eagle3Shape.of(shape)
    weights = {name: torch.zeros(size) for name, size in head.tensors().items()}
    write_head(tmp_path / "head", head, weights, plain.policy.model_path)
    drafting = configure(*VLLM, EAGLE3 % (tmp_path / "head"))
    assert list(vllm_problems(drafting, shape, installed=False)) == []
    elements = sum(math.prod(size) for size in head.tensors().values())
    without, with_head = (vllm_plan.memory(each, shape, 1000) for each in (plain, drafting))
    assert with_head.weights - without.weights == 4 * elements
    assert drafting.generation.with_absolute_paths().speculation == drafting.generation.speculation


def test_a_trained_head_is_the_one_that_drafts(configure: Configure, tmp_path: Path) -> None:
    head, shape = tmp_path / "head", load_shape(configure(*VLLM).policy.model_path)
    weights = {name: torch.zeros(size) for name, size in Eagle3Shape.of(shape).tensors().items()}
    write_head(head, Eagle3Shape.of(shape), weights, configure(*VLLM).policy.model_path)
    loaded, updated, other = (
        configure(*VLLM, EAGLE3 % head, *draft)
        for draft in ((), (f"policy.draft.model_path={head}",), ("policy.draft.lr=1e-4",))
    )
    trained = [each.generation.host_options(each.policy)["trained_drafts"] for each in (loaded, updated)]
    assert trained == [False, True]
    assert list(vllm_problems(updated, shape, installed=False)) == []
    (problem,) = vllm_problems(other, shape, installed=False)
    assert (problem.field, problem.value) == ("policy.draft.model_path", None)
    assert f"engines draft by the head in {head}, and updates bring the trained one" in problem.fix


@pytest.mark.parametrize(
    ("name", "fields", "field", "fix"),
    [
        ("nowhere", {}, "model_path", "there is no such folder: name one with config.json"),
        ("wider", {"hidden_size": 32}, "model_path", "its hidden_size is 32 and the policy's 128"),
        ("other", {"vocab_size": 99}, "model_path", "its vocab_size is 99 and the policy's 1000"),
    ],
)
def test_heads_of_other_models_are_refused(
    configure: Configure, tmp_path: Path, name: str, fields: dict[str, int], field: str, fix: str
) -> None:
    experiment = configure(*VLLM, EAGLE3 % (tmp_path / name))
    shape = load_shape(experiment.policy.model_path)
    if fields:
        sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | fields), encoding="utf-8")
    (problem,) = vllm_problems(experiment, shape, installed=False)
    assert (problem.field, problem.value) == (f"generation.speculation.{field}", str(tmp_path / name))
    assert fix in problem.fix


def test_min_p_is_refused_with_drafts_of_vllm(configure: Configure) -> None:
    overrides = (*VLLM, "generation.speculation={method: prompt_lookup}", "generation.sampling.min_p=0.1")
    with pytest.raises(ConfigError) as refused:
        configure(*overrides)
    fixes = [p.fix for p in refused.value.problems if p.field == "generation.sampling.min_p"]
    assert any("vLLM takes no min_p with generation.speculation" in fix for fix in fixes)


def test_only_vllm_drafts_by_heads(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"expected one of `prompt_lookup`, `draft_model`, `mtp`$"):
        configure(EAGLE3 % "d")
    with pytest.raises(ConfigError, match="with drafts; remove it, or use backend torch"):
        configure("generation.backend=vllm", EAGLE3 % "d")


def test_an_unknown_method_is_refused_with_those_that_there_are(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="expected one of `prompt_lookup`, `draft_model`, `mtp`"):
        configure("generation.speculation={method: eagle}")


def test_the_memory_of_an_engine_has_the_draft_model(configure: Configure, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", **SMALL)
    elements = sum(math.prod(size) for size in hf_tensors(load_shape(draft)).values())
    plain, drafting = configure(), configure(of_model(draft))
    shape = load_shape(plain.policy.model_path)
    without, with_draft = plan.memory(plain, shape, 1000), plan.memory(drafting, shape, 1000)
    assert with_draft.weights - without.weights == 4 * elements
    # 2 layers of keys and values of 4 heads of 8 (64 / 8), instead of 6 layers of 4 heads of 16
    assert with_draft.kv_cache / without.kv_cache == pytest.approx(1 + 2 * 4 * 8 / (6 * 4 * 16))


def test_models_without_hidden_states_in_vllm_have_no_heads(configure: Configure, tmp_path: Path) -> None:
    experiment = configure(*VLLM, EAGLE3 % tmp_path)
    shape = load_shape(experiment.policy.model_path)
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    assert list(vllm_problems(experiment, shape, installed=False)) == []
    (problem,) = vllm_problems(experiment, replace(shape, family="mixtral"), installed=False)
    assert (problem.field, problem.value) == ("generation.speculation.method", "eagle3")
    assert "vLLM 0.32 returns no hidden states of mixtral: use another method" in problem.fix
