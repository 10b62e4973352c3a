"""Heads for drafts that a model or another setting rules out, and their memory."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.errors import ConfigError, Problem
from nemorl.models.eagle3 import write_head
from nemorl.models.eagle3_shape import Eagle3Shape
from nemorl.models.registry import load_shape
from nemorl.plan.memory import stage_memory
from nemorl.plan.problems import plan_run
from tests.config.experiments import refuses, write
from tests.plan.conftest import Configure
from tests.plan.models import write_model
from tests.plan.test_recompute import machine

ON = "policy.draft={lr: 1e-4}"
SECTION = {"lr": 1e-4, "layers": None, "model_path": None}


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
