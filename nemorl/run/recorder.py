"""The steps around a run's steps: validate, write metrics and samples, save checkpoints, stop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from nemorl.algorithms.metrics import rows_of, samples_of
from nemorl.algorithms.objective import EntropyWeight
from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError
from nemorl.observe.metrics import Change, StepMetrics, read_metrics
from nemorl.observe.observer import Observer
from nemorl.plan.utilization import utilization
from nemorl.rollout.schedule import DataPlace
from nemorl.rollout.stored import TrajectoryLog, validation_series
from nemorl.session.session import Session

from .checkpoints import Checkpoints, Progress
from .stop import EarlyStop, Interrupted, StopRequest, interruptible
from .validation import validate, validation_sets

logger = logging.getLogger(__name__)


class RunRecorder:
    def __init__(
        self,
        experiment: Experiment,
        session: Session,
        observer: Observer,
        checkpoints: Checkpoints,
        start: Progress,
        stop: StopRequest | None = None,
    ) -> None:
        self._experiment, self._algorithm = experiment, experiment.algorithm
        self._session, self._observer, self._checkpoints = session, observer, checkpoints
        self.stop = stop or StopRequest()
        self._rolls_back = experiment.policy.guards.max_rollbacks > 0
        self.rollbacks = 0  # returns to an earlier checkpoint so far
        self._unsaved: tuple[Progress, asyncio.Task[StepMetrics]] | None = None  # of the last step
        self._restore(start)
        self._line: asyncio.Task[StepMetrics] | None = None  # of the last step, while its validation runs
        self._sets: dict[str, int] | None = None  # of the validation, once they have been read
        self.entropy: EntropyWeight | None = None  # its state is in every checkpoint
        self.trajectories: TrajectoryLog | None = None
        # Metrics of the validation data that need no sampling, of algorithms that have any.
        self.measure: Callable[[], Awaitable[dict[str, float]]] | None = None

    def _restore(self, start: Progress) -> None:
        self.progress = start  # of the last step
        self._skipped = start.skipped_updates
        self._skipping_steps = start.skipping_steps if self._rolls_back else 0
        self.rollbacks = max(self.rollbacks, start.rollbacks)
        self._early_stop = EarlyStop(self._algorithm.early_stop, start.best_value, start.waited)
        self._unsaved = None
        if start.step and not self._checkpoints.on_disk(start.step):  # but in memory
            extra_versions = self._session.lineage.version(start.step) - start.step
            line = asyncio.create_task(self._read_line(start.step))
            self._unsaved = replace(start, extra_versions=extra_versions), line

    async def _read_line(self, number: int) -> StepMetrics:
        steps = read_metrics(self._observer.folder.paths.metrics)
        return next(step for step in reversed(steps) if step.step == number)

    def steps(self) -> Iterator[int]:
        """Numbers of the remaining steps, from 1, until an early stop or a stop request."""
        while not self.finished and not self.stop.requested:
            yield self.done + 1

    @property
    def done(self) -> int:
        """Steps that are complete; the line of the last one may wait for its validation."""
        return self.progress.step

    @property
    def done_before_row(self) -> int:
        """Steps that were done before the present row of skipped updates, if there is one."""
        return self.done - self._skipping_steps

    @property
    def finished(self) -> bool:
        return self._early_stop.over or self.done == self._algorithm.num_steps

    async def start(self) -> None:
        """Write line 0 of a new run: the validation before the first step, if the config requests it."""
        if self.done == 0 and self._algorithm.validation.at_start:
            values = await self.stop.cancellable(self._validate(0))
            self._observer.step(0, version=0, values=values | self._observer.end_step(0))

    async def finish(self, number: int, values: dict[str, float], place: DataPlace) -> None:
        """Validate if it is due, write the step's line, then its checkpoint.

        A validation may overlap with the next step. The line and the commit of the checkpoint then follow it.
        """
        await self.settle()
        values = values | {"models/restarts": float(self._session.num_model_restarts)}
        validation = self._algorithm.validation
        if "updates/skipped" in values:
            self._skipped += int(values["updates/skipped"])
            values = values | {"skipped_updates": float(self._skipped)}
        if self._rolls_back:
            values = values | {"guards/rollbacks": float(self.rollbacks)}
            skipping = any(model.skipped_in_a_row for model in self._session.trained.models.values())
            self._skipping_steps = self._skipping_steps + 1 if skipping else 0
        periodic = validation.period is not None and number % validation.period == 0
        overlaps = periodic and self._overlaps_validation and number < self._algorithm.num_steps
        if periodic and not overlaps:
            values = values | await self._validate(number)
        last = self._early_stop.update(values) or number == self._algorithm.num_steps
        if self._algorithm.early_stop is not None:  # by which the report recognizes a run that ended early
            values = values | {"early_stop/waited": float(self._early_stop.waited)}
        if last and validation.at_end and not periodic:
            values = values | await self._validate(number)
        if self._early_stop.over:
            logger.warning("%s", self._early_stop)
        values = values | self._observer.end_step(number)
        values = values | utilization(values, self._experiment)
        if overlaps:
            await self._session.pinned.acquire()
        line = self._line = asyncio.create_task(self._write_line(number, values, validate=overlaps))
        if last or not overlaps:
            await self.settle()
        progress = Progress(
            step=number,
            skipped_updates=self._skipped,
            entropy_coefficient=None if self.entropy is None else self.entropy.coefficient,
            entropy=None if self.entropy is None else self.entropy.entropy,
            best_value=self._early_stop.best,
            waited=self._early_stop.waited,
            extra_versions=self._session.lineage.version(number) - number,
            skipping_steps=self._skipping_steps,
            rollbacks=self.rollbacks,
        ).at(place)
        self.progress, self._unsaved = progress, (progress, line)
        self._checkpoints.check()
        if self._skipping_steps and not last:
            return  # a checkpoint would take the place of one to which the run may return
        if last or number % self._experiment.checkpointing.period == 0:
            await self.save(last=last)
        elif self._checkpoints.due_copy(number, has_line=line.done()):
            with self._observer.stage("checkpoint", waits_for="checkpoint"):
                await self._checkpoints.copy(progress, line)

    async def settle(self) -> None:
        """Wait until the validation of the last step has ended and its line is written."""
        line, self._line = self._line, None
        if line is not None:
            await line

    async def close(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End with the run's steps: `settle`, but after a cancellation end the validation."""
        if self._line is not None and isinstance(error, asyncio.CancelledError):
            self._line.cancel()
        try:
            await self.settle()
        except (NemorlError, asyncio.CancelledError) as failure:
            if error is None:
                raise
            logger.warning("the validation of step %d was not completed: %s", self.done, failure)

    def rewind(self, start: Progress) -> None:
        """Discard the steps after `start`, which are taken again."""
        self._restore(start)
        if self.entropy is not None:
            weight = EntropyWeight.of(self.entropy.config, start.entropy_coefficient, start.entropy)
            self.entropy.coefficient, self.entropy.entropy = weight.coefficient, weight.entropy
        self._observer.rewind(start.step)

    async def save(self, *, last: bool) -> None:
        """Save the newest step's checkpoint if that is still to be done; the `last` one is then committed."""
        if self._experiment.checkpointing.enabled and self._unsaved is not None:
            with self._observer.stage("checkpoint", outside_step=last, waits_for="checkpoint"):
                await self._checkpoints.save(*self._unsaved)
                if last:
                    await self._checkpoints.settle(last=True)
            self._unsaved = None

    def summarize(self) -> Path | None:
        """Show what changed over the run and write the report; returns its path, None on a full disk."""
        steps = read_metrics(self._observer.folder.paths.metrics)
        names = "updates/all", "updates/skipped", "updates/empty"
        updates, skipped, empty = (int(sum(step.values.get(name, 0) for step in steps)) for name in names)
        not_finite = "were skipped because their gradients were not finite"
        if self._experiment.policy.guards.limits:
            not_finite = "were skipped because they were not finite or beyond a limit of policy.guards"
        no_gradient = "had no gradient because of filters, errors, equal rewards or masks"
        for count, why in ((skipped, not_finite), (empty, no_gradient)):
            if count:
                effect = "the run has learned nothing" if count == updates else "they changed no weight"
                logger.warning("%d of %d updates %s; %s.", count, updates, why, effect)
        shown = ["validation/accuracy", "validation/reward", "validation/loss", "reward/mean", "loss/sft"]
        shown += ["rewards/accuracy", "accuracy"]
        measured = {name: [step.values[name] for step in steps if name in step.values] for name in shown}
        changes = [Change(name, of[0], of[-1]) for name, of in measured.items() if len(of) > 1]
        return self._observer.summary(changes)

    @property
    def _overlaps_validation(self) -> bool:
        """True if engines sample while the policy trains, and no decision waits for the validation."""
        stop = self._algorithm.early_stop
        waits = stop is not None and stop.metric.startswith("validation/")
        return self._experiment.samples_ahead and not waits

    async def _write_line(self, number: int, values: dict[str, float], *, validate: bool) -> StepMetrics:
        """`validate` holds the engines at their version until the validation ends or all of them are lost."""
        if validate:
            try:
                sampling = self._sample_validation(number)
                values = values | await interruptible(sampling, self._session.starved)
            except Interrupted:
                lost = "all engines with its weights were lost"
                logger.warning("the validation of step %d was not completed: %s", number, lost)
            finally:
                self._session.pinned.release()
        version = self._session.lineage.version(number)
        return self._observer.step(number, version=version, values=values)

    async def _validate(self, number: int) -> dict[str, float]:
        measured = await self.measure() if self.measure is not None else {}
        if not self._algorithm.generates:
            return measured
        await self._session.update_weights(number)
        async with self._session.generating():
            return measured | await self._sample_validation(number, waits_for="validation")

    async def _sample_validation(self, number: int, waits_for: str = "") -> dict[str, float]:
        with self._observer.stage("validation", unit="tasks", waits_for=waits_for) as stage:
            if self._sets is None:
                self._sets = validation_sets(self._experiment)
            values, by_set = await validate(self._session, self._experiment, self._sets, stage.advance)
        for name, groups in by_set.items():
            self._observer.samples(list(samples_of(number, groups, "validation")))
            stored: set[int] = set()
            if self.trajectories is not None:
                kept = self.trajectories.kept(groups)
                if await self.trajectories.write(number, kept, {}, validation_series(name)):
                    stored = {group.group for group in kept}
            self._observer.trajectories(list(rows_of(number, groups, "validation", name, stored=stored)))
        return values
