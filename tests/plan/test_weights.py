"""A model folder is known by the headers of its weights: what is missing, cut off or of another model."""

import json
from pathlib import Path

import pytest

from nemorl.models.create import create_tiny_model
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.plan.problems import plan_run, weight_problems
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG, write_weights
from tests.plan.test_fit import ROOMY


def only_problem(model: Path) -> str:
    (problem,) = weight_problems(model)
    return problem.fix


def test_a_model_written_by_safetensors_itself_is_sound(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "tiny", hidden=32, ffn=64, layers=2, heads=4, kv_heads=2)

    assert list(weight_problems(tmp_path / "tiny")) == []


def test_the_plan_names_the_field_and_the_folder(configure: Configure, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 7}))

    (problem,) = plan_run(configure(), ROOMY).problems

    assert (problem.field, problem.value) == ("policy.model_path", str(model))
    assert problem.fix.startswith("9 of the model's 66 tensors are missing, first model.layers.6.")


def test_weights_of_another_shape_are_of_another_model(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 256}))

    problem = only_problem(model)

    assert (
        "model.layers.0.mlp.gate_proj.weight has the shape [384, 128], and config.json says [256, 128]"
        in problem
    )


def test_quantized_weights_are_reported(model: Path) -> None:
    write_weights(model / "model.safetensors", hf_tensors(load_shape(model)), dtype="F8_E4M3")

    assert "is of type F8_E4M3, and weights may be F32, BF16, F16" in only_problem(model)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (0, "is not a safetensors file"),
        (20, "is not a safetensors file"),
        (100_000, "is truncated (100000 of "),
    ],
)
def test_a_file_that_was_cut_off_is_reported(model: Path, size: int, problem: str) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(size)

    assert f"{model}/model.safetensors {problem}" in only_problem(model)


def test_weights_in_several_files_are_looked_up_by_their_index(model: Path) -> None:
    tensors = hf_tensors(load_shape(model))
    (model / "model.safetensors").unlink()
    halves = {
        "a.safetensors": dict(list(tensors.items())[:30]),
        "b.safetensors": dict(list(tensors.items())[30:]),
    }
    for name, half in halves.items():
        write_weights(model / name, half)
    weight_map = {tensor: name for name, half in halves.items() for tensor in half}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert list(weight_problems(model)) == []
    (model / "b.safetensors").unlink()
    assert f"{model}/b.safetensors cannot be read: No such file or directory" in only_problem(model)


@pytest.mark.parametrize("text", ["", "[]", '{"model": {"vocab"', "{}"])
def test_a_tokenizer_that_cannot_be_read_is_reported(configure: Configure, model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)

    (problem,) = plan_run(configure(), ROOMY).problems

    assert (problem.field, problem.value) == ("policy.model_path", str(model))
    assert "its tokenizer.json is not what the tokenizers library writes" in problem.fix
