"""Tracing loaders written for the purpose: what each does with a checkpoint's tensors, its layout says."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from nemorl.generation.vllm_engine.trace import trace_loader, uncovered
from nemorl.generation.vllm_engine.weights import parameters_of, touched_by
from nemorl.models.tensors import local_view

SHAPES = {"q": (4, 6), "k": (2, 6), "up": (6, 8), "words": (5, 6), "norm": (6,)}


class Fused(nn.Module):
    """Rank 1 of 2: fused rows, a transposed column shard, a vocabulary rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(3, 6))
        self.up = nn.Parameter(torch.zeros(4, 6))
        self.words = nn.Parameter(torch.zeros(8, 6))
        self.norm = nn.Parameter(torch.zeros(6))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data[:2].copy_(tensor.narrow(0, 2, 2))
            elif name == "k":
                self.qk.data.narrow(0, 2, 1).copy_(tensor[1:])
            elif name == "up":
                self.up.data.copy_(tensor[:, 4:].t())
            elif name == "words":
                self.words.data[:5] = tensor
                self.words.data[8:].copy_(tensor[5:])  # as a rank does whose rows are padding only
                self.words.data[5:].fill_(0)
            else:
                self.norm.data.copy_(tensor.to(torch.float32))


def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_a_layout_brings_what_the_loader_would() -> None:
    loaded, traced, tensors = Fused(), Fused(), checkpoint()
    loaded.load_weights(tensors.items())
    trace = trace_loader(traced.load_weights, SHAPES, parameters_of(traced), torch.float32)
    assert all(float(p.detach().abs().sum()) == 0 for p in traced.parameters()), "nothing was written"
    assert trace.unclear == {}
    for part in trace.slices:
        local_view(parameters_of(traced), part).copy_(tensors[part.name][part.box])
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(traced.named_parameters())[name])
    assert uncovered(trace, parameters_of(traced)) == {}


def test_a_tensor_is_traced_back_from_its_parameters() -> None:
    model = Fused()
    trace = trace_loader(model.load_weights, SHAPES, parameters_of(model), torch.float32)
    assert [part.name for part in trace.slices if part.param == "qk"] == ["q", "k"]


def test_what_the_loader_computes_is_reported() -> None:
    class Scaling(Fused):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, tensor * 2 if name == "norm" else tensor) for name, tensor in weights)

    model = Scaling()
    trace = trace_loader(model.load_weights, SHAPES, parameters_of(model), torch.float32)
    assert trace.unclear == {"norm": "the loader computes it from tensors of the checkpoint"}


@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        ({**SHAPES, "q2": (4, 6)}, "elements of it come from several tensors of the checkpoint"),
        (
            {name: SHAPES[name] for name in ("q", "up", "words", "norm")},
            "elements of it come from no tensor of the checkpoint and are not zero",
        ),
    ],
    ids=["twice", "never"],
)
def test_a_parameter_is_covered_once(shapes: dict[str, tuple[int, ...]], wrong: str) -> None:
    class Twice(Fused):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name.rstrip("2"), tensor) for name, tensor in weights)

    model = Twice()
    model.qk.data.fill_(1)
    trace = trace_loader(model.load_weights, shapes, parameters_of(model), torch.float32)
    assert uncovered(trace, parameters_of(model)) == {"qk": wrong}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))


def repack(layer: Layer) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().view(2, 3))


def keep_a_copy(layer: Layer) -> None:
    packed = layer.weight.detach() * 1
    layer.matmul = lambda x: x @ packed  # type: ignore[assignment]


def empty(layer: Layer) -> None:
    layer.weight = nn.Parameter(torch.empty(0))


def nothing(layer: Layer) -> None:
    layer.matmul = torch.nn.functional.linear  # type: ignore[assignment]
    layer.size = 3  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (repack, "post-processing changed weight"),
        (empty, "post-processing changed weight"),
        (keep_a_copy, "post-processing keeps memory of its own in matmul"),
        (nothing, None),
    ],
)
def test_post_processing_is_seen(process: object, reason: str | None) -> None:
    model = nn.ModuleDict({"touched": Layer(), "other": Layer()})
    changed = touched_by(lambda: process(model["touched"]), model)  # type: ignore[operator]
    assert changed == ({"touched.weight": reason} if reason else {})


class Attention(nn.Module):
    """As vLLM's latent attention, which has a projection of the module around it."""

    def __init__(self, projection: Layer) -> None:
        super().__init__()
        self.projection = projection


def absorb(attention: Attention) -> None:
    attention.transposed = nn.Parameter(attention.projection.weight.detach().t().contiguous())


def view(attention: Attention) -> None:
    attention.transposed = nn.Parameter(attention.projection.weight.detach().t())


def absorb_in_attribute(attention: Attention) -> None:
    attention.transposed = attention.projection.weight.detach().t().contiguous()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (absorb, "post-processing gave the module other parameters"),
        (absorb_in_attribute, "post-processing keeps memory of its own in transposed"),
        (view, None),
    ],
)
def test_a_copy_that_the_module_around_keeps_is_seen(process: object, reason: str | None) -> None:
    """By the first name of the parameter, under which its slices are. A view of it is no copy."""
    model = nn.ModuleDict({"kv_b_proj": Layer(), "other": Layer()})
    attention = model["attention"] = Attention(model["kv_b_proj"])  # type: ignore[arg-type]
    changed = touched_by(lambda: process(attention), model)  # type: ignore[operator]
    assert changed.pop("attention.transposed", reason) == reason  # which no loader fills
    assert changed == ({"kv_b_proj.weight": reason} if reason else {})
