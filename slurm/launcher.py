"""`nemorl slurm node`: the launcher, which a job runs once on each of its nodes.

    every node      reads the allocation, writes its report into the run folder
    the head        waits for all reports, checks that the experiment fits, plans the ports, writes the plan
    every node      starts Ray; the others connect to the head's launcher
    the head        runs `nemorl train --resume` when Ray knows all nodes, and announces the end

`ray symmetric-run` has no options for addresses and ports, passes no signals on, and names no lost node.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, NemorlError, UsageError

from . import SlurmError
from .control import ControlClient, ControlServer, NodeLost
from .jobs import OUT_OF_TIME, why_terminated
from .node import Allocation, NodeInfo, assign_ports, read_allocation, wait_until_reachable
from .ray_node import START_SECONDS, URGENT_STOP_SECONDS, Child, RayNode, wait_for_members
from .requirements import cluster_overrides, node_problems
from .start import CANCELLED, REQUEUE, TERMINATED, ExitRecorder, Plan, Rendezvous, newest_step, write_status

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# After a node is lost: the processes on the others cannot finish a step, and may wait long in a collective.
NODE_LOST_SECONDS = 60.0
# A run notices the death of Ray's processes at once, `ray start --block` within about a second.
RAY_GRACE_SECONDS = 5.0

logger = logging.getLogger(__name__)

Exit = tuple[int, str]  # exit status and reason


def run_node(config: Path, overrides: Sequence[str]) -> int:
    """Run this node's part of a job; return its exit status. Raises `NemorlError`."""
    allocation = read_allocation(os.environ)
    node = allocation.node
    if (task := os.environ.get("SLURM_ARRAY_TASK_ID")) and config.is_dir():  # a sweep
        config = config / f"{task}.yaml"
    try:
        experiment = load_experiment(config, overrides)
    except ConfigError:
        if not allocation.is_head and config.exists():  # the head reports it
            return 2
        if allocation.is_head:
            write_status(2)
        raise
    rendezvous = Rendezvous(experiment.run_dir, allocation.start, allocation.nodes)

    # Under the node's name into the job's output and into the node's own log.
    form = logging.Formatter(f"%(asctime)s {node}: %(message)s", "%Y-%m-%d %H:%M:%S")
    ours = logging.getLogger("nemorl.slurm")
    file = logging.FileHandler(rendezvous.log(node), encoding="utf-8")
    for handler in (logging.StreamHandler(sys.stderr), file):
        handler.setFormatter(form)
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False

    if allocation.is_head:
        return Head(experiment, config, overrides, allocation, rendezvous).run()
    try:
        info, megabytes = NodeInfo.read(allocation, os.environ), experiment.cluster.object_store_megabytes
        return asyncio.run(follow(allocation.nodes[0], rendezvous, info, megabytes))
    except NemorlError as error:
        logger.error("%s", error)
        rendezvous.report_failure(node, str(error))
        return 1


async def follow(head: str, rendezvous: Rendezvous, info: NodeInfo, store_megabytes: int) -> int:
    """Run Ray on a node that is not the head. Returns 0 whenever the head decides. Raises `SlurmError`."""
    loop, message = asyncio.get_running_loop(), "received %s; the head stops the run"
    for number in SIGNALS:  # Slurm signals all nodes at once: the head stops the run in order
        loop.add_signal_handler(number, logger.info, message, number.name)
    rendezvous.report(info)
    cores, gpus = info.hardware.cores, info.hardware.gpus
    logger.info("%d cores, %d GPUs, %s (%s)", cores, gpus, info.address, info.interface)
    plan = await rendezvous.wait_for_plan()
    if plan.refused:
        return 0
    token = rendezvous.token_file.read_text(encoding="ascii")
    client = await ControlClient.connect(plan.head, plan.control, token, info.node, head)
    ray = RayNode(info, plan, rendezvous, store_megabytes)
    shutdown = asyncio.ensure_future(client.wait_for_shutdown())
    head_listens = asyncio.ensure_future(wait_until_reachable(plan.gcs, START_SECONDS, info.node))
    try:
        await asyncio.wait({head_listens, shutdown}, return_when=asyncio.FIRST_COMPLETED)
        if head_listens.done():
            head_listens.result()
        while not shutdown.done():
            async with ray as process:
                await asyncio.wait({process.ended, shutdown}, return_when=asyncio.FIRST_COMPLETED)
                if not shutdown.done() or shutdown.result().failed:
                    ray.keep_logs()
                ray.urgent = shutdown.done() and shutdown.result().urgent
            if shutdown.done():
                break
            if client.ray_runs or not ray.was_slow:
                status, log = process.ended.result(), rendezvous.log(info.node)
                raise SlurmError(f"Ray ended there with exit status {status}; see {log}")
            logger.warning("Ray was too slow to start; retrying")
        logger.info("%s", shutdown.result().reason)
    except SlurmError as error:
        await client.report_failure(str(error))
        raise
    finally:
        head_listens.cancel()
        shutdown.cancel()
        client.close()
    return 0


def train_command(config: Path, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "nemorl.cli", "train", str(config), *overrides, "--resume"]


class RayEnded(SlurmError):
    """Ray on the head ended before it ran on all nodes."""


@dataclass
class Head:
    """One start of a job on its first node: the checks, the plan, the run, and why it ended."""

    experiment: Experiment
    config: Path
    overrides: Sequence[str]
    allocation: Allocation
    rendezvous: Rendezvous

    def __post_init__(self) -> None:
        folder, allocation = self.rendezvous.folder, self.allocation
        self._recorder = ExitRecorder(self.experiment.run_dir, folder, allocation.job, allocation.restart)
        self._train: Child | None = None
        self._signal: signal.Signals | None = None
        self._cause: asyncio.Future[str] | None = None  # of SIGTERM
        self._stopping: asyncio.Future[int] | None = None  # the run, with SIGKILL at the time limit

    def run(self) -> int:
        code, reason = 1, "the launcher failed"
        try:
            self._recorder.read_max_restarts()
            self._info = NodeInfo.read(self.allocation, os.environ)
            code, reason = asyncio.run(self._run_until_signal())
        except NemorlError as error:
            code, reason = 2 if isinstance(error, ConfigError | UsageError) else 1, str(error)
            raise
        finally:
            record = self._recorder.write(code, reason)
            self.rendezvous.close(record.reason)
        logger.info("%s (exit status %d)", record.reason, record.code)
        return record.code

    async def _run_until_signal(self) -> Exit:
        work = asyncio.ensure_future(self._run())
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal, number, work)
        self._recorder.write(REQUEUE, "the launcher on the head was killed")  # replaced later
        try:
            return await work
        except asyncio.CancelledError:
            return await self._stopped("the run had not begun")

    def _handle_signal(self, number: int, work: "asyncio.Future[Exit]") -> None:
        """Stop the run in order, or cancel at once what leads to it."""
        received, earlier = signal.Signals(number), self._signal
        logger.info("received %s; %s", received.name, "already stopping" if earlier else "stopping the run")
        self._signal = received if earlier in (None, signal.SIGUSR1) else earlier
        if earlier is None:
            if self._train is None:
                work.cancel()
            else:
                self._train.send_signal(signal.SIGTERM)
        elif earlier is signal.SIGUSR1 and received is signal.SIGTERM and self._train is not None:
            # The time limit: SIGKILL comes soon.
            self._stopping = asyncio.ensure_future(self._train.stop(URGENT_STOP_SECONDS))
        code = REQUEUE if self._signal is signal.SIGUSR1 else TERMINATED
        self._recorder.write(code, f"killed after {self._signal.name}, before it had stopped in order")
        if code == TERMINATED and self._cause is None:
            # Asked now: a node that is lost may be back before the run has ended.
            self._cause = asyncio.ensure_future(self._find_cause())

    async def _find_cause(self) -> str:
        allocation = self.allocation
        cause = await asyncio.to_thread(why_terminated, allocation.job, allocation.nodes, allocation.restart)
        logger.info("cause according to Slurm: %s", cause or "unknown")
        return cause

    async def _stopped(self, detail: str) -> Exit:
        step = newest_step(self.experiment.run_dir)
        kept = f"{detail}; " * bool(detail) + (f"newest checkpoint: step {step}" if step else "no checkpoint")
        if self._signal is signal.SIGUSR1:
            return REQUEUE, f"stopped before the time limit: {kept}"
        name = self._signal.name if self._signal else "a signal"
        cause = (await self._cause if self._cause else "") or await self._find_cause()
        if CANCELLED in self.rendezvous.files():
            cause = "cancelled with `nemorl slurm cancel`"
        reason = f"stopped by {name} ({cause or 'cancelled, pre-empted, or a node is lost'}): {kept}"
        return REQUEUE if cause == OUT_OF_TIME else TERMINATED, reason

    async def _run(self) -> Exit:
        rendezvous = self.rendezvous
        rendezvous.report(self._info)
        logger.info("waiting for %d nodes in %s", len(rendezvous.nodes), rendezvous.folder)
        nodes = await rendezvous.wait_for_nodes()
        gpus_given = "gpus_per_node" in self.experiment.cluster.model_fields_set
        overrides = [*self.overrides, *cluster_overrides(nodes, gpus_given=gpus_given)]
        experiment = load_experiment(self.config, overrides, lambda found: node_problems(found, nodes))
        hosts = {node: info.host for node, info in nodes.items()}
        plan = Plan(self._info.address, assign_ports(nodes), hosts)
        rendezvous.publish(plan)
        token = rendezvous.token_file.read_text(encoding="ascii")
        ray = RayNode(self._info, plan, rendezvous, experiment.cluster.object_store_megabytes)
        environment = {**ray.environment, "RAY_ADDRESS": plan.gcs}
        async with ControlServer(plan.head, plan.control, token, rendezvous.nodes[1:]) as control:
            control.failed = True
            while True:
                async with ray as process:
                    try:
                        lost = await self._wait_for_ray(plan, environment, control, process)
                        if lost is not None:
                            outcome = REQUEUE, str(lost)
                        else:
                            logger.info("Ray runs at %s on %s", plan.gcs, ", ".join(nodes))
                            control.announce_ray()
                            command = train_command(self.config, overrides)
                            self._train = await Child.start(command, environment)
                            outcome = await self._watch(self._train, control, process)
                        control.failed = outcome[0] not in (0, 2) and self._signal is None
                        control.urgent = ray.urgent = self._signal not in (None, signal.SIGUSR1)
                        await control.shut_down()  # so that all nodes stop Ray at the same time
                        return outcome
                    except RayEnded:
                        if not ray.was_slow:
                            raise
                        logger.warning("Ray was too slow to start; retrying")
                    finally:
                        if control.failed:
                            ray.keep_logs()

    async def _wait_for_ray(
        self, plan: Plan, environment: Mapping[str, str], control: ControlServer, ray: Child
    ) -> NodeLost | None:
        """Return a node whose connection broke before Ray ran on all nodes. Raises `SlurmError`."""

        async def ready() -> None:
            await control.wait_for_nodes()
            await wait_until_reachable(plan.gcs, START_SECONDS, self._info.node)
            await wait_for_members(self.rendezvous, environment)

        lost = asyncio.ensure_future(control.lost.get())
        work = asyncio.ensure_future(ready())
        try:
            await asyncio.wait({ray.ended, lost, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return None
            if lost.done():
                if lost.result().reported:
                    raise SlurmError(str(lost.result()))
                return lost.result()
            node, status = self._info.node, ray.ended.result()
            problem = f"Ray ended with exit status {status} while starting on {node}"
            raise RayEnded(f"{problem}; see {self.rendezvous.log(node)}")
        finally:
            lost.cancel()
            work.cancel()

    async def _watch(self, train: Child, control: ControlServer, ray: Child) -> Exit:
        next_lost = asyncio.ensure_future(control.lost.get())
        await asyncio.wait({train.ended, ray.ended, next_lost}, return_when=asyncio.FIRST_COMPLETED)
        if train.ended.done() and train.ended.result() not in (0, 2, REQUEUE):  # maybe because a node is lost
            causes = {ray.ended, next_lost}
            await asyncio.wait(causes, timeout=RAY_GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        lost = [next_lost.result()] if next_lost.done() else []
        if ray.ended.done() and not lost:
            reason = f"Ray ended there with exit status {ray.ended.result()}"
            lost = [NodeLost(self._info.node, reason, reported=True)]
        next_lost.cancel()
        if lost and train.is_running:
            logger.error("%s; stopping the run", lost[0])
            await train.stop(NODE_LOST_SECONDS)
        status = await train.ended
        if status == 0:
            return 0, "the run is complete"
        failure = f"nemorl train failed with exit status {status}"
        if self._signal is not None:
            details = [*map(str, lost), *([failure] if status != REQUEUE else [])]
            return await self._stopped("; ".join(details))
        if status == 2 and not lost:
            return 2, "invalid configuration; nothing was started"
        if lost := lost or await control.find_lost():
            return REQUEUE, "; ".join(map(str, lost))
        if status == REQUEUE:
            return REQUEUE, "a signal stopped the run"
        return 1, failure
