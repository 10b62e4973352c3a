"""A Hugging Face folder, through any layout of policy ranks, and back: bit for bit."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import (
    PolicyRank,
    chunk_of,
    chunk_prefix,
    hf_tensors,
    padded_vocab_size,
    policy_slices,
)
from nemorl.models.tensors import local_view
from tests.models.megatron_ranks import empty_parameters, ranks
from tests.models.tiny_models import TinyModel

LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (8, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 4)]


def layout(tp_size: int = 1, pp_size: int = 1) -> LayoutConfig:
    return LayoutConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)


def load(tiny: TinyModel, rank: PolicyRank) -> dict[str, Tensor]:
    parameters = empty_parameters(tiny.shape, rank)
    HfFolder(tiny.folder).load_into(parameters, policy_slices(tiny.shape, rank))
    return parameters


def test_names_and_shapes_are_those_of_transformers(tiny: TinyModel) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in tiny.tensors.items()}
    assert hf_tensors(tiny.shape) == expected


@pytest.mark.parametrize(("tp_size", "pp_size", "ep_size"), LAYOUTS)
def test_every_layout_gives_the_folder_back(
    tiny: TinyModel, tp_size: int, pp_size: int, ep_size: int
) -> None:
    gathered = {name: torch.full_like(tensor, torch.nan) for name, tensor in tiny.tensors.items()}
    for rank in ranks(tp_size, pp_size, ep_size):
        parameters = load(tiny, rank)
        for part in policy_slices(tiny.shape, rank):
            box = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
            gathered[part.name].view(part.shape)[box] = local_view(parameters, part)
    for name, tensor in tiny.tensors.items():
        assert torch.equal(gathered[name], tensor), name


@pytest.mark.parametrize(("tp_size", "pp_size", "ep_size"), LAYOUTS)
def test_every_local_element_is_loaded_but_the_padding(
    tiny: TinyModel, tp_size: int, pp_size: int, ep_size: int
) -> None:
    """101 tokens over 2 or 4 ranks leave 1 or 3 rows of padding, on the last rank."""
    for rank in ranks(tp_size, pp_size, ep_size):
        padding = padded_vocab_size(tiny.shape, tp_size) - 101 if rank.tp_rank == tp_size - 1 else 0
        for name, parameter in load(tiny, rank).items():
            holds_vocabulary = "word_embeddings" in name or "output_layer" in name
            expected = padding * tiny.shape.hidden_size if holds_vocabulary else 0
            assert int(parameter.isnan().sum()) == expected, (rank, name)


def test_query_key_and_value_are_interleaved_per_key_value_head(tiny_grouped: TinyModel) -> None:
    """Megatron's order written out: [4 groups, (2 queries, 1 key, 1 value), head, hidden], cut over ranks."""
    attention = "model.layers.3.self_attn."
    kind = ("weight", "bias") if tiny_grouped.shape.qkv_bias else ("weight",)
    for suffix in kind:
        q, k, v = (tiny_grouped.tensors[f"{attention}{x}_proj.{suffix}"] for x in "qkv")
        head, rest = tiny_grouped.shape.head_dim, q.shape[1:]
        grouped = torch.cat(
            (q.view(4, 2, head, *rest), k.view(4, 1, head, *rest), v.view(4, 1, head, *rest)), dim=1
        )
        shards = grouped.reshape(-1, *rest).chunk(2)
        for tp_rank in range(2):
            parameters = load(tiny_grouped, PolicyRank(layout(2, 2), tp_rank, pp_rank=1))
            fused = parameters[f"decoder.layers.1.self_attention.linear_qkv.{suffix}"]
            assert torch.equal(fused, shards[tp_rank])


def test_gate_and_up_follow_each_other_on_every_rank(tiny_with_mlp: TinyModel) -> None:
    gate, up = (tiny_with_mlp.tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for tp_rank in range(4):
        fused = load(tiny_with_mlp, PolicyRank(layout(4), tp_rank))["decoder.layers.0.mlp.linear_fc1.weight"]
        assert torch.equal(fused, torch.cat((gate.chunk(4)[tp_rank], up.chunk(4)[tp_rank])))


def test_row_parallel_linears_are_cut_by_columns(tiny_with_mlp: TinyModel) -> None:
    output, down = (
        tiny_with_mlp.tensors[f"model.layers.0.{x}.weight"] for x in ("self_attn.o_proj", "mlp.down_proj")
    )
    for tp_rank in range(2):
        parameters = load(tiny_with_mlp, PolicyRank(layout(2), tp_rank))
        projection = parameters["decoder.layers.0.self_attention.linear_proj.weight"]
        assert torch.equal(projection, output.chunk(2, dim=1)[tp_rank])
        assert torch.equal(
            parameters["decoder.layers.0.mlp.linear_fc2.weight"], down.chunk(2, dim=1)[tp_rank]
        )


def test_the_last_stage_holds_the_head_or_a_copy_of_the_embedding(tiny: TinyModel) -> None:
    tied = tiny.shape.tied_embeddings
    head = tiny.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    last = load(tiny, PolicyRank(layout(pp_size=4), pp_rank=3))
    assert torch.equal(last["output_layer.weight"], head)
    names = {part.param for part in policy_slices(tiny.shape, PolicyRank())}
    assert ("output_layer.weight" in names) == (not tied)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (PolicyRank(layout(3)), "tensor_parallel_size is 3: it must divide the model's 8 attention heads"),
        (PolicyRank(layout(16)), "tensor_parallel_size is 16: it must divide the model's 8 attention heads"),
        (PolicyRank(layout(pp_size=3)), "pipeline_parallel_size is 3: it must divide the model's 4 layers"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(
    tiny_llama: TinyModel, rank: PolicyRank, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_slices(tiny_llama.shape, rank)


def test_parameters_are_named_after_their_run_of_layers(tiny_llama: TinyModel) -> None:
    """Two stages with two runs of one layer each: the first stage has layers 0 and 2."""
    interleaved = LayoutConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    down = {
        part.param: part.name
        for part in policy_slices(tiny_llama.shape, PolicyRank(interleaved))
        if "down_proj" in part.name
    }
    second = f"{chunk_prefix(1)}decoder.layers.0.mlp.linear_fc2.weight"
    assert down == {
        "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
        second: "model.layers.2.mlp.down_proj.weight",
    }
    assert [chunk_of(param) for param in down] == [
        (0, "decoder.layers.0.mlp.linear_fc2.weight"),
        (1, "decoder.layers.0.mlp.linear_fc2.weight"),
    ]


@pytest.mark.parametrize(("tokens", "last"), [(5, [[1], []]), (6, [[2], []]), (7, [[2], [1]])])
def test_more_ranks_than_vocabulary_leave_some_without_a_row(
    tiny_llama: TinyModel, tokens: int, last: list[list[int]]
) -> None:
    """Four ranks have two rows each, of which those beyond the vocabulary are padding."""
    shape = dataclasses.replace(tiny_llama.shape, vocab_size=tokens)
    rows = [
        [
            part.size[0]
            for part in policy_slices(shape, PolicyRank(layout(4), rank))
            if part.name == "lm_head.weight"
        ]
        for rank in range(4)
    ]
    assert rows == [[2], [2], *last]
