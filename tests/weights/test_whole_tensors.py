"""Whole tensors out of buckets from a policy of TP2 x PP2."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.models.layout import hf_tensors
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import RefitFailed
from nemorl.weights.whole_tensors import WholeTensorReceiver, batches
from tests.weights.ranks import SHAPE, TP2_PP2, PolicySide, Threads, model

BUCKET = 4096
TENSORS = hf_tensors(SHAPE)
LARGEST = max(4 * torch.Size(extents).numel() for extents in TENSORS.values())


class Loader:
    """Keeps what it is given, as its own copies."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self.tensors: dict[str, Tensor] = {}
        self.batches: list[int] = []  # bytes
        self.finished = 0
        self.fails_at = -1

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for batch in batches(tensors, self._batch_bytes):
            if len(self.batches) == self.fails_at:
                raise RuntimeError("the loader knows no such tensor")
            self.batches.append(sum(tensor.nbytes for tensor in batch.values()))
            self.tensors |= {name: tensor.clone() for name, tensor in batch.items()}

    def finish(self) -> None:
        self.finished += 1


class EngineSide:
    def __init__(self, batch_bytes: int, **dtypes: str) -> None:
        self.loader = Loader(batch_bytes)
        types = {name: dtypes.get(name.split(".")[-1], "float32") for name in TENSORS}
        self.exchange = WholeTensorReceiver(TENSORS, types, self.loader, device=torch.device("cpu"))


class Setup:
    def __init__(self, batch_bytes: int = BUCKET, **dtypes: str) -> None:
        self.policy = [PolicySide(layout) for layout in TP2_PP2]
        self.engine = EngineSide(batch_bytes, **dtypes)
        self.exchange = WeightExchange(Threads(self.policy), Threads([self.engine]), BUCKET, 30.0)

    def refit(self, version: int, seed: int) -> Any:
        for rank in self.policy:
            rank.train(seed)
        return asyncio.run(self.exchange.refit(version))


def test_every_tensor_arrives_complete_and_once() -> None:
    setup = Setup()
    for version in (1, 2):
        expected = model(version)
        stats = setup.refit(version, seed=version)
        assert setup.engine.loader.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(setup.engine.loader.tensors[name], tensor), name
        assert stats.num_bytes == sum(tensor.nbytes for tensor in expected.values())
        assert setup.engine.loader.finished == version
    assert len(setup.engine.loader.batches) > 20


def test_memory_is_a_batch_and_what_is_under_way() -> None:
    """Senders take turns, so parts of a tensor come near each other: a few of the largest, not the model."""
    setup = Setup()
    setup.refit(1, seed=1)
    whole = sum(4 * torch.Size(extents).numel() for extents in TENSORS.values())
    assert max(setup.engine.loader.batches) <= BUCKET + LARGEST
    assert setup.engine.exchange.peak_bytes < whole / 2


def test_types_may_differ() -> None:
    setup = Setup(weight="bfloat16")
    setup.refit(1, seed=1)
    for name, tensor in model(1).items():
        kind = torch.bfloat16 if name.endswith("weight") else torch.float32
        assert torch.equal(setup.engine.loader.tensors[name], tensor.to(kind)), name


def test_a_loader_that_fails_leaves_partial_weights_until_a_whole_refit() -> None:
    setup = Setup()
    setup.refit(1, seed=1)
    setup.engine.loader.fails_at = len(setup.engine.loader.batches) + 3
    with pytest.raises(RuntimeError, match="no such tensor"):
        setup.refit(2, seed=2)
    assert setup.engine.exchange.corruption is not None
    assert "being brought to version 2" in setup.engine.exchange.corruption
    assert setup.engine.loader.finished == 1
    with pytest.raises(RefitFailed, match="but has received none"):
        setup.engine.exchange.commit(2)
    setup.engine.loader.fails_at = -1
    setup.refit(3, seed=3)
    assert setup.engine.exchange.corruption is None


def test_an_abandoned_update_loads_no_further_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(batch_bytes=1)
    setup.refit(1, seed=1)
    receiver, load = setup.engine.exchange, setup.engine.loader.load

    def abandoned_meanwhile(tensors: Iterator[tuple[str, Tensor]]) -> None:
        load(iter([next(tensors)]))
        receiver.abandon()
        load(tensors)

    monkeypatch.setattr(setup.engine.loader, "load", abandoned_meanwhile)
    num_batches = len(setup.engine.loader.batches)
    with pytest.raises(RefitFailed, match="still receiving when the refit was abandoned"):
        setup.refit(2, seed=2)
    assert len(setup.engine.loader.batches) == num_batches + 1
    assert receiver.corruption is not None
