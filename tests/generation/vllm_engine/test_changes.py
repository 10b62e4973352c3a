"""Changes from a policy of two ranks into an engine that continues sampling. Float32 travels the same."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemorl.weights.delta import LastSent
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import CorruptWeights, RefitFailed
from tests.generation.vllm_engine.exchange import Receivers
from tests.generation.vllm_engine.policy import Policy, all_fingerprints, changed
from tests.generation.vllm_engine.test_engine import PLAIN, collect, gaps, group

BUCKET = 2**14


class Setup:
    """An engine, the folder that it has loaded, and another folder that differs a little."""

    def __init__(self, engine: Any, folder: Path, other: Path, network: Any) -> None:
        self.engine = engine
        self.folders = folder, other
        self._networks = network, copy.deepcopy(network)
        self._networks[1].load_state_dict(load_file(other / "model.safetensors"), strict=False)
        self.policy = Policy(folder)
        self.receivers = Receivers(engine)
        self.exchange = exchange_of(self.policy, self.receivers)

    def refit(self, which: int) -> float:
        """To the next version, with one of the folders' weights; the share of a full refit that it took."""
        self.policy.load(self.folders[which])
        stats = asyncio.run(self.exchange.refit(self.engine.host.version + 1))
        return stats.num_bytes / stats.num_bytes_whole

    def check(self, which: int) -> None:
        """The engine holds a folder's weights and samples with them."""
        layouts = self.engine.host.describe_weights()
        found = [report.fingerprints for report in self.receivers.reports]
        assert found == all_fingerprints(self.folders[which], layouts)
        self.check_sampling(which)

    def check_sampling(self, which: int) -> None:
        """It samples with them."""
        requests = group("", 3, 10, PLAIN)
        for name, got in self.engine.run(collect(self.engine.host, requests)).items():
            assert set(got.versions.tolist()) == {self.engine.host.version}
            prompt = requests[int(name)].prompt
            assert gaps(self._networks[which], prompt, got).max() < 1e-3
            assert gaps(self._networks[1 - which], prompt, got).max() > 5e-3


def exchange_of(policy: Policy, receivers: Receivers) -> WeightExchange:
    options = TransportOptions("shared_memory", delta=True)
    return WeightExchange(policy, receivers, BUCKET, 60.0, options)


@pytest.fixture
def setup(one: Any, dense: Any, tmp_path: Path) -> Iterator[Setup]:
    made = Setup(one, dense[0], changed(dense[0], tmp_path / "changed"), dense[1])
    yield made
    made.refit(0)


def test_changes_come_onto_what_an_engine_has(setup: Setup) -> None:
    assert setup.refit(0) == 1
    setup.check(0)
    for which in (1, 0, 1):
        assert setup.refit(which) < 0.05
        setup.check(which)


def test_changes_onto_another_base_are_refused_and_all_is_sent(setup: Setup) -> None:
    setup.refit(0)
    version = setup.engine.host.version
    asyncio.run(exchange_of(Policy(setup.folders[1]), setup.receivers).refit(version + 1))
    setup.policy.load(setup.folders[0])
    message = f"changes since version {version}, but holds version {version + 1}"
    with pytest.raises(RefitFailed, match=message):
        asyncio.run(setup.exchange.refit(version + 2))
    assert setup.engine.host.version == version + 1
    setup.check_sampling(1)
    assert setup.refit(0) == 1
    setup.check(0)


@pytest.mark.parametrize("place", [3, -3], ids=["header", "content"])
def test_changes_that_break_on_their_way_leave_the_old_version(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    setup.refit(0)
    version = setup.engine.host.version
    changes = LastSent.changes

    def broken(
        self: LastSent, number: int, content: torch.Tensor, sizes: Sequence[int], *, compare: bool
    ) -> list[bytearray | None]:
        (found,) = changes(self, number, content, sizes, compare=compare)
        if found is not None and number == 2:
            found[place] ^= 4
        return [found]

    monkeypatch.setattr(LastSent, "changes", broken)
    with pytest.raises(CorruptWeights, match="generation rank 0 cannot decode the changes"):
        setup.refit(1)
    monkeypatch.undo()
    assert setup.engine.host.version == version
    setup.check_sampling(0)
    assert setup.refit(1) == 1
    setup.check(1)
