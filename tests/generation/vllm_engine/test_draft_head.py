"""vLLM's own class of a head for drafts reads what is exported, and computes the same."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemorl.models.create import create_tiny_model
from nemorl.models.eagle3 import write_head
from nemorl.models.eagle3_shape import Eagle3Shape
from tests.models.draft_heads import drawn_head, head_inputs, head_logits
from tests.required import require_vllm

IDS = [1, 3, 4, 8, 12]


@pytest.mark.ci
def test_logits_of_exported_heads_are_those_of_the_formula(tmp_path: Path) -> None:
    """Of one over all tokens and one over some of them."""
    require_vllm()
    model = tmp_path / "model"
    shape = Eagle3Shape.of(create_tiny_model(model, hidden=64, ffn=96, layers=3, heads=2, kv_heads=1))
    embedded, states = head_inputs(shape)
    save_file({"embedded": embedded, "states": states}, tmp_path / "inputs")
    shapes = {"all": shape, "some": replace(shape, draft_vocab_size=len(IDS))}
    expected = {}
    for name, its in shapes.items():
        weights = {key: w.detach().clone() for key, w in drawn_head(its).named_parameters()}
        d2t = {"d2t": torch.tensor(IDS) - torch.arange(len(IDS))} if name == "some" else {}
        write_head(tmp_path / name, its, weights | d2t, model)
        doubles = {key: w.double() for key, w in weights.items()}
        expected[name] = head_logits(its, doubles, embedded.double(), states.double()).float()
    paths = [tmp_path / name for name in ("meeting", "model", "inputs", *shapes)]
    words = [sys.executable, "-m", "tests.generation.vllm_engine.draft_head", *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in shapes:
        with safe_open(tmp_path / f"{name}.logits", framework="pt") as file:
            logits, said = file.get_tensor("logits"), file.metadata()
        assert said["class"] == "Eagle3LlamaForCausalLM"
        assert (said["own lm_head"], said["own embedding"]) == ("True", "False")
        assert str(list(shape.layers)) in said["layers"]
        if name == "some":
            others = [token for token in range(shape.vocab_size) if token not in IDS]
            assert logits[:, others].isneginf().all()
            logits = logits[:, IDS]
        torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=1e-4)
