"""Wait until Ray's head knows all nodes: `python -m nemorl.slurm.members SECONDS NODE...`.

A process of its own, because whoever connects to Ray gives its signals away. Joins the cluster at
RAY_ADDRESS, says which nodes are missing and ends with 1 if some are after SECONDS.
"""

import logging
import sys
import time

import ray

POLL_SECONDS = 0.5


def main(words: list[str]) -> int:
    """The exit status."""
    end, wanted = time.monotonic() + float(words[0]), set(words[1:])
    while missing := wanted - _there():
        if time.monotonic() > end:
            sys.stdout.write(", ".join(sorted(missing)))
            return 1
        time.sleep(POLL_SECONDS)
    return 0


def _there() -> set[str]:
    """The names of the nodes that take part; none before Ray on this one does."""
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, TimeoutError):
        ray.shutdown()
        return set()
    return {node["NodeName"] for node in ray.nodes() if node["Alive"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
