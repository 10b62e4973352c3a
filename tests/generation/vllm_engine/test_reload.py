"""Updates through vLLM's own loader, which takes each tensor as it arrives (`update: reload`)."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import RefitFailed, RefitSession, SendReport
from tests.generation.vllm_engine.conftest import Running
from tests.generation.vllm_engine.exchange import Receivers, Sender, of_network
from tests.generation.vllm_engine.test_engine import collect, gaps, group


@pytest.fixture
def engine(dense: Any) -> Iterator[Running]:
    running = Running(dense[0], max_num_batched_tokens=200, update="reload")
    yield running
    running.close()


def test_tensors_stream_into_the_loader_and_a_failure_is_repaired(engine: Running, dense: Any) -> None:
    folder, network = dense[0], copy.deepcopy(dense[1])
    sizes = hf_tensors(load_shape(folder))
    (layout,) = engine.host.describe_weights()
    assert [part.size for part in layout.slices] == list(sizes.values())
    assert not layout.takes_changes  # it keeps no copy
    sender = Sender(folder, of_network(folder, network))
    exchange = WeightExchange(sender, Receivers(engine), 2**14, 60.0)
    requests = group("", 3)

    def refit(version: int, scale: float) -> int:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(scale)
        return asyncio.run(exchange.refit(version)).num_bytes

    def largest_gap() -> float:
        found = engine.run(collect(engine.host, requests))
        assert {version for one in found.values() for version in one.versions} == {engine.host.version}
        return float(max(gaps(network, one.prompt, found[one.id]).max() for one in requests))

    assert refit(1, 0.9) == sum(4 * np.prod(size) for size in sizes.values())
    assert largest_gap() < 1e-3
    send, part = sender.send, sender._own._part
    assert part is not None
    last = part.buckets[-1].slices[-1].name  # the tensors before it are loaded

    async def dying(session: RefitSession) -> Sequence[SendReport]:
        whole = sender.parameters.pop(last)
        try:
            return await send(session)
        finally:
            sender.parameters[last] = whole

    sender.send = dying  # type: ignore[method-assign]
    with pytest.raises((RefitFailed, ValueError)):
        refit(2, 0.9)
    assert "being brought to version 2 through its loader" in engine.host.corruption
    sender.send = send  # type: ignore[method-assign]
    refit(3, 1.0)
    assert engine.host.corruption is None
    assert largest_gap() < 1e-3
