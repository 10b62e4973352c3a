"""What every loop does around its steps: validate, record, keep checkpoints, and go on from one."""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from nemorl.config.algorithm import EntropyBonusConfig, OnlineConfig
from nemorl.config.experiment import Experiment
from nemorl.megatron.stats import TrainStats
from nemorl.observe.metrics import Change, Phase, Sample, StepMetrics, read_metrics
from nemorl.observe.observer import Observer
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session
from .checkpoints import Checkpoints, Progress
from nemorl.algorithms.kl import EntropyWeight
from .stop import EarlyStop, StopRequest
from .validation import ValidationSet, validate, validation_sets

logger = logging.getLogger(__name__)


class RunRecorder:
    """The books of one run."""

    def __init__(
        self,
        experiment: Experiment,
        session: Session,
        observer: Observer,
        checkpoints: Checkpoints,
        start: Progress,
        stop: StopRequest | None = None,
    ) -> None:
        self._experiment = experiment
        self._session = session
        self._observer = observer
        self._checkpoints = checkpoints
        self.stop = stop or StopRequest()
        self._unsaved: tuple[Progress, StepMetrics] | None = None  # of the last step
        self.done = start.step  # steps whose line is written
        self._skipped = start.skipped_updates
        algorithm = experiment.algorithm
        weighed = algorithm.entropy if isinstance(algorithm, OnlineConfig) else EntropyBonusConfig()
        self._early_stop = EarlyStop(algorithm.early_stop, start.best_value, start.waited)
        self.entropy = EntropyWeight.of(weighed, start.entropy_coefficient, start.entropy)
        # What is measured on the validation data without sampling, where the loop knows something.
        self.measure: Callable[[], Awaitable[dict[str, float]]] | None = None

    def steps(self, num_steps: int) -> Iterator[int]:
        """Numbers of the steps that are left, from 1, until the run is stopped, early or by a signal."""
        for step in range(self.done + 1, num_steps + 1):
            if self._early_stop.over or self.stop.by is not None:
                return
            yield step

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self._early_stop.over or self.done == self._experiment.algorithm.num_steps

    async def open(self) -> None:
        """Line 0 of a run that starts: validation before the first step, where the config wants it."""
        if self.done == 0 and self._experiment.algorithm.validation.at_start:
            values = await self.stop.drop(self._validate(0))
            self._observer.step(0, version=0, values=values)

    async def finish_step(self, step: int, values: dict[str, float], position: int) -> None:
        """Validate when it is due, write the step's line, then the checkpoint that belongs to it."""
        validation = self._experiment.algorithm.validation
        periodic = validation.period is not None and step % validation.period == 0
        if periodic:
            values = values | await self._validate(step)
        last = self._early_stop.hear(values) or step == self._experiment.algorithm.num_steps
        values = values | self._early_stop.metrics
        if last and validation.at_end and not periodic:
            values = values | await self._validate(step)
        if self._early_stop.over:
            logger.warning("%s", self._early_stop)
        metrics = self._observer.step(step, version=step, values=values)
        self.done = step
        kept = self.entropy.coefficient, self.entropy.entropy
        stop = self._early_stop.best, self._early_stop.waited
        self._unsaved = Progress(step, position, self._skipped, *kept, *stop), metrics
        self._checkpoints.check()
        if last or step % self._experiment.checkpointing.period == 0:
            await self.save(last=last)

    async def save(self, *, last: bool) -> None:
        """The checkpoint of the last step that is done, if it is not there yet and the config wants any.

        The `last` of a run is there when this returns.
        """
        if self._experiment.checkpointing.enabled and self._unsaved is not None:
            with self._observer.stage("checkpoint", outside_step=last):
                await self._checkpoints.save(*self._unsaved)
                if last:
                    await self._checkpoints.settle()
            self._unsaved = None

    def optimizer_metrics(self, updates: Sequence[TrainStats], left_out: int = 0) -> dict[str, float]:
        """Gradient norm, rate, tokens and updates of a step; `skipped_updates` is of the whole run.

        `left_out` updates were not made, because none of their trajectories trains: like those without a
        gradient they are empty, and where there are no others the figures are counts alone.
        """
        self._skipped += sum(u.skipped for u in updates)
        counts = {
            "skipped_updates": float(self._skipped),
            "updates/all": float(len(updates) + left_out),
            "updates/skipped": float(sum(u.skipped for u in updates)),
            "updates/empty": float(sum(u.empty for u in updates) + left_out),
        }
        if not updates:
            return counts
        loads = [u.experts.metrics() for u in updates if u.experts is not None]
        return {
            **{name: sum(load[name] for load in loads) / len(loads) for name in (loads or [{}])[0]},
            "grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "lr": updates[-1].lr,
            **counts,
            "tokens/trained": float(sum(u.num_tokens for u in updates)),
            "packing/padding": 1 - sum(u.num_tokens for u in updates) / sum(u.num_computed for u in updates),
        }

    def keep_samples(self, step: int, groups: Sequence[GroupSummary], phase: Phase = "training") -> None:
        """Write the conversations that came with their text."""
        self._observer.samples(list(samples_of(step, groups, phase)))

    def summarize(self) -> Path | None:
        """Show what changed over the run and write the report; gives its path, if there was room for it."""
        steps = read_metrics(self._observer.folder.paths.metrics)
        names = ["validation/accuracy", "validation/reward", "validation/loss", "reward/mean", "loss/sft"]
        names += ["rewards/accuracy", "accuracy"]
        updates, skipped, empty = (
            int(sum(step.values.get(f"updates/{which}", 0) for step in steps))
            for which in ("all", "skipped", "empty")
        )
        lost = (
            (skipped, "were skipped because their gradients were not finite"),
            (empty, "had nothing to learn from: filters, errors, equal rewards or masks left no gradient"),
        )
        for count, why in lost:
            if count:
                nothing = "the run has learnt nothing" if count == updates else "they changed no weight"
                logger.warning("%d of %d updates %s; %s.", count, updates, why, nothing)
        return self._observer.summary([c for name in names if (c := _change(name, steps)) is not None])

    @cached_property
    def _validation_sets(self) -> list[ValidationSet]:
        return validation_sets(self._experiment)

    async def _validate(self, step: int) -> dict[str, float]:
        measured = await self.measure() if self.measure is not None else {}
        if not self._experiment.algorithm.generates:
            return measured
        return measured | await self._sample_validation(step)

    async def _sample_validation(self, step: int) -> dict[str, float]:
        await self._session.update_weights(step)
        async with self._session.generating():
            with self._observer.stage("validation", unit="tasks") as stage:
                values, groups = await validate(
                    self._session, self._experiment, self._validation_sets, stage.advance
                )
        self.keep_samples(step, groups, "validation")
        return values


def _change(name: str, steps: Sequence[StepMetrics]) -> Change | None:
    values = [step.values[name] for step in steps if name in step.values]
    return Change(name, values[0], values[-1]) if len(values) > 1 else None


def samples_of(step: int, groups: Sequence[GroupSummary], phase: Phase) -> Iterator[Sample]:
    """The conversations of the groups that came with their text."""
    for group in groups:
        for text in group.texts:
            t = group.trajectories[text.row]
            yield Sample(
                step=step,
                phase=phase,
                task=group.task_index,
                prompt=text.prompt,
                completion=text.completion,
                reward=t.reward,
                rewards=t.rewards,
                stop=str(t.stop),
                prompt_tokens=t.num_tokens - t.num_sampled,
                sampled_tokens=t.num_sampled,
                answer=text.answer,
                error=t.error,
            )
