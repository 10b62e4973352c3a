"""A group of workers that remember their calls."""

from pathlib import Path
from typing import Any

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import Placement


async def start_recorders(
    name: str,
    count: int,
    placement: Placement,
    run_dir: Path,
    *,
    deadline_seconds: float = 60,
    **options: Any,
) -> WorkerGroup:
    """One `Recorder` for each rank; `options` are those of `WorkerGroup.start`."""
    return await WorkerGroup.start(
        name,
        "tests.cluster.targets:Recorder",
        [{"rank": rank} for rank in range(count)],
        placement=placement,
        run_dir=run_dir,
        deadline_seconds=deadline_seconds,
        **{"threads": 1, **options},
    )
