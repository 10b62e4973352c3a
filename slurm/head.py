"""The head's part: the check, the plan, the run, and why it ended."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment

from . import ports
from .control import ControlServer
from .errors import SlurmError
from .jobs import OUT_OF_TIME, why_terminated
from .network import reachable
from .node import Allocation
from .processes import Child
from .ray_node import HURRIED_SECONDS, TOGETHER_SECONDS, RayNode, object_store_bytes
from .records import REQUEUE, TERMINATED, Record, newest_step
from .rendezvous import Card, Meeting, Plan
from .requirements import problems_of, words_for

# After a node is lost: what runs on the others cannot finish a step, and may wait in a collective for long.
LOST_SECONDS = 60.0

logger = logging.getLogger(__name__)

Ended = tuple[int, str]  # exit status and a sentence


def train_command(config: Path, words: Sequence[str]) -> list[str]:
    """The run itself: from its newest checkpoint, or from the beginning where there is none."""
    return [sys.executable, "-m", "nemorl.cli", "train", str(config), *words, "--resume"]


def members_command(nodes: Sequence[str]) -> list[str]:
    """What ends well when Ray knows these nodes."""
    return [sys.executable, "-m", "nemorl.slurm.members", str(TOGETHER_SECONDS), *nodes]


class RayEnded(SlurmError):
    """Ray on the head ended before it ran on all nodes."""


class NodeGone(SlurmError):
    """A node was lost before Ray ran on all, and did not say why itself."""


class Head:
    """One start of a job on its first node."""

    def __init__(
        self,
        experiment: Experiment,
        config: Path,
        overrides: Sequence[str],
        meeting: Meeting,
        card: Card,
        allocation: Allocation,
        record: Record,
    ) -> None:
        """`overrides` are the person's; the allocation's own come after them."""
        self._experiment, self._config, self._overrides = experiment, config, list(overrides)
        self._meeting, self._card, self._allocation = meeting, card, allocation
        self._record = record
        self._train: Child | None = None
        self._signal: signal.Signals | None = None
        self._why: asyncio.Future[str] | None = None  # of SIGTERM
        self._hurried: asyncio.Future[int] | None = None  # the run's end at the time limit

    def told(self, number: int, work: "asyncio.Future[Ended]") -> None:
        """A signal came: the run ends in order, or what leads to it ends at once."""
        got, before = signal.Signals(number), self._signal
        logger.info("got %s; %s", got.name, "the run is ending already" if before else "ending the run")
        self._signal = got if before in (None, signal.SIGUSR1) else before
        if before is None:
            if self._train is None:
                work.cancel()
            else:
                self._train.tell(signal.SIGTERM)
        elif before is signal.SIGUSR1 and got is signal.SIGTERM and self._train is not None:
            # The time limit, and SIGKILL comes soon.
            self._hurried = asyncio.ensure_future(self._train.end(HURRIED_SECONDS))
        code = REQUEUE if self._signal is signal.SIGUSR1 else TERMINATED
        self._record.keep(code, f"killed after {self._signal.name}, before it had ended in order")
        if code == TERMINATED and self._why is None:
            self._why = asyncio.ensure_future(self._cause())

    async def _cause(self) -> str:
        """Of SIGTERM, asked when it comes: a node that was lost may be back before the run has ended."""
        allocation = self._allocation
        why = await asyncio.to_thread(why_terminated, allocation.job, allocation.nodes, allocation.restart)
        if why:
            logger.info("cause, as Slurm knows it: %s", why)
        return why

    async def stopped(self, how: str = "") -> Ended:
        """What a run that was told to stop ends with."""
        step = newest_step(self._experiment.run_dir)
        left = f"{how}; " * bool(how) + (f"it goes on from step {step}" if step else "no step is saved")
        if self._signal is signal.SIGUSR1:
            return REQUEUE, f"stopped before the time limit: {left}"
        name = self._signal.name if self._signal else "a signal"
        why = (await self._why if self._why else "") or await self._cause()
        told = f"stopped by {name} ({why or 'cancelled, pre-empted, or a node is lost'}): {left}"
        return REQUEUE if why == OUT_OF_TIME else TERMINATED, told

    async def run(self) -> Ended:
        """From the meeting to the end of the run. Raises `NemorlError`."""
        self._meeting.join(self._card)
        logger.info("waiting for %d nodes in %s", len(self._meeting.nodes), self._meeting.folder)
        cards = await self._meeting.everybody()
        experiment, words = self._checked(cards)
        plan = self._planned(cards)
        self._meeting.publish(plan)
        token = self._meeting.token_file.read_text(encoding="ascii")
        megabytes = experiment.cluster.object_store_megabytes
        store = object_store_bytes(self._card.hardware, megabytes, plan.sharing(self._card.node))
        ray = RayNode(self._card, plan, self._meeting, store)
        async with ControlServer(plan.head, plan.control, token, self._meeting.nodes[1:]) as control:
            control.failed = True
            while True:
                async with ray as process:
                    try:
                        return await self._with_ray(plan, words, control, ray, process)
                    except RayEnded:
                        if not ray.was_late:
                            raise
                        logger.warning("Ray did not come up in its own time; trying again")
                    finally:
                        if control.failed:
                            ray.keep_tails()

    async def _with_ray(
        self, plan: Plan, words: Sequence[str], control: ControlServer, ray: RayNode, process: Child
    ) -> Ended:
        """The run, when Ray runs on all nodes. Raises `SlurmError`, and `RayEnded` where it ends here."""
        try:
            await self._together(plan, control, ray, process)
            ended = await self._run_on(plan, words, control, ray, process)
        except NodeGone as error:
            ended = REQUEUE, str(error)
        control.failed = ended[0] not in (0, 2) and self._signal is None
        control.hurried = ray.hurried = self._signal not in (None, signal.SIGUSR1)
        await control.end()  # all nodes end Ray beside each other
        return ended

    def _checked(self, cards: Mapping[str, Card]) -> tuple[Experiment, list[str]]:
        """The experiment on these nodes, and the words that make it so. Raises `NemorlError`."""
        given = "gpus_per_node" in self._experiment.cluster.model_fields_set
        words = [*self._overrides, *words_for(cards, gpus_given=given)]
        return load_experiment(self._config, words, lambda found: problems_of(found, cards)), words

    def _planned(self, cards: Mapping[str, Card]) -> Plan:
        hosts = {node: card.host for node, card in cards.items()}
        found = ports.assign(
            {node: card.free_ports for node, card in cards.items()},
            {node: card.ports_size for node, card in cards.items()},
            hosts,
            os.environ.get(ports.VARIABLE) or ports.DEFAULT,
        )
        return Plan(self._card.address, found, hosts)

    async def _together(self, plan: Plan, control: ControlServer, ray: RayNode, process: Child) -> None:
        """Wait until Ray runs on all nodes. Raises `SlurmError`, and `RayEnded` where it ends here."""
        environment = {**ray.environment, "RAY_ADDRESS": plan.gcs}
        steps = (
            control.everybody(),
            reachable(plan.gcs, TOGETHER_SECONDS, self._card.node),
            self._members(environment),
        )
        lost = asyncio.ensure_future(control.lost.get())
        work = asyncio.ensure_future(_in_order(steps))
        try:
            await asyncio.wait({process.ended, lost, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return await work
            if lost.done():
                found = lost.result()
                raise (SlurmError if found.said else NodeGone)(_lost({found.node: found.why}))
            raise RayEnded(
                f"Ray ended with exit status {process.ended.result()} when it was started on "
                f"{self._card.node}; see {self._meeting.log(self._card.node)}"
            )
        finally:
            lost.cancel()
            work.cancel()

    async def _run_on(
        self, plan: Plan, words: Sequence[str], control: ControlServer, ray: RayNode, process: Child
    ) -> Ended:
        logger.info("Ray runs at %s on %s", plan.gcs, ", ".join(self._meeting.nodes))
        control.begin()
        environment = {**ray.environment, "RAY_ADDRESS": plan.gcs}
        self._train = await Child.start(train_command(self._config, words), environment)
        return await self._watch(self._train, control, process)

    async def _members(self, environment: Mapping[str, str]) -> None:
        """Wait until Ray knows all nodes. Raises `SlurmError` that names who is missing."""
        process = await asyncio.create_subprocess_exec(
            *members_command(self._meeting.nodes), env=dict(environment), stdout=asyncio.subprocess.PIPE
        )
        try:
            told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            missing = told.decode() or "the head itself"
            raise SlurmError(
                f"Ray did not start on {missing} within {TOGETHER_SECONDS:g} s; what it said is in "
                f"{self._meeting.folder}, a file for each node."
            )

    async def _watch(self, train: Child, control: ControlServer, ray: Child) -> Ended:
        lost = asyncio.ensure_future(control.lost.get())
        await asyncio.wait({train.ended, ray.ended, lost}, return_when=asyncio.FIRST_COMPLETED)
        gone: dict[str, str] = {}
        if lost.done():
            gone = {lost.result().node: lost.result().why}
        elif ray.ended.done():
            gone = {self._card.node: f"Ray ended there with exit status {ray.ended.result()}"}
        lost.cancel()
        if gone and train.running:
            logger.error("%s; ending the run", _lost(gone))
            await train.end(LOST_SECONDS)
        status = await train.ended
        if status == 0:
            return 0, "the run is finished"
        if self._signal is not None:
            ended = "" if status == REQUEUE else f"nemorl train ended with exit status {status}"
            return await self.stopped("; ".join(filter(None, [_lost(gone), ended])))
        gone = gone or await control.silent()
        if gone:
            return REQUEUE, _lost(gone)
        if status == REQUEUE:
            return REQUEUE, "the run was told to stop"
        if status == 2:
            return 2, "the configuration is refused; nothing was started"
        return 1, f"nemorl train failed with exit status {status}"


def _lost(gone: Mapping[str, str]) -> str:
    return "; ".join(f"node {node} is lost: {why}" for node, why in gone.items())


async def _in_order(steps: Sequence[Coroutine[Any, Any, None]]) -> None:
    try:
        for step in steps:
            await step
    finally:
        for step in steps:  # those that were not come to
            step.close()
