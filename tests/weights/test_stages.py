"""Seconds of a refit by stage: the slow one is named, and no time is counted twice."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.config.algorithm.online import REFIT_METRICS
from nemorl.weights import endpoints
from nemorl.weights.delta import LastSent
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.files import FileSender, StoredVersion
from nemorl.weights.messages import Transport
from nemorl.weights.shared_memory import SocketReceiver
from tests.weights import test_whole_tensors
from tests.weights.ranks import TP2_PP2, EngineSide, PolicySide, Threads, model

BUCKET = 4096
DELAY = 0.3  # seconds
SENDER = {"send_connect", "send_wait", "send_pack", "send_fingerprint"}
RECEIVER = {"receive_connect", "receive_wait", "receive_copy", "receive_fingerprint"}
EVERYWHERE = {*SENDER, *RECEIVER, "commit"}
STAGES: dict[Transport, set[str]] = {
    "shared_memory": EVERYWHERE,
    "gloo": EVERYWHERE,
    "files": {*EVERYWHERE, "receive_read"} - {"receive_wait"},
}


class Setup:
    def __init__(self, folder: Path, transport: Transport, *, delta: bool = False) -> None:
        self.policy = [PolicySide(place) for place in TP2_PP2]
        self.engines = [EngineSide(torch.bfloat16) for _ in range(2)]
        options = TransportOptions(transport, str(folder), delta=delta, full_version_every=3)
        sides = Threads(self.policy), Threads(self.engines)
        self.exchange = WeightExchange(*sides, BUCKET, 30.0, options)

    def seconds(self) -> dict[str, float]:
        for rank in self.policy:
            rank.train(1)
        return dict(asyncio.run(self.exchange.refit(1)).seconds_of_stages)


def late_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Delay the first call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    delays = [DELAY]

    def late(*given: Any, **options: Any) -> Any:
        if delays:
            time.sleep(delays.pop())
        return original(*given, **options)

    monkeypatch.setattr(owner, name, late)


@pytest.mark.parametrize("transport", STAGES)
def test_stages_are_metrics_and_no_time_is_counted_twice(tmp_path: Path, transport: Transport) -> None:
    setup = Setup(tmp_path, transport)
    calls: list[tuple[float, float]] = []  # seconds, and those of stages

    def timed(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timing(session: Any) -> Any:
            began = time.perf_counter()
            report = call(session)
            calls.append((time.perf_counter() - began, sum(report.seconds.values())))
            return report

        return timing

    for rank in setup.policy:
        rank.exchange.send = timed(rank.exchange.send)  # type: ignore[method-assign]
    for engine in setup.engines:
        engine.exchange.receive = timed(engine.exchange.receive)  # type: ignore[method-assign]
    for rank in setup.policy:
        rank.train(1)
    stats = asyncio.run(setup.exchange.refit(1))
    assert stats.seconds_of_stages.keys() == STAGES[transport]
    assert set(stats.metrics) < set(REFIT_METRICS)
    assert len(calls) == 6
    assert all(0 < counted <= seconds for seconds, counted in calls)
    weights = 2 * sum(tensor.numel() for tensor in model(1).values())
    assert stats.max_received_bytes == weights == stats.num_bytes / 2
    assert weights / 4 <= stats.max_sent_bytes <= weights


@pytest.mark.parametrize(
    ("transport", "owner", "function", "stage"),
    [
        ("shared_memory", SocketReceiver, "taken", "send_wait"),
        ("shared_memory", SocketReceiver, "next_bucket", "receive_wait"),
        ("shared_memory", EngineSide, "_use", "commit"),
        ("shared_memory", LastSent, "changes", "send_encode"),
        ("files", FileSender, "_write", "send_wait"),
        ("files", StoredVersion, "_contents", "receive_read"),
        ("files", StoredVersion, "__init__", "receive_connect"),
    ],
)
def test_the_slow_stage_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
    owner: Any,
    function: str,
    stage: str,
) -> None:
    late_once(monkeypatch, owner, function)
    seconds = Setup(tmp_path, transport, delta=True).seconds()
    # A side that waits for another thread may work during the first part of the delay.
    assert seconds[stage] >= DELAY / 2


@pytest.mark.parametrize("side", ["send", "receive"])
def test_slow_fingerprints_are_of_their_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """With files senders come first; of the fingerprints of a refit, the last ones are receivers'."""
    setup = Setup(tmp_path, "files")
    if side == "receive":
        complete = StoredVersion.__init__

        def opened(self: StoredVersion, *given: Any) -> None:
            late_once(monkeypatch, endpoints, "queue_fingerprint")
            monkeypatch.setattr(StoredVersion, "__init__", complete)
            complete(self, *given)

        monkeypatch.setattr(StoredVersion, "__init__", opened)
    else:
        late_once(monkeypatch, endpoints, "queue_fingerprint")
    seconds = setup.seconds()
    assert seconds[f"{side}_fingerprint"] >= DELAY


def test_the_loader_of_an_engine_is_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = test_whole_tensors.Setup()
    late_once(monkeypatch, test_whole_tensors.Loader, "load")
    late_once(monkeypatch, torch.Tensor, "clone")  # in the loader, when it has a tensor
    stats = setup.refit(1, seed=1)
    assert stats.seconds_of_stages["receive_load"] >= 2 * DELAY
    assert set(stats.metrics) < set(REFIT_METRICS)
