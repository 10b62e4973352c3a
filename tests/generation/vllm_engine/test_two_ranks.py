"""An engine of two processes that is updated in place, and what it says when one of them dies."""

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nemorl.generation.types import Completion, EngineFailed, SamplingParams
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import RefitFailed
from nemorl.weights.shared_memory import SocketSender
from tests.generation.examples import GREEDY, Prompts, request
from tests.generation.vllm_engine.exchange import Receivers, checkpoint, exchange_of
from tests.generation.vllm_engine.policy import Policy, all_fingerprints, changed
from tests.generation.vllm_engine.test_engine import collect, gaps, group, until_sampled


def _listening(process: int) -> list[str]:
    """Addresses at which a process takes TCP connections."""
    found = psutil.Process(process).net_connections("tcp")
    return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


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


def test_no_one_else_reaches_its_processes(two: Any) -> None:
    hosts = {host for process in two.processes.values() for host in _listening(process)}
    assert hosts == {"127.0.0.1"}


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
    stats = asyncio.run(exchange_of(two, folder, checkpoint(folder, 0.9)).refit(1))
    assert stats.version == two.host.version == 1
    check_against(two, network, 1)


@pytest.mark.parametrize("transport", ["gloo", "files", "shared_memory"])
def test_a_sharded_policy_reaches_both_ranks(two: Any, mixture: Any, tmp_path: Path, transport: Any) -> None:
    """Through shared memory and files it sends what changed only: a fiftieth, in float32 too."""
    folder, network = mixture
    receivers = Receivers(two)
    policy = Policy(folder)
    options = TransportOptions(transport, str(tmp_path), delta=transport != "gloo", full_version_every=10)
    exchange = WeightExchange(policy, receivers, 2**14, 60.0, options)
    network.save_pretrained(tmp_path / "before")
    after = changed(tmp_path / "before", tmp_path / "after")
    version = two.host.version
    for now in (tmp_path / "before", after):
        policy.load(now)
        stats = asyncio.run(exchange.refit(two.host.version + 1))
        if transport != "files":  # of which the ranks check by themselves what they have read
            found = [report.fingerprints for report in receivers.reports]
            assert found == all_fingerprints(now, two.host.describe_weights())
    assert (stats.num_bytes < 0.05 * stats.num_bytes_whole) == (transport != "gloo")
    network.load_state_dict(type(network).from_pretrained(after).state_dict())
    check_against(two, network, version + 2)


def test_a_partial_engine_answers_nothing_until_a_whole_update(two: Any, mixture: Any) -> None:
    folder, network = mixture
    parameters = checkpoint(folder, 0.9)
    exchange = exchange_of(two, folder, parameters, 20.0)
    version = two.host.version + 1
    last = parameters.popitem()  # found missing after others were sent
    with pytest.raises((RefitFailed, ValueError)):
        asyncio.run(exchange.refit(version))
    assert "its weights are of two versions" in two.host.health().corruption
    waiting = two.submit(collect(two.host, group("torn", 1)))
    parameters.update([last])
    assert not waiting.done()
    asyncio.run(exchange.refit(version))
    assert two.host.health().corruption is None
    for answer in waiting.result(60).values():
        assert set(answer.versions.tolist()) == {version}
    with torch.no_grad():
        network.load_state_dict(type(network).from_pretrained(folder).state_dict())
        for parameter in network.parameters():
            parameter.mul_(0.9)
    check_against(two, network, version)


def test_a_worker_that_dies_in_an_update_is_named(
    two: Any, mixture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = two.processes["worker 1"]
    folder, _ = mixture
    policy = Policy(folder)
    exchange = WeightExchange(policy, Receivers(two), 2**14, 60.0)
    publish = SocketSender.publish

    def publish_and_kill(sender: SocketSender, number: int, num_bytes: int) -> None:
        if number == 3:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        publish(sender, number, num_bytes)

    two.run(two.host.stats())
    waiting = two.submit(collect(two.host, group("", 2, 150)))
    two.run(until_sampled(two.host, 4))
    message = f"generation engine 3 has ended: worker 1 (process {pid}) ended"
    left = [two.host._folder, two.host._rendezvous]
    assert all(path.exists() for path in left)
    monkeypatch.setattr(SocketSender, "publish", publish_and_kill)
    with pytest.raises(RefitFailed, match=re.escape(message)):
        asyncio.run(exchange.refit(two.host.version + 1))
    failure = waiting.exception(60)
    assert isinstance(failure, EngineFailed)
    assert str(failure).startswith(message)
    assert not any(path.exists() for path in left)
    with pytest.raises(EngineFailed, match=re.escape(message)):
        two.host.health()


def test_no_request_is_taken_by_a_dead_engine(two: Any) -> None:
    async def main() -> dict[str, Completion]:
        return await collect(two.host, [request(Prompts().one(4), "a", GREEDY, 4)])

    with pytest.raises(EngineFailed):
        two.run(main())
