"""The transport between real processes, and what is left behind when one of them dies."""

import asyncio
import functools
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemorl.models.layout import PolicyRank
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import PeerClosed, machine
from tests.required import missing
from tests.weights.ranks import TP2, EngineSide, PolicySide, Remote, Threads, WorkerGone, model

BUCKET = 4096  # bytes; the embedding has 26 kilobytes


@pytest.fixture(scope="module")
def policy() -> Iterator[list[Remote]]:
    """Two tensor-parallel ranks."""
    ranks = [Remote(functools.partial(PolicySide, PolicyRank(TP2, rank))) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Remote]:
    """One engine; a test may kill it."""
    remote = Remote(functools.partial(EngineSide, getattr(request, "param", torch.float32)))
    yield remote
    remote.stop()


def test_a_container_with_the_host_name_of_another_one_is_another_machine() -> None:
    name, _, root = machine().rpartition(" ")
    mounts = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    command = ["bwrap", *mounts, "/usr/bin/stat", "--format=%D", "/"]
    try:
        other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        missing("bubblewrap", f"bubblewrap does not run here ({error})")
    assert name == socket.gethostname()
    assert int(root, 16) != int(other, 16)


def exchange(policy: list[Remote], engine: Remote, deadline_seconds: float = 60.0) -> WeightExchange:
    return WeightExchange(Threads(policy), Threads([engine]), BUCKET, deadline_seconds)


def train(policy: list[Remote], seed: int) -> None:
    for rank in policy:
        rank.call("train", seed)


def shared_files() -> set[str]:
    """Named shared memory of this machine, but for the semaphores that multiprocessing makes and unlinks."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def shared_kilobytes(rank: Remote) -> int:
    """Memory of refits that the kernel still keeps for a process, once its last call is answered."""
    rank.describe()  # the driver continues with the first rank that fails; this waits for the others
    kilobytes, counting = 0, False
    for line in Path(f"/proc/{rank.process.pid}/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1:  # `7f6e7edba000-7f6e7edbc000 rw-s ... /memfd:nemorl-refit-2-0`
            counting = "nemorl-refit" in line
        elif counting and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes


@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16], indirect=True)
def test_weights_cross_processes_bit_for_bit(policy: list[Remote], engine: Remote) -> None:
    named = shared_files()
    update_weights = exchange(policy, engine)
    for seed in (1, 2):
        train(policy, seed)
        stats = asyncio.run(update_weights.refit(version=seed))
        version, weights = engine.call("state")
        assert version == seed
        for name, tensor in model(seed).items():
            assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name
        assert stats.num_buckets > 20
    assert shared_files() == named
    assert [shared_kilobytes(rank) for rank in (*policy, engine)] == [0, 0, 0]


def test_a_killed_receiver_is_named_at_once_and_leaves_nothing(policy: list[Remote], engine: Remote) -> None:
    update_weights = exchange(policy, engine, deadline_seconds=60.0)
    train(policy, seed=1)
    asyncio.run(update_weights.refit(1))
    before = shared_files()
    engine.call("die_at_bucket", 3)
    with pytest.raises((WorkerGone, PeerClosed)) as caught:
        asyncio.run(update_weights.refit(2))
    said = [str(caught.value), *caught.value.__notes__]
    assert any("generation rank 0 closed its connection" in line for line in said), said
    assert shared_files() == before
    assert [shared_kilobytes(rank) for rank in policy] == [0, 0]


def test_a_killed_sender_is_named_at_once_and_the_old_version_stays(engine: Remote) -> None:
    policy = [Remote(functools.partial(PolicySide, PolicyRank(TP2, rank))) for rank in range(2)]
    try:
        update_weights = exchange(policy, engine)
        train(policy, seed=1)
        asyncio.run(update_weights.refit(1))
        policy[1].process.kill()
        policy[1].process.join()
        with pytest.raises(WorkerGone, match="ended during exchange"):
            asyncio.run(update_weights.refit(2))
        version, weights = engine.call("state")
        assert version == 1
        assert torch.equal(weights["model.norm.weight"], model(1)["model.norm.weight"])
        assert shared_kilobytes(engine) == shared_kilobytes(policy[0]) == 0
    finally:
        for rank in policy:
            rank.stop()
