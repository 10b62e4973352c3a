"""Where workers of a run over several nodes live, and what is reported when they die there."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from nemorl.cluster.errors import NodeLost, NotShared, WorkerDied
from nemorl.cluster.nodes import Home, Node, labels_in_use
from nemorl.cluster.placement import Placement
from nemorl.cluster.worker import Worker, typed_error
from tests.cluster.conftest import StartFragile

FIRST = Node("1f", "first", "10.0.0.1", 8, 2, {"ray.io/node-id": "1f", "nemorl.io/part": "gpu"})
SECOND = Node("2e", "second", "10.0.0.2", 8)
LOG = Path("/runs/x/logs/policy-1.log")


def placed(**groups: tuple[Node, ...]) -> Placement:
    return Placement({}, {}, {}, groups, driver=FIRST.id)


def worker_on(home: Home | None) -> Worker:
    return Worker("policy", 1, LOG, actor=None, home=home)


def nodes_alive(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    def entries() -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node.id, "Alive": node in nodes, "NodeManagerAddress": node.address,
                "NodeManagerHostname": node.name, "Resources": {},
            }
            for node in (FIRST, SECOND)
        ]  # fmt: skip

    monkeypatch.setattr(ray, "nodes", entries)


def test_a_rank_knows_who_lives_on_its_node():
    placement = placed(policy=(FIRST, SECOND, SECOND), generation=(SECOND,), rollout=(FIRST,))
    home = placement.home("policy", 1)
    assert home is not None
    assert (home.name, str(home)) == ("second", "policy ranks 1, 2 and generation rank 0")
    assert placement.described == {
        "node first": "policy rank 0 and rollout rank 0",
        "node second": "policy ranks 1, 2 and generation rank 0",
    }
    alone = placed(policy=(FIRST, FIRST), rollout=(FIRST,))
    assert alone.home("policy", 1) is None
    assert alone.described == {}


def test_a_death_names_its_node_and_a_lost_node_itself(monkeypatch: pytest.MonkeyPatch):
    home = placed(policy=(FIRST, SECOND), rollout=(SECOND,)).home("policy", 1)
    nodes_alive(monkeypatch, FIRST, SECOND)
    death = typed_error(worker_on(home), "training", ActorDiedError())
    assert type(death) is WorkerDied
    assert str(death).startswith("policy rank 1 died in stage 'training' on node second: ")

    nodes_alive(monkeypatch, FIRST)
    lost = typed_error(worker_on(home), "training", ActorDiedError())
    assert isinstance(lost, NodeLost)
    sentence = "node second was lost in stage 'training', and with it policy rank 1 and rollout rank 0: "
    assert str(lost).startswith(sentence)
    assert "\n" not in str(lost)
    other = NodeLost("rollout", 0, "shutdown rollout", "second", lost.tenants, LOG)
    assert other.is_reported_in(lost)
    assert not other.is_reported_in(death)
    assert str(pickle.loads(pickle.dumps(lost))) == str(lost)  # noqa: S301 - our own

    assert " on node" not in str(typed_error(worker_on(None), "training", ActorDiedError())).split("\n")[0]


def test_labels_are_reported_without_those_that_ray_gives_itself():
    assert labels_in_use([FIRST, SECOND]) == "first (nemorl.io/part=gpu), second (none)"


def test_a_node_that_does_not_see_the_folder_of_the_run_is_named(
    start_fragile: StartFragile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Path, "cwd", lambda: Path("/on/the/driver/alone"))
    with pytest.raises(NotShared, match=r"fragile rank 0 runs on .*, which has no /on/the/driver/alone: "):
        start_fragile(ranks=1)
