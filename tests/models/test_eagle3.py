"""The EAGLE-3 head: its module by the paper's formula, and folders that cannot be read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.models.create import create_tiny_model
from nemorl.models.eagle3 import read_d2t, read_head, write_head
from nemorl.models.eagle3_shape import Eagle3Shape, head_shape
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.registry import load_shape
from nemorl.models.rope import RotaryTable
from tests.models.draft_heads import TOKENS, drawn_head, head_inputs, head_logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_tiny_model(folder, hidden=64, ffn=96, layers=3, heads=2, kv_heads=1)
    return folder


def test_the_module_computes_the_formula(model: Path) -> None:
    shape = Eagle3Shape.of(load_shape(model))
    head, (embedded, states) = drawn_head(shape), head_inputs(shape)
    assert {name: tuple(w.shape) for name, w in head.state_dict().items()} == shape.tensors()
    table = RotaryTable(
        shape.head_dim, shape.rope, max_positions=TOKENS, dtype=torch.float32, device=torch.device("cpu")
    )
    cos, sin = table.at(torch.arange(TOKENS))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((second, first), -1) * sin

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (rotated(query), rotated(key), value))
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(0, 1)
            .flatten(1)
        )

    found = head.lm_head(head.norm(head(embedded, head.combined(states), attend)))
    weights = {name: w.detach().double() for name, w in head.named_parameters()}
    expected = head_logits(shape, weights, embedded.double(), states.double())
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)


def test_layers_are_those_of_vllm_or_the_last_three(model: Path) -> None:
    shape = load_shape(model)

    def layers(count: int) -> tuple[int, ...]:
        return Eagle3Shape.of(replace(shape, num_layers=count)).layers

    assert layers(28) == (2, 14, 25)
    assert layers(7) == (2, 3, 4)
    assert layers(2) == (0, 1, 2)


def test_folders_that_are_no_head_of_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    of_model = load_shape(model)
    shape = Eagle3Shape.of(of_model)
    with pytest.raises(UnsupportedModel, match="a head for drafts is a LlamaForCausalLMEagle3"):
        head_shape(of_model, None, model)

    def written(name: str, **fields: object) -> Path:
        write_head(tmp_path / name, shape, dict(drawn_head(shape).state_dict()), model)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return tmp_path / name

    assert head_shape(of_model, None, written("same")) == shape
    for name, fields, reason in (
        ("two", {"num_hidden_layers": 2}, "num_hidden_layers is 2; for LlamaForCausalLMEagle3 only 1"),
        ("normed", {"norm_before_fc": True}, "norm_before_fc is True"),
        ("other", {"vocab_size": 99}, "is of another model"),
        ("four", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]}, "only three hidden states"),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            head_shape(of_model, None, written(name, **fields))
    with pytest.raises(UnsupportedModel, match="is of another model"):
        head_shape(of_model, (0, 2, 3), tmp_path / "same")
    weights = drawn_head(shape).state_dict()
    del weights["fc.weight"]
    write_head(tmp_path / "without", shape, {**weights, "further": torch.zeros(1)}, model)
    with pytest.raises(BrokenModelFolder, match=r"holds no tensor 'fc\.weight' of a head for drafts"):
        read_head(tmp_path / "without", shape)
    fewer = replace(shape, draft_vocab_size=2)
    for number, d2t in enumerate(([0, 99], [5, 2], [0, 0, 0])):
        rows = {**drawn_head(fewer).state_dict(), "d2t": torch.tensor(d2t)}
        write_head(tmp_path / f"d2t{number}", fewer, rows, model)
        with pytest.raises(UnsupportedModel, match="d2t does not name 2 tokens of the model in their order"):
            read_d2t(tmp_path / f"d2t{number}", fewer)
