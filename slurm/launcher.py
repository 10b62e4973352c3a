"""`nemorl slurm node`: what a job runs, once on each of its nodes.

    every node      reads the allocation, writes its card into the run folder
    the head        waits for all cards, checks that the experiment fits, plans the ports, writes the plan
    every node      starts Ray; the others connect to the head's launcher
    the head        runs `nemorl train --resume` when Ray knows all nodes, and tells everybody when it is over

`ray symmetric-run` is near to this and is not used: it takes the node for the head whose address is the
head's, has no way to give addresses and ports, passes no signals on, and names no node that is lost.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, NemorlError, UsageError

from . import network, ports
from .follower import follow
from .hardware import read_hardware
from .head import Head
from .node import Allocation, read_allocation
from .records import REQUEUE, Record, max_restarts, write_verdict
from .rendezvous import Card, Meeting, machine_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """What one node knows when it begins."""

    experiment: Experiment
    config: Path
    overrides: tuple[str, ...]
    allocation: Allocation
    meeting: Meeting


def run_node(config: Path, overrides: Sequence[str]) -> int:
    """The node's part of a job; its exit status. Raises `NemorlError`."""
    allocation = read_allocation(os.environ)
    try:
        experiment = load_experiment(_of_task(config), overrides)
    except ConfigError:
        if allocation.rank > 0 and _of_task(config).exists():  # the head says it
            return 2
        if allocation.rank == 0:
            write_verdict(2)
        raise
    meeting = Meeting(experiment.run_dir, allocation.start, allocation.nodes)
    _log_to(meeting.log(allocation.here), allocation.here)
    started = Started(experiment, _of_task(config), tuple(overrides), allocation, meeting)
    if allocation.rank == 0:
        return _lead(started)
    try:
        return asyncio.run(_follow(started, _card(allocation)))
    except NemorlError as error:
        logger.error("%s", error)
        meeting.fail(allocation.here, str(error))
        return 1


def _of_task(config: Path) -> Path:
    """The file of this task, where a sweep's folder is given."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return config / f"{task}.yaml" if task and config.is_dir() else config


def _card(allocation: Allocation) -> Card:
    interface = network.own_interface(os.environ)
    hardware = read_hardware(os.environ)
    size = ports.block_size(hardware.cores)
    wanted = ports.read_range(os.environ.get(ports.VARIABLE) or ports.DEFAULT)
    return Card(
        allocation.here,
        machine_name(),
        interface.address,
        interface.name,
        hardware,
        tuple(ports.free_blocks(wanted, size, allocation.job)),
        size,
        allocation.part(allocation.here),
    )


def _lead(started: Started) -> int:
    allocation, meeting = started.allocation, started.meeting
    record = Record(started.experiment.run_dir, meeting.folder, allocation.job, allocation.restart)
    error: NemorlError | None = None
    code, reason = 1, "the launcher failed"
    try:
        record.limit = max_restarts()
        code, reason = asyncio.run(_head(started, record, _card(allocation)))
    except NemorlError as raised:
        error = raised
        code, reason = 2 if isinstance(raised, ConfigError | UsageError) else 1, str(raised)
    finally:
        ending = record.keep(code, reason)
        meeting.end(ending.reason)
    if error is not None:
        raise error
    logger.info("%s (exit status %d)", ending.reason, ending.code)
    return ending.code


async def _head(started: Started, record: Record, card: Card) -> tuple[int, str]:
    head = Head(
        started.experiment,
        started.config,
        started.overrides,
        started.meeting,
        card,
        started.allocation,
        record,
    )
    work = asyncio.ensure_future(head.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        loop.add_signal_handler(number, head.told, number, work)
    record.keep(REQUEUE, "the launcher on the head was killed")  # stands where it is
    try:
        return await work
    except asyncio.CancelledError:
        return await head.stopped("the run had not begun")


async def _follow(started: Started, card: Card) -> int:
    megabytes = started.experiment.cluster.object_store_megabytes
    loop = asyncio.get_running_loop()
    # Slurm signals all nodes at once: the head ends the run in order, and tells us.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        loop.add_signal_handler(number, _noted, number)
    return await follow(started.allocation.nodes[0], started.meeting, card, megabytes)


def _noted(number: int) -> None:
    logger.info("got %s; the head ends the run", signal.Signals(number).name)


def _log_to(path: Path, node: str) -> None:
    """What launchers say goes to the job's output, under the node's name, and into the node's own log."""
    form = logging.Formatter(f"%(asctime)s {node}: %(message)s", "%Y-%m-%d %H:%M:%S")
    ours = logging.getLogger("nemorl.slurm")
    for handler in (logging.StreamHandler(sys.stderr), logging.FileHandler(path, encoding="utf-8")):
        handler.setFormatter(form)
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
