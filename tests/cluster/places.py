"""Places that no run has reserved, for tests that start no Ray."""

from collections.abc import Mapping, Sequence

from ray.util.placement_group import PlacementGroup

from nemorl.cluster.nodes import Node
from nemorl.cluster.placement import Placement, WorkerRequest

NODE = Node("here", "here", "127.0.0.1", 4)


def on_one_node(bundles: Mapping[str, tuple[int, ...]], requests: Sequence[WorkerRequest]) -> Placement:
    """All ranks on the driver's node."""
    places = dict.fromkeys(bundles, PlacementGroup.empty())
    nodes = {group: (NODE,) * len(own) for group, own in bundles.items()}
    return Placement(places, bundles, {r.group: r for r in requests}, nodes, NODE.id)
