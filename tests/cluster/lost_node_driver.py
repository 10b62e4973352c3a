"""A driver of its own, for a test with several nodes: a group that loses a node, moves, and shrinks."""

import asyncio
import json
import sys
from pathlib import Path

from nemorl.cluster.errors import NodeNotReplaced, ObjectsLost
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.nodes import alive_nodes
from nemorl.cluster.placement import Placement, WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.run import ClusterConfig
from tests.cluster.recorders import start_recorders

LABELS, ELSEWHERE = {"nemorl.io/part": "train"}, {"nemorl.io/part": "!train"}


async def say(group: WorkerGroup, placement: Placement) -> None:
    """The nodes on which the ranks are, by the placement and by what each of them finds."""
    names = {node.id: node.name for node in alive_nodes()}
    found = await group.call("node", stage="test", seconds=120)
    homes = [worker.home.name for worker in group.workers if worker.home is not None]
    print(  # noqa: T201 - for the test
        json.dumps(
            {
                "placed": [node.name for node in placement.nodes[group.name]],
                "found": [names[node] for node in found],
                "homes": homes,
                "ranks": [answer[0] for answer in await group.call("record", stage="test", seconds=120)],
            }
        ),
        flush=True,
    )


async def loss(group: WorkerGroup, seconds: float) -> None:
    """Wait for a lost node, and say what is missing after some seconds without another."""
    while not group.has_lost_node:
        await asyncio.sleep(0.2)
    assert await group.lost_one(120)
    try:
        await group.await_places(seconds)
    except NodeNotReplaced as error:
        print(json.dumps({"missing": str(error)}), flush=True)  # noqa: T201


async def main(run_dir: Path) -> None:
    requests = [WorkerRequest("policy", 2, labels=LABELS), WorkerRequest("reader", 1, labels=ELSEWHERE)]
    with ClusterRuntime(ClusterConfig(placement="SPREAD"), requests) as ray:
        placement = await ray.reserve()
        group = await start_recorders("policy", 2, placement, run_dir, deadline_seconds=300)
        reader = await start_recorders("reader", 1, placement, run_dir, deadline_seconds=300)
        large, _ = await group.workers[1].call_pair("large_pair", stage="test", seconds=120)
        await say(group, placement)  # after which the test takes a node
        await loss(group, seconds=2.0)
        read = {"shards": [[large]], "stage": "reading", "seconds": 120.0, "resolve": True}
        try:
            await reader.call("record", ends_group=False, **read)  # type: ignore[arg-type]
        except ObjectsLost as error:
            answers = await reader.call("history", stage="test", seconds=120)
            print(json.dumps({"unread": str(error), "then": answers}), flush=True)  # noqa: T201
        await group.await_places(300)
        await group.replace_all(300)
        await say(group, placement)
        await loss(group, seconds=5.0)
        group.shrink(Mesh(data=1))
        await group.replace_all(300)
        await say(group, placement)
        for one in (group, reader):
            await one.shutdown()
        placement.release()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
