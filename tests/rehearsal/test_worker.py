"""The worker code of a policy and of the embedded engine on the pretended device."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.policy import LayoutConfig, NoRecompute
from nemorl.models.layout_rules import layout_problems
from nemorl.models.registry import load_shape, policy_shape, shape_from_config
from nemorl.plan.memory import policy_memory, stage_memory
from nemorl.plan.recompute import fitting_recompute, with_recompute
from nemorl.rehearsal.execution import Kernel
from nemorl.rehearsal.ranks import compare, faults, hollow, planned_parts, rehearse_all
from nemorl.rehearsal.worker import RankReport, pipeline_ranks
from tests.megatron.examples import CONFIGS
from tests.rehearsal import faults as planted
from tests.rehearsal import shared_prompts
from tests.rehearsal.experiments import LLAMA_8B, LLAMA_70B, QWEN3_MOE, VLLM, experiment
from tests.rehearsal.processes import alone
from tests.selection import in_all

PHASES = ("load", "logprobs", "train", "refit", "offload", "decode")
AUTO = {"name": "auto"}
TP2_PP2 = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}
TORCH = "{backend: torch, max_batch_size: 4, max_new_tokens: 16, max_kv_tokens: 1024}"


def rehearsed(experiment: Experiment, ranks: list[int | None]) -> list[RankReport]:
    reports = list(rehearse_all(experiment, ranks))
    assert [fault for report in reports for fault in faults(report)] == []
    return reports


def line_of(comment: str) -> str:
    lines = inspect.getsource(planted).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"{Path(planted.__file__).name}:{number} "


def test_a_fault_in_each_phase_is_found_by_file_and_line(tmp_path: Path) -> None:
    with hollow(experiment(tmp_path)) as sound:
        report = alone(planted.rehearse_with_faults, sound, 0)

    where = [(event.phase, event.location) for event, _ in faults(report)]
    for phase in PHASES:
        for kind in ("wait", "device"):
            line = line_of(f"{kind} in {phase}")
            assert any(p == phase and line in location for p, location in where), (kind, phase, where)
    # All are planted ones, some of which run in two phases.
    assert {location.partition(":")[0] for _, location in where} == {"tests/rehearsal/faults.py"}


def test_both_stages_run_from_load_to_decode_without_faults(tmp_path: Path) -> None:
    sound = experiment(tmp_path, layout=TP2_PP2)

    first, last = rehearsed(sound, [0, 2])

    assert set(first.peaks) == set(last.peaks) == {"build", "onload", *PHASES}
    assert "torch varlen_attn" in first.header["attention kernel"]
    in_micro_batches = {
        event.location.partition(" ")[2] for event, _ in first.synchronizations if event.in_micro_batch
    }
    # Megatron's exchange between stages; the product itself waits nowhere.
    assert in_micro_batches == {"(_communicate_shapes)", "(_communicate)"}
    kernels, attention = dict(first.kernels), "torch_attn::_varlen_attn"
    forward, backward = Kernel("train", attention, False), Kernel("train", f"{attention}_backward", True)
    # A stage has two layers, and the first one two micro-batches in flight.
    assert (kernels[forward], kernels[backward]) == (4, 4)
    for report in (first, last):
        comparison = compare(report, sound, "train")
        for part in ("weights", "gradients", "optimizer", "reference"):
            measured, plan = comparison.parts[part]
            assert measured == pytest.approx(plan, rel=1e-3), part
        # Gradients and the optimizer have left, and the weights, which sample, have not.
        kept = sum(comparison.parts[part][0] for part in ("weights", "reference"))
        assert kept <= report.left < 1.2 * kept


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-rope3", {}),
        ("llama-rope3", {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
        ("gpt-oss", {}),
        ("deepseek-v3", {"data_parallel_size": 2, "expert_parallel_size": 2}),
    ],
)
def test_shared_prompts_are_computed_once_without_faults(
    tmp_path: Path, model: str, layout: dict[str, Any]
) -> None:
    """By the rows of queries and keys that a GPU's kernel takes; no layer keeps the keys of its rows."""
    given = config_of(model) | {"max_position_embeddings": 8192}
    sound = experiment(tmp_path, given, generation=VLLM, layout=layout, micro_batch_tokens=1024)

    with hollow(sound) as placed:
        report, are_trees = alone(shared_prompts.rehearse_with_shared_prompts, placed, 0)

    assert are_trees == {True}
    assert faults(report) == []


def test_an_engine_decodes_and_takes_weights(tmp_path: Path) -> None:
    (report,) = rehearsed(experiment(tmp_path, generation=TORCH), [None])

    assert set(report.peaks) == {"build", "load", "decode", "refit"}
    # One copy to the host for each sampled token of the batch.
    assert [(e.location.partition(" ")[2], n) for e, n in report.synchronizations if e.phase == "decode"] == [
        ("(read)", 4)
    ]


LAYOUTS = {
    "tp4-pp2": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    "pp2-vpp2-dp2": {
        "pipeline_parallel_size": 2,
        "virtual_pipeline_parallel_size": 2,
        "data_parallel_size": 2,
    },
    "tp2sp-cp2-dp2": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "data_parallel_size": 2,
    },
}
EXPERTS = {
    "tp2sp-pp2-ep4": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    },
    "tp2sp-dp32-ep4-etp2": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "data_parallel_size": 32,
        "expert_parallel_size": 4,
        "expert_tensor_parallel_size": 2,
    },
}
FAMILIES = {
    "llama-rope3": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}
WITH_EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")


def config_of(family: str) -> dict[str, Any]:
    return CONFIGS[family].to_dict() | {"architectures": [FAMILIES[family]]}


def is_possible(family: str, layout: str) -> bool:
    shape = shape_from_config(config_of(family), family)
    return not any(layout_problems(shape, LayoutConfig.model_validate(EXPERTS[layout])))


CASES = [
    *((family, "tp2sp-cp2-dp2") for family in FAMILIES),
    *((family, layout) for family in WITH_EXPERTS for layout in EXPERTS if is_possible(family, layout)),
]
# Attention of each kind, and experts in each layout.
IN_CI = [
    *((family, "tp2sp-cp2-dp2") for family in ("qwen2", "gpt-oss")),
    ("deepseek-v3", "tp2sp-pp2-ep4"),
    ("qwen3-moe", "tp2sp-dp32-ep4-etp2"),
    *(("llama-rope3", layout) for layout in LAYOUTS if layout != "tp2sp-cp2-dp2"),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "layout"), [*IN_CI, *in_all(*(case for case in CASES if case not in IN_CI))]
)
def test_families_and_layouts(tmp_path: Path, family: str, layout: str) -> None:
    axes = {**LAYOUTS, **EXPERTS}[layout]
    config = config_of(family)
    with_cache = "cp" not in layout and "vpp" not in layout
    sound = experiment(
        tmp_path,
        config,
        **({} if with_cache else {"generation": VLLM}),
        layout=axes,
        max_sequence_length=48,
        micro_batch_tokens=96,
    )
    last = pipeline_ranks(sound.policy.layout)[-1]

    for report in rehearsed(sound, sorted({1, last})):
        assert report.peaks["train"].num_bytes > report.peaks["load"].num_bytes


@pytest.mark.ci
def test_the_plan_of_a_large_model_is_right_within_a_tenth(tmp_path: Path) -> None:
    layout = {
        "tensor_parallel_size": 8,
        "sequence_parallel": True,
        "pipeline_parallel_size": 4,
        "data_parallel_size": 32,
    }
    sound = experiment(
        tmp_path,
        LLAMA_70B,
        generation=VLLM,
        layout=layout,
        max_sequence_length=4096,
        micro_batch_tokens=4096,
        recompute={"name": "full"},
    )
    (report,) = rehearsed(sound, [1023])

    comparison = compare(report, sound)
    assert comparison.phase == "train"
    assert abs(comparison.difference) < 0.1


NONE = {"name": "none"}
TWO_STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 64}
DRAFTING = {
    "one stage": ({}, NONE),
    "recomputed": ({}, {"name": "full"}),
    "two stages": (TWO_STAGES, NONE),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", ["one stage", *in_all("recomputed", "two stages")])
def test_the_plan_of_a_head_for_drafts_is_right_within_a_tenth(tmp_path: Path, case: str) -> None:
    layout, recompute = DRAFTING[case]
    sound = experiment(
        tmp_path,
        LLAMA_8B,
        generation=VLLM,
        layout=layout,
        recompute=recompute,
        draft={"depth": 3},
        max_sequence_length=4096,
        micro_batch_tokens=8192,
    )
    plain = sound.model_copy(update={"policy": sound.policy.model_copy(update={"draft": None})})
    ranks = pipeline_ranks(sound.policy.layout)
    for report in rehearsed(sound, [*ranks]):
        comparison = compare(report, sound, "train")
        without = planned_parts(stage_memory(plain, policy_shape(plain.policy), report.stage), "train")
        assert comparison.measured > sum(without.values()) + 10**8  # bytes of the head are compared
        assert abs(comparison.difference) < 0.1, comparison


WITHOUT_FULL_RECOMPUTATION = {
    "none": (LLAMA_8B, {}, NONE),
    "none-tp2sp": (LLAMA_8B, {"tensor_parallel_size": 2, "sequence_parallel": True}, NONE),
    "attention": (LLAMA_8B, {}, {"name": "selective"}),
    "norms-mlp": (LLAMA_8B, {}, {"name": "selective", "modules": ["layernorm", "mlp"]}),
    "experts-none": (QWEN3_MOE, {"expert_parallel_size": 4}, NONE),
    "experts-none-tp2sp": (
        QWEN3_MOE,
        {
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
        NONE,
    ),
    "experts-norms": (
        QWEN3_MOE,
        {"expert_parallel_size": 4},
        {"name": "selective", "modules": ["layernorm"]},
    ),
    "experts": (QWEN3_MOE, {"expert_parallel_size": 4}, {"name": "selective", "modules": ["moe"]}),
}


@pytest.mark.ci
def test_a_setting_that_the_plan_chooses_fits(tmp_path: Path) -> None:
    """Within the tenth by which plans may be off, the less memory the more is recomputed."""
    auto = experiment(
        tmp_path,
        LLAMA_8B,
        generation=VLLM,
        layout={"data_parallel_size": 8},
        max_sequence_length=4096,
        micro_batch_tokens=16384,
        recompute=AUTO,
    )
    shape = load_shape(auto.policy.model_path)
    most = policy_memory(with_recompute(auto, NoRecompute()), shape).on_device
    chosen = []
    for share in (1.0, 0.9, 0.7):
        settled = fitting_recompute(auto, shape, round(share * most))
        (report,) = rehearsed(settled, [0])
        assert compare(report, settled).measured < 1.1 * share * most
        chosen.append(settled.policy.recompute.described)
    assert chosen[0] == "nothing"
    assert len(set(chosen)) == 3


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        *in_all(({}, NONE)),
        ({"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2}, NONE),
        *in_all(({}, {"name": "full"})),
    ],
)
def test_layers_for_further_tokens_are_planned_within_a_tenth(
    tmp_path: Path, layout: dict[str, Any], recompute: dict[str, Any]
) -> None:
    """Of a model of a few layers, among which one more counts, in its last stage."""
    model = LLAMA_8B | {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": 4}
    sound = experiment(
        tmp_path,
        model | {"num_nextn_predict_layers": 1},
        generation=VLLM,
        layout={"data_parallel_size": 8, **layout},
        max_sequence_length=4096,
        micro_batch_tokens=16384,
        multi_token_prediction={"loss_weight": 0.1},
        recompute=recompute,
    )
    (report,) = rehearsed(sound, [sound.policy.layout.world_size - 1])

    comparison = compare(report, sound, "train")
    for part in ("weights", "gradients", "optimizer"):
        measured, plan = comparison.parts[part]
        assert measured == pytest.approx(plan, rel=1e-3), part
    assert abs(comparison.difference) < 0.1, comparison.parts


@pytest.mark.ci
@pytest.mark.parametrize("case", WITHOUT_FULL_RECOMPUTATION)
def test_the_plan_of_large_layers_is_right_within_a_tenth(tmp_path: Path, case: str) -> None:
    """With as many tokens as let activations take more than half."""
    model, layout, recompute = WITHOUT_FULL_RECOMPUTATION[case]
    sound = experiment(
        tmp_path,
        model,
        generation=VLLM,
        layout={"data_parallel_size": 8, **layout},
        max_sequence_length=4096,
        micro_batch_tokens=16384,
        recompute=recompute,
    )
    (report,) = rehearsed(sound, [0])

    comparison = compare(report, sound, "train")
    assert abs(comparison.difference) < 0.1, comparison.parts


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "recompute", "layers", "freed"),
    [
        # Of 4 layers 2 are left.
        ({"data_parallel_size": 8}, NONE, 3, 2),
        # Of the inputs of 4 layers, of two micro-batches in flight, 2 are left. The peak is a layer further
        # down in the backward pass, where another gradient is held.
        ({"data_parallel_size": 8, **TP2_PP2}, {"name": "full"}, 4, 5),
    ],
)
def test_offloaded_activations_leave_the_device_and_are_not_waited_for(
    tmp_path: Path, layout: dict[str, Any], recompute: dict[str, Any], layers: int, freed: int
) -> None:
    """What the plan says of device and host, and nothing of the product waits in a micro-batch."""
    fields: dict[str, Any] = {"layout": layout, "recompute": recompute, "generation": VLLM}
    fields |= {"max_sequence_length": 4096, "micro_batch_tokens": 16384}
    model = LLAMA_8B | {"num_hidden_layers": 4 * layout.get("pipeline_parallel_size", 1)}
    stayed = experiment(tmp_path / "stayed", model, **fields)
    left = experiment(tmp_path / "left", model, offload_activations={"layers": layers}, **fields)
    shape = load_shape(left.policy.model_path)
    planned = [stage_memory(one, shape, 0) for one in (stayed, left)]

    (before,), (after,) = rehearsed(stayed, [0]), rehearsed(left, [0])

    assert abs(compare(after, left, "train").difference) < 0.1
    assert planned[1].activations_on_host == pytest.approx(after.activations_on_host, rel=0.1)
    measured = before.peaks["train"].num_bytes - after.peaks["train"].num_bytes
    of_layer = planned[0].activations / 4 if recompute == NONE else 16384 * 4096 / 2 * 2
    assert measured == pytest.approx(freed * of_layer, rel=0.02)
    waits = {event.location.partition(" ")[2] for event, _ in after.synchronizations if event.in_micro_batch}
    assert waits <= {"(_communicate_shapes)", "(_communicate)"}
