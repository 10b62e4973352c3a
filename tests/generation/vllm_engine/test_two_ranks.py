"""An engine of two processes that is updated in place, and what it says when one of them dies."""

import asyncio
import os
import re
import signal
from typing import Any

import pytest
import torch

from nemorl.generation.errors import EngineFailed
from nemorl.generation.types import Completion, SamplingParams
from nemorl.weights.session import RefitFailed
from tests.generation.examples import GREEDY, Prompts, request
from tests.generation.vllm_engine.exchange import checkpoint, exchange_of
from tests.generation.vllm_engine.test_engine import collect, gaps, group


def check_against(engine: Any, network: Any, version: int) -> None:
    """Whatever the engine samples is what transformers makes of the same weights."""
    requests = group("", 3, 10, SamplingParams())
    # Longer than a block of the cache, which must not outlive the weights that filled it.
    requests.append(request(Prompts(13).one(180), "3", SamplingParams(), 10))
    for name, got in engine.run(collect(engine.host, requests)).items():
        assert got.versions.tolist() == [version] * 10
        assert gaps(network, requests[int(name)].prompt, got).max() < 1e-3


def test_two_ranks_sample_what_one_network_does(two: Any, mixture: Any) -> None:
    check_against(two, mixture[1], 0)


def test_each_rank_is_sent_its_part_and_whole_experts(two: Any) -> None:
    layouts = two.host.describe_weights()
    assert len(layouts) == 2
    for layout in layouts:
        whole = {part.name for part in layout.slices if part.param.startswith("whole:")}
        assert len(whole) == 2 * 4 * 3  # layers, experts, matrices
        assert all("mlp.experts." in name for name in whole)
        queries = next(part for part in layout.slices if part.name.endswith("0.self_attn.q_proj.weight"))
        assert queries.size == (4 * 32, 64)  # half of the heads
    first, second = (
        next(part.start for part in layout.slices if part.name.endswith("0.self_attn.o_proj.weight"))
        for layout in layouts
    )
    assert (first, second) == ((0, 0), (0, 128))


def test_an_update_in_place_is_what_the_network_became(two: Any, mixture: Any) -> None:
    folder, network = mixture
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    stats = exchange_of(two, folder, checkpoint(folder, 0.9)).refit(1)
    assert stats.version == two.host.version == 1
    check_against(two, network, 1)


def test_a_torn_engine_answers_nothing_until_a_whole_update(two: Any, mixture: Any) -> None:
    folder, network = mixture
    parameters = checkpoint(folder, 0.9)
    exchange = exchange_of(two, folder, parameters, 20.0)
    last = parameters.popitem()  # found missing after others were sent
    with pytest.raises((RefitFailed, ValueError)):
        exchange.refit(2)
    with pytest.raises(EngineFailed, match="its weights are of two versions"):
        two.host.health()
    with pytest.raises(EngineFailed, match="its weights are of two versions"):
        two.run(collect(two.host, group("", 1)))
    parameters.update([last])
    exchange.refit(2)
    check_against(two, network, 2)


def test_a_dead_worker_is_named(two: Any) -> None:
    pid = next(
        int(what.split()[-1][:-1]) for what in two.host._vllm._processes.values() if "worker 1" in what
    )

    async def main() -> list[Any]:
        waiting = asyncio.create_task(collect(two.host, group("", 2, 150)))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(waiting, return_exceptions=True)

    (failure,) = two.run(main())
    assert isinstance(failure, EngineFailed)
    message = f"generation engine 3 has ended: worker 1 (process {pid}) ended; its log says more"
    assert str(failure) == message
    with pytest.raises(EngineFailed, match=re.escape(message)):
        two.host.health()


def test_no_request_is_taken_by_a_dead_engine(two: Any) -> None:
    async def main() -> dict[str, Completion]:
        return await collect(two.host, [request(Prompts().one(4), "a", GREEDY, 4)])

    with pytest.raises(EngineFailed):
        two.run(main())
