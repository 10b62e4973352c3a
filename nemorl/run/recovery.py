"""Continues a run that has lost processes of a model: starts them again and restores the newest checkpoint.

    step ──lost──▶ restart ─▶ restore ─▶ weights to the engines ─▶ rewind data and records ─▶ step

Engines and rollout workers continue meanwhile, with the weights that they have.
"""

import logging
import time

from nemorl.algorithms.offline import OfflineAlgorithm
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError
from nemorl.observe.observer import Observer
from nemorl.observe.timeline import format_seconds
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
        self._session, self._observer, self._checkpoints = session, observer, checkpoints
        self._recorder, self._algorithm = recorder, algorithm
        self._furthest = recorder.done  # the last step before a restart
        self._restarts = 0  # since a step was completed for the first time

    async def recover(self, number: int, error: NemorlError) -> None:
        """Return to the newest checkpoint if `error` of this step comes from a lost process of a model.

        Raises `error`, or a later one, where it does not, or where restarts bring no further step.
        """
        if self._recorder.done > self._furthest:
            self._furthest, self._restarts = self._recorder.done, 0
        while True:
            lost = await self._session.lost_models()
            # Rollout workers cannot exchange the processes of a policy that samples.
            if not lost or self._session.policy_samples or not self._max_restarts:
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
        session, began, done = self._session, time.monotonic(), self._recorder.done
        names = " and ".join(lost)
        logger.warning("%s lost in step %d, restarting: %s", names, number, error)
        await self._recorder.settle()  # the line of a step that may be kept
        await session.restart_models(lost)
        saved = await self._checkpoints.newest_state()
        start = saved.progress if saved is not None else Progress()
        if saved is not None:
            await session.trained.restore(saved.folder)
        step = start.step
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
        seconds = format_seconds(time.monotonic() - began)
        logger.warning("%s restarted in %s, continuing after step %d: %s", names, seconds, step, discarded)
