"""Continues a run from a checkpoint: after the loss of processes or samples, and if guards skip updates.

    step ──lost──▶ restart ─▶ restore ─▶ weights to the engines ─▶ rewind data and records ─▶ step
         ──samples lost with their node──▶ rewind data to the end of the step before ─▶ step
         ──skipped in a row──▶ restore an earlier one ─▶ weights to the engines ─▶ rewind records ─▶ step

Engines and rollout workers continue meanwhile, with the weights that they have. After skipped updates the
place in the data is kept: the same batches would be skipped again.
"""

import logging
import time
from dataclasses import replace

from nemorl.algorithms.offline import OfflineAlgorithm
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.cluster.errors import ClusterError, NodeNotReplaced, ObjectsLost, RestartsExhausted
from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError
from nemorl.observe.observer import Observer
from nemorl.observe.timeline import format_seconds
from nemorl.session.handles import TooManySkippedSteps
from nemorl.session.session import Session

from .checkpoints import Checkpoints, Progress
from .recorder import RunRecorder

logger = logging.getLogger(__name__)


class Recovery:
    def __init__(
        self,
        experiment: Experiment,
        session: Session,
        observer: Observer,
        checkpoints: Checkpoints,
        recorder: RunRecorder,
        algorithm: OnlineAlgorithm | OfflineAlgorithm,
    ) -> None:
        self._max_restarts = experiment.cluster.max_model_restarts
        self._ends_with_node = experiment.cluster.on_lost_node == "fail"
        self._max_rollbacks = experiment.policy.guards.max_rollbacks
        self._session, self._observer, self._checkpoints = session, observer, checkpoints
        self._recorder, self._algorithm = recorder, algorithm
        self._furthest = recorder.done  # the last step before a restart
        self._restarts = 0  # since a step was completed for the first time

    async def recover(self, number: int, error: NemorlError) -> None:
        """Repeat the step, or return to a checkpoint, if `error` comes from a loss or from skipped updates.

        Raises `error`, or a later one, where it does not, or where that is not allowed again.
        """
        if self._recorder.done > self._furthest:
            self._furthest, self._restarts = self._recorder.done, 0
        if isinstance(error, TooManySkippedSteps) and self._max_rollbacks:
            try:
                with self._observer.stage("rollback", outside_step=True):
                    await self._roll_back(number, error)
                return
            except ClusterError as failure:
                error = failure
        while True:
            lost = await self._session.lost_models()
            # Rollout workers cannot exchange the processes of a policy that samples.
            ends = isinstance(error, RestartsExhausted | NodeNotReplaced) or not self._max_restarts
            if not lost and isinstance(error, ObjectsLost) and self._restarts < self._max_restarts:
                self._restarts += 1
                await self._repeat(number, error)
                return
            if not lost or self._session.policy_samples or ends:
                raise error
            if self._ends_with_node and self._session.lost_node(lost):
                error.add_note("models are not restarted on other nodes (cluster.on_lost_node = fail)")
                raise error
            if self._restarts == self._max_restarts:
                problem = f"restarted {self._restarts} times without a further step"
                error.add_note(f"{' and '.join(lost)} {problem} (cluster.max_model_restarts)")
                raise error
            self._restarts += 1
            try:
                with self._observer.stage("restart", outside_step=True):
                    await self._restart(number, lost, error)
                return
            except NemorlError as failure:
                error = failure

    async def _restart(self, number: int, lost: list[str], error: NemorlError) -> None:
        session, began = self._session, time.monotonic()
        names = " and ".join(lost)
        logger.warning("%s lost in step %d, restarting: %s", names, number, error)
        await self._recorder.settle()  # the line of a step that may be kept
        if moved := session.lost_node(lost):
            with self._observer.stage("waiting for a node", outside_step=True):
                await session.await_places(lost)
        await session.restart_models(lost)
        if moved:
            logger.warning("%s", "; ".join(f"{node}: {ranks}" for node, ranks in session.nodes.items()))
        saved = await self._checkpoints.newest_state()
        if saved is not None:
            await session.trained.restore(saved.folder)
        discarded = await self._continue_after(number, saved.progress if saved is not None else Progress())
        seconds = format_seconds(time.monotonic() - began)
        logger.warning("%s restarted in %s, %s", names, seconds, discarded)

    async def _repeat(self, number: int, error: ObjectsLost) -> None:
        """Samples are read before the first update of a step, so that all weights are those it began with."""
        logger.warning("samples of step %d were lost with a node and are sampled again: %s", number, error)
        await self._recorder.settle()
        before = self._recorder.progress
        self._algorithm.rewind(before.step, before.place)
        self._recorder.rewind(before)

    async def _roll_back(self, number: int, error: NemorlError) -> None:
        """To a checkpoint from before the weights whose updates are skipped; if there is none, of these."""
        recorder, checkpoints = self._recorder, self._checkpoints
        if recorder.rollbacks == self._max_rollbacks:
            times = f"{recorder.rollbacks} times (policy.guards.max_rollbacks)"
            error.add_note(f"the run has returned to a checkpoint {times}")
            raise error
        await recorder.settle()
        before = recorder.done_before_row
        saved = await checkpoints.newest_state(before) or await checkpoints.newest_state(before + 1)
        if saved is None:
            error.add_note(f"there is no checkpoint of step {before} or before (checkpointing.period)")
            raise error
        logger.warning("step %d: %s", number, error)
        await self._session.trained.restore(saved.folder)
        place, count = self._algorithm.place, recorder.rollbacks + 1
        start = replace(saved.progress.at(place), rollbacks=count)
        await checkpoints.remove_after(start.step)
        discarded = await self._continue_after(number, start)
        logger.warning("rollback %d of %d, %s", count, self._max_rollbacks, discarded)

    async def _continue_after(self, number: int, start: Progress) -> str:
        """Continue from restored weights; returns a description."""
        session, done, step = self._session, self._recorder.done, start.step
        # Generation may have the weights of step `number` already.
        newest = session.lineage.version(max(number, done))
        session.lineage = session.lineage.restored(step, newest)
        if isinstance(self._algorithm, OnlineAlgorithm):
            await session.update_weights(step)
        self._algorithm.rewind(step, start.place)
        self._recorder.rewind(start)
        discarded = "no completed step is lost"
        if done > step:
            discarded = f"{done - step} completed steps are discarded ({step + 1} to {done})"
        return f"continuing after step {step}: {discarded}"
