"""Heads for drafts that a model or another setting rules out, their memory and their operations."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.errors import ConfigError, Problem
from nemorl.models.eagle3 import write_head
from nemorl.models.eagle3_shape import Eagle3Shape
from nemorl.models.registry import load_shape, policy_shape
from nemorl.plan.draft_training import DraftWork
from nemorl.plan.memory import stage_memory
from nemorl.plan.problems import plan_run
from nemorl.plan.training_time import Lengths, Training
from tests.config.experiments import refuses, write
from tests.plan.conftest import Configure
from tests.plan.models import write_model
from tests.plan.test_recompute import machine
from tests.plan.test_step_time import FREE, GPU, IDLE, SAME, SHAPE

ON = "policy.draft={lr: 1e-4}"
SECTION = {"lr": 1e-4, "depth": 3, "step_decay": 0.8, "layers": None, "model_path": None}


def found(configure: Configure, *overrides: str) -> list[Problem]:
    return list(plan_run(configure(*overrides), machine(10**12)).problems)


def test_layers_ascend(tmp_path: Path) -> None:
    reason = "engines take them in ascending order; sort them"
    refuses(write(tmp_path), ("policy.draft={layers: [3, 2, 5]}",), "policy.draft.layers", [3, 2, 5], reason)


def test_a_scalar_head_predicts_no_tokens(configure: Configure) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(ON, "policy.head=scalar")
    (problem,) = [p for p in refused.value.problems if p.field == "policy.draft"]
    assert "policy.head is scalar, and a head for drafts predicts tokens; remove it" in problem.fix


def test_a_model_without_such_layers_is_refused(configure: Configure) -> None:
    assert found(configure, ON) == []
    (problem,) = found(configure, "policy.draft={layers: [2, 4, 7]}")
    assert (problem.field, problem.value) == ("policy.draft.layers", [2, 4, 7])
    assert problem.fix == "name three different numbers from 0 to 6, the layers of the model"


def test_scaled_embeddings_are_refused(configure: Configure, model: Path) -> None:
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 8}
    (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (problem,) = [p for p in found(configure, ON) if p.field.startswith("policy.draft")]
    assert problem == Problem(
        "policy.draft",
        SECTION,
        "heads for drafts of models with scaled embeddings are not implemented; remove it",
    )


def test_a_folder_that_is_no_head_is_refused(configure: Configure, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    (problem,) = found(configure, f"policy.draft={{model_path: {other}}}")
    assert (problem.field, problem.value) == ("policy.draft.model_path", str(other))
    assert "a head for drafts is a LlamaForCausalLMEagle3: name another folder, or null" in problem.fix


def written_head(model: Path, folder: Path) -> Path:
    """The folder of a head of zeros of the model."""
    shape = Eagle3Shape.of(load_shape(model))
    write_head(folder, shape, {name: torch.zeros(size) for name, size in shape.tensors().items()}, model)
    return folder


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors is truncated ("),
        (lambda file: file.write_bytes(b""), "model.safetensors is not a safetensors file"),
        (lambda file: file.unlink(), "the folder holds no weights; it requires model.safetensors or"),
        (
            lambda file: save_file(load_file(file) | {"fc.weight": torch.zeros(3, 5)}, file),
            "fc.weight has the shape [3, 5], and config.json says [",
        ),
        (
            lambda file: save_file({"norm.weight": load_file(file)["norm.weight"]}, file),
            "fc.weight is missing, and config.json says [",
        ),
    ],
)
def test_a_head_with_incomplete_weights_is_refused(
    configure: Configure, model: Path, tmp_path: Path, harm: Callable[[Path], object], reason: str
) -> None:
    head = written_head(model, tmp_path / "head")
    on = f"policy.draft={{model_path: {head}}}"
    assert found(configure, on) == []
    harm(head / "model.safetensors")
    (problem,) = found(configure, on)
    assert (problem.field, problem.value) == ("policy.draft.model_path", str(head))
    assert reason in problem.fix


def test_a_head_without_an_output_matrix_has_the_policys(
    configure: Configure, model: Path, tmp_path: Path
) -> None:
    file = written_head(model, tmp_path / "head") / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file)
    assert found(configure, f"policy.draft={{model_path: {file.parent}}}") == []


def test_the_memory_of_a_last_stage_has_the_head(configure: Configure, model: Path) -> None:
    shape = load_shape(model)
    sizes = {name: math.prod(size) for name, size in Eagle3Shape.of(shape).tensors().items()}
    for tensor in (1, 2):
        layout = f"policy.layout={{tensor_parallel_size: {tensor}, pipeline_parallel_size: 2}}"
        rows = sizes["lm_head.weight"]
        here = sum(sizes.values()) - rows + rows // tensor
        plain, drafting = configure(layout), configure(layout, ON)
        for stage, held in ((0, 0), (1, here)):
            without, with_head = (stage_memory(each, shape, stage) for each in (plain, drafting))
            assert with_head.weights - without.weights == 4 * held
            assert with_head.gradients - without.gradients == 4 * held
            assert with_head.optimizer - without.optimizer == 8 * held


def test_steps_after_the_first_have_no_kernel_in_float32_on_gpus(configure: Configure) -> None:
    gpus, steps = "cluster.gpus_per_node=2", "policy.draft={depth: 2}"

    def fields(*overrides: str) -> set[str]:
        return {problem.field for problem in found(configure, gpus, *overrides)}

    assert "policy.draft.depth" in fields(steps)
    assert "policy.draft.depth" not in fields("policy.draft={depth: 1}")
    assert "policy.draft.depth" not in fields(steps, "policy.precision=bfloat16")


# Of the model in tests/plan/models.py: hidden size, width of the MLP, query heads, key and value heads, their
# size, tokens.
HIDDEN, FFN, HEADS, KV_HEADS, DIM = 128, 384, 8, 4, 16
LAYER = 2 * (2 * HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * FFN)


def test_operations_of_training_count_each_step_by_hand(configure: Configure) -> None:
    policy = configure("policy.draft={depth: 3}").policy
    shape = policy_shape(policy)
    work = DraftWork.of(policy, shape)
    assert work is not None
    lengths, predicted = [5, 3], 9
    expected = 2 * 8 * 2 * 3 * HIDDEN * HIDDEN  # of three states: the product, and its weight's gradient
    expected += 3 * 3 * 8 * LAYER + 3 * predicted * 2 * HIDDEN * shape.vocab_size
    for length in lengths:
        for start in range(length):
            for step in range(3):
                expected += 3 * 2 * 2 * HEADS * DIM * (start + 1 + step)  # scores and sums of values
    assert work.of_sequences(lengths, predicted) == expected
    assert DraftWork.of(configure().policy, shape) is None


@pytest.mark.parametrize("steps", [1, 3])
def test_the_plan_of_time_adds_the_passes_of_the_head(configure: Configure, steps: int) -> None:
    """With single multiprocessors and full tiles: 128 sequences of 128 tokens, half of them responses."""
    lengths = Lengths(prompt=64, response=64, limit=64)
    tokens = 128 * 128
    slow = replace(FREE, operations=1e12)

    def plan(*overrides: str) -> Training:
        policy = configure(*GPU, *overrides).policy.model_copy(update={"micro_batch_tokens": tokens})
        return Training(policy, replace(SHAPE, vocab_size=1024), slow, IDLE, lengths)

    drafting, plain = plan(f"policy.draft={{depth: {steps}}}"), plan()
    states, output = 2 * 3 * HIDDEN * HIDDEN, 2 * HIDDEN * 1024
    keys = steps * 64 + steps * (steps - 1) / 2
    attention = 2 * 2 * HEADS * DIM * keys
    seconds = 2 * states + 3 * steps * LAYER + 3.5 * attention + 4 * steps * output / 2
    more = drafting.update(128).compute - plain.update(128).compute
    assert more == pytest.approx(tokens * seconds / 1e12, rel=1e-6)
    counted = 2 * states + 3 * (steps * LAYER + attention + steps * output / 2)
    more = drafting.operations(128) - plain.operations(128)
    assert more == pytest.approx(tokens * counted, rel=1e-6)


def test_the_plan_of_time_sums_the_gradients_and_takes_the_step(configure: Configure) -> None:
    """On two copies, each of which sends half of the weights twice and takes the whole step."""
    policy = configure(*GPU, "policy.layout={data_parallel_size: 2}", "policy.draft={}").policy
    head = Eagle3Shape.of(SHAPE)
    size = 4 * head.num_parameters()
    hardware = replace(FREE, domain_rate=1e9, memory_rate=1e9)
    cost = Training(policy, SHAPE, hardware, IDLE, SAME)._draft_optimizer(head)
    assert (cost.link, cost.memory) == pytest.approx((size / 1e9, 8 * size / 1e9))
