"""A driver of its own, for tests that end it: starts a worker, says who is who, and makes it sleep."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import ray

from nemorl.cluster.placement import WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.run import ClusterConfig
from tests.cluster.recorders import start_recorders


async def run(runtime: ClusterRuntime, run_dir: Path, seconds: float) -> None:
    group = await start_recorders("joined", 1, await runtime.reserve(), run_dir)
    (pid,) = await group.call("process", stage="testing", seconds=30)
    about = {"worker": pid, "local": runtime.local, "address": ray.get_runtime_context().gcs_address}
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()
    await group.call("sleep", seconds, stage="testing", seconds=600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in the background
    with ClusterRuntime(ClusterConfig(object_store_megabytes=100), [WorkerRequest("joined", 1)]) as started:
        asyncio.run(run(started, Path(sys.argv[1]), float(sys.argv[2])))
