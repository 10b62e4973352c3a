"""A driver of its own, for tests with several nodes: reserves places in sequence, and says where."""

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.placement import WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.run import ClusterConfig

POLICY, ROLLOUT = WorkerRequest("policy", 3), WorkerRequest("rollout", 1)
ENDPOINT = WorkerRequest("endpoint", 1, at_driver=True)
WEST, EAST = ({"ray.io/gpu-domain": domain} for domain in ("west", "east"))
DOMAIN = "ray.io/gpu-domain"

# what is asked for, and how the configuration differs from the default
CASES: dict[str, tuple[list[WorkerRequest], dict[str, Any]]] = {
    "labels": ([replace(POLICY, labels=EAST), replace(ROLLOUT, labels=WEST)], {"placement": "PACK"}),
    "spread": ([replace(POLICY, count=4)], {"placement": "SPREAD"}),
    "topology": ([replace(POLICY, topology=DOMAIN), ROLLOUT], {"placement": "SPREAD"}),
    "at the driver": ([ENDPOINT], {"placement": "PACK"}),
    "nobody has it": ([replace(POLICY, labels={DOMAIN: "north"})], {}),
    "no such label": ([replace(POLICY, topology="rack")], {}),
    "not a label": ([replace(POLICY, labels={DOMAIN: "in("})], {}),
    "too few nodes": ([POLICY], {"num_nodes": 3}),
}


async def place(requests: list[WorkerRequest], config: dict[str, Any]) -> dict[str, list[str]] | str:
    """The nodes of each group's ranks, or why there are none."""
    wanted = ClusterConfig.model_validate({"num_nodes": 2, "deadlines": {"start": 5}, **config})
    with ClusterRuntime(wanted, requests) as runtime:
        try:
            placement = await runtime.reserve()
        except ClusterError as error:
            return str(error)
        found = {group: [node.name for node in nodes] for group, nodes in placement.nodes.items()}
        placement.release()
        return found


async def main() -> dict[str, Any]:
    """All cases, within one connection."""
    with ClusterRuntime(ClusterConfig(), []):
        return {name: await place(*case) for name, case in CASES.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main())))
