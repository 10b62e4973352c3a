"""Whether the nodes of a run can be had from where it is started."""

import os
from collections.abc import Iterator

from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation


def node_violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """A run over several nodes joins a Ray that was started on them."""
    if cluster.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        mend = (
            "this command by itself starts the run on this machine only: on a Slurm cluster take `nemorl "
            f"slurm submit CONFIG --nodes {cluster.num_nodes}`; elsewhere start Ray on the nodes and set "
            "RAY_ADDRESS to its head (docs/slurm.md)"
        )
        yield Violation("cluster.num_nodes", cluster.num_nodes, mend)
