"""A whole run that trains a layer for further tokens and a head for drafts, and their exports."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemorl.models.eagle3 import read_head
from nemorl.models.eagle3_shape import Eagle3Shape, head_shape
from nemorl.models.registry import load_shape
from tests.models.mtp_models import MiMoConfig, model_of
from tests.run.runs import finish, known_figures, lines, start, write_experiment


def with_further_tokens(like: Path, folder: Path) -> Path:
    """A MiMo of the size of a tiny Llama, with its tokenizer."""
    size = json.loads((like / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    config = MiMoConfig(**{name: size[name] for name in names}, num_nextn_predict_layers=1)
    model_of(config).save_pretrained(folder)
    for file in like.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.slow
def test_layer_and_head_are_trained_and_exported_and_engines_draft_by_the_layer(
    folder: Path, model: Path
) -> None:
    mimo = with_further_tokens(model, folder / "mimo")
    path = write_experiment(
        *(folder, mimo, "further"),
        policy={"multi_token_prediction": {"loss_weight": 0.5}, "draft": {"lr": 1e-2}},
        generation={"speculation": {"method": "mtp"}},
        algorithm={"num_steps": 3, "validation": {}},
        checkpointing={"export_hf": True, "period": 3},
    )
    status, output = finish(start("train", path), 500)
    assert status == 0, output
    steps = lines(folder / "further")
    assert len(steps) == 3
    for step in steps:
        assert step.values["mtp/loss"] > 0
        assert 0 <= step.values["mtp/accepted"] <= 1
        assert 0 <= step.values["draft/accuracy"] <= 1
        assert step.values["draft/grad_norm"] > 0
        assert step.values["logprob_gap/max"] < 1e-4  # engines have the weights that were trained
    assert {name for step in steps for name in step.values} <= known_figures(folder / "further")
    before = load_file(mimo / "model.safetensors")
    after = load_file(folder / "further" / "checkpoints" / "step_00000003" / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    # The engines take the layer's tensors too. Whether they then draft depends on measured times.
    sent = sum(tensor.nbytes for tensor in after.values())
    assert {step.values["refit/gigabytes"] for step in steps if "refit/gigabytes" in step.values} == {
        sent / 1e9
    }
    assert all(0 <= step.values.get("generation/drafts_accepted", 0) <= 1 for step in steps)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith("model.mtp_layers.0.")} <= moved

    checkpoint, head = folder / "further" / "checkpoints" / "step_00000003", folder / "head"
    status, output = finish(start("models", "export", "--draft", str(checkpoint), str(head)), 100)
    assert status == 0, output
    shape = load_shape(mimo)
    assert read_head(head, head_shape(shape, None, head)).keys() == Eagle3Shape.of(shape).tensors().keys()
