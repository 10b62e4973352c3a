"""What `nemorl train` calls: a run from a checked experiment to its end.

data ─▶ session ─▶ [reference sums] ─▶ [restore] ─▶ { step ─▶ recorder } ─▶ export ─▶ report

Start the processes of a run, and run its coroutine to the end.

What `nemorl eval` calls: measure a model on the validation tasks, without training it.
"""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nemorl.algorithms.best_of_n import BestOfNUpdate
from nemorl.algorithms.distillation import DistillationUpdate
from nemorl.algorithms.filters import refill
from nemorl.algorithms.metrics import LogprobGate, samples_of
from nemorl.algorithms.offline import OfflineAlgorithm, ReferenceSums, reference_sums
from nemorl.algorithms.offline_data import OfflineData, load_offline_data, objective_of
from nemorl.algorithms.online import OnlineAlgorithm, Update
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.algorithms.teachers import Teachers, teachers_of_tasks
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.algorithm import (
    DistillationConfig,
    IterativePreferenceConfig,
    OfflineBase,
    OnlineConfig,
    OnPolicyDistillationConfig,
    RejectionSamplingConfig,
)
from nemorl.config.auxiliary import teachers_held
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of, reward_weights
from nemorl.config.load import to_yaml
from nemorl.data.datasets import load_tasks
from nemorl.errors import NemorlError, RunError, RunStopped
from nemorl.megatron.checkpoint_store import CheckpointStore, Found
from nemorl.observe.files import JsonLinesWriter, write_atomically
from nemorl.observe.observer import Observer
from nemorl.observe.report import write_report
from nemorl.observe.run_folder import RunFolder
from nemorl.observe.trackers import check_trackers
from nemorl.rollout.collector import Collector, CollectorPlan, TaskOrder
from nemorl.session.session import Session, open_session

from .checkpoints import Checkpoints, Origin, Progress, full_disk_named, replace_hf
from .recorder import RunRecorder
from .stop import EarlyStop, StepCancelled, StopRequest
from .validation import validate, validation_sets

T = TypeVar("T")


@asynccontextmanager
async def started_session(
    experiment: Experiment, *, policy: bool, sampling: bool, install_signals: Callable[[], None]
) -> AsyncIterator[Session]:
    """Open a session in a new Ray cluster, or in the one that RAY_ADDRESS names.

    `install_signals` is called once Ray runs, because Ray replaces signal handlers when it starts.
    """
    models = {model.name: sampling if model.scores else policy for model in models_of(experiment)}
    policy = policy or not experiment.generation.has_engines  # the policy itself samples then
    groups = {**models, "policy": policy, "generation": sampling, "rollout": sampling, "endpoint": sampling}
    requests = [request for request in worker_requests(experiment) if groups[request.group]]
    with ClusterRuntime(experiment.cluster, requests) as runtime:
        install_signals()
        placement = await runtime.reserve()
        try:
            async with open_session(experiment, placement, policy=policy, sampling=sampling) as session:
                yield session
        finally:
            placement.release()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run the work. Raises RunError if a signal cancelled it."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise RunError(
            "Terminated immediately by a signal; all processes have ended. Continue a run from its newest "
            "checkpoint with --resume."
        ) from None


logger = logging.getLogger(__name__)

SamplingConfig = (
    OnlineConfig | OnPolicyDistillationConfig | IterativePreferenceConfig | RejectionSamplingConfig
)


@dataclass(frozen=True)
class RunResult:
    """Files of a finished run."""

    run_dir: Path
    report: Path | None  # None if the disk was full
    hf_dir: Path | None  # the final weights, with `checkpointing.save_hf`


def train(experiment: Experiment, resume: bool = False) -> RunResult:
    """Run an experiment to its end, or from its newest complete checkpoint on. Raises NemorlError."""
    check_trackers(experiment.logger)
    store = CheckpointStore(experiment.run_dir / "checkpoints")
    found = store.latest_valid() if resume else None
    if resume and found is None and store.corrupt():
        raise RunError(
            f"No complete checkpoint in {store.folder} (corrupt: {', '.join(store.corrupt())}). "
            "To start over, delete the run folder or set another run_dir."
        )
    if found is not None and (fix := _fix_if_complete(experiment, found)):
        return _finish_complete_run(experiment, found, fix)
    yaml = to_yaml(experiment)
    if resume:
        folder = RunFolder.resume(experiment.run_dir, yaml, found.step if found else None)
    else:
        folder = RunFolder.create(experiment.run_dir, yaml)
    with Observer(folder, experiment.logger, total_steps=experiment.algorithm.num_steps) as observer:
        return run_to_end(_train(experiment, observer, store, found))


async def _train(
    experiment: Experiment, observer: Observer, store: CheckpointStore, found: Found | None
) -> RunResult:
    """Run to the end. Raises RunStopped if a signal ends the run, and any error with how to continue."""
    stop = StopRequest()
    stop.install()
    try:
        return await _train_session(experiment, observer, store, found, stop)
    except asyncio.CancelledError:
        if stop.signal is None or stop.immediate:
            raise
        raise RunStopped(_stopped(stop, store)) from None
    except RunStopped:
        raise
    except NemorlError as error:
        if (newest := max(store.steps(), default=None)) is not None:
            error.add_note(f"Continue from the checkpoint of step {newest} with --resume.")
        raise


async def _train_session(
    experiment: Experiment, observer: Observer, store: CheckpointStore, found: Found | None, stop: StopRequest
) -> RunResult:
    progress = Progress.read(found.path) if found else Progress()
    data = load_data(experiment, progress)  # before any process starts, so that its errors come early
    async with AsyncExitStack() as stack:
        with observer.stage("start", outside_step=True):
            started = started_session(
                experiment, policy=True, sampling=experiment.algorithm.generates, install_signals=stop.install
            )
            session = await stack.enter_async_context(started)
        observer.header({**_header(experiment, await session.learner.header(), progress), **session.nodes})
        references = await _reference_sums(experiment, data, session, observer)
        if found is not None:
            with observer.stage("restore", outside_step=True):
                await session.trained.restore(found.path)
        async with Checkpoints(experiment, session.trained, store) as checkpoints:
            recorder = RunRecorder(experiment, session, observer, checkpoints, progress, stop)
            with stop.stepping(), suppress(StepCancelled):
                await _steps(experiment, data, references, session, observer, recorder)
            if stop.requested and not recorder.finished:
                await recorder.save(last=True)
                await checkpoints.settle()
                raise RunStopped(_stopped(stop, store, recorder.done))
        hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
        if hf_dir is not None:
            with observer.stage("export", outside_step=True):
                replace_hf(store.path(recorder.done), recorder.done, hf_dir, experiment)
        return RunResult(experiment.run_dir, recorder.summarize(), hf_dir)


async def _steps(
    experiment: Experiment,
    data: "TrainingData",
    references: ReferenceSums,
    session: Session,
    observer: Observer,
    recorder: RunRecorder,
) -> None:
    """All steps that are left. Raises StepCancelled on a stop request."""
    config = experiment.algorithm
    algorithm: OnlineAlgorithm | OfflineAlgorithm
    async with AsyncExitStack() as stack:
        if isinstance(config, OfflineBase):
            algorithm = _offline(experiment, config, data, references, session, observer)
            if algorithm.held_out:
                recorder.measure = algorithm.validation_metrics
        else:
            algorithm = _online(experiment, config, data, session, observer, recorder)
            stack.push_async_callback(algorithm.collector.close)
            await session.update_weights(recorder.done)
        await recorder.start()
        for number in recorder.steps():
            metrics = await algorithm.step(number)
            await recorder.finish(number, metrics, algorithm.position)


@dataclass(frozen=True)
class TrainingData:
    """The training data in their order, and the position of the run in it."""

    order: TaskOrder
    position: int
    done: int  # steps that the run has finished
    offline: OfflineData | None  # of a run that does not sample
    task_teachers: Sequence[str] = ()  # the teacher of each task, for on-policy distillation


def load_data(experiment: Experiment, progress: Progress) -> TrainingData:
    """Read the training data; `progress` has the position. Raises NemorlError."""
    algorithm, offline, teachers = experiment.algorithm, None, []
    if isinstance(algorithm, OfflineBase):
        offline = load_offline_data(experiment, algorithm)
        size = len(offline.units)
    else:
        tasks = load_tasks(experiment.data.train, experiment.data)
        size = len(tasks)
        if isinstance(algorithm, OnPolicyDistillationConfig):
            teachers = teachers_of_tasks(tasks, algorithm.teacher_key, list(experiment.teachers))
    order = TaskOrder(size, experiment.seed, experiment.data.shuffle)
    return TrainingData(order, progress.position, progress.step, offline, teachers)


async def _reference_sums(
    experiment: Experiment, data: TrainingData, session: Session, observer: Observer
) -> ReferenceSums:
    """The reference's logprobs of all that is left to train on, if the algorithm precomputes them."""
    algorithm = experiment.algorithm
    if data.offline is None or not isinstance(algorithm, OfflineBase) or not algorithm.precomputes_reference:
        return ReferenceSums()
    left = algorithm.num_steps - data.done
    examples = partial(data.offline.compared, data.order, algorithm, data.position, left)
    multiple = experiment.policy.layout.fewest_units
    model = experiment.policy.model_path
    return await reference_sums(examples, experiment.run_dir, model, session, observer, multiple)


def _offline(
    experiment: Experiment,
    config: OfflineBase,
    data: TrainingData,
    references: ReferenceSums,
    session: Session,
    observer: Observer,
) -> OfflineAlgorithm:
    assert data.offline is not None
    return OfflineAlgorithm(
        config,
        objective_of(config),
        session,
        data.offline.units,
        data.offline.held_out,
        references,
        data.order,
        data.position,
        observer,
        experiment.policy.layout.fewest_units,
        _teachers(experiment, config, session) if isinstance(config, DistillationConfig) else None,
    )


def _online(
    experiment: Experiment,
    config: SamplingConfig,
    data: TrainingData,
    session: Session,
    observer: Observer,
    recorder: RunRecorder,
) -> OnlineAlgorithm:
    plan = CollectorPlan(
        groups_per_step=config.num_prompts_per_step,
        samples_per_group=config.num_generations_per_prompt,
        max_staleness=config.max_staleness,
        texts_per_step=experiment.logger.samples_per_step,
        num_steps=config.num_steps,
        greedy_baseline=config.greedy_baseline,
    )
    seconds = experiment.cluster.deadlines.generation
    replacing = refill(config.filters, config.num_prompts_per_step)
    collector = Collector(session.rollout, data.order, plan, seconds, data.position, recorder.done, replacing)
    multiple, teachers = experiment.policy.layout.fewest_units, None
    update: Update
    if isinstance(config, IterativePreferenceConfig | RejectionSamplingConfig):
        update = BestOfNUpdate(config, multiple)
    elif isinstance(config, OnPolicyDistillationConfig):
        teachers = _teachers(experiment, config, session)
        update = DistillationUpdate(config, data.task_teachers, multiple)
    else:
        weights = reward_weights(experiment.env, experiment.rewards)
        update = PolicyGradientUpdate(config, recorder.entropy, weights)
    gate = LogprobGate(config, experiment.generation)
    cancellable = recorder.stop.cancellable
    return OnlineAlgorithm(config, session, collector, update, gate, observer, cancellable, teachers)


def _teachers(
    experiment: Experiment, config: DistillationConfig | OnPolicyDistillationConfig, session: Session
) -> Teachers:
    multiples = {
        name: teacher.worker_config(experiment.policy).layout.fewest_units
        for name, teacher in teachers_held(experiment.teachers).items()
    }
    return Teachers(session, experiment.teachers, multiples, config.loss.top_k)


def _fix_if_complete(experiment: Experiment, found: Found) -> str:
    """How to train further if no step is left after a checkpoint; empty if one is."""
    num_steps = experiment.algorithm.num_steps
    if found.step >= num_steps:
        return f"To train further, raise algorithm.num_steps, {num_steps}"
    progress = Progress.read(found.path)
    stop = EarlyStop(experiment.algorithm.early_stop, progress.best_value, progress.waited)
    return f"To train further, raise algorithm.early_stop.patience; {stop}" if stop.over else ""


def _finish_complete_run(experiment: Experiment, found: Found, fix: str) -> RunResult:
    """Start nothing; write the files for which the disk may have been full at the end of the run."""
    logger.warning(
        "%s is already complete (checkpoint at step %d); nothing to do. %s.",
        experiment.run_dir,
        found.step,
        fix,
    )
    hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
    if hf_dir is not None:
        origin = Origin.read(hf_dir)
        if origin is None or origin.step != found.step:
            replace_hf(found.path, found.step, hf_dir, experiment)
    return RunResult(experiment.run_dir, write_report(experiment.run_dir), hf_dir)


def _stopped(stop: StopRequest, store: CheckpointStore, done: int | None = None) -> str:
    assert stop.signal is not None
    newest = max(store.steps(), default=None)
    if newest is None:
        fix = "There is no checkpoint: --resume starts from the beginning"
    else:
        fix = "Continue with --resume" if newest == done else f"Continue from step {newest} with --resume"
    when = "outside of its steps" if done is None else f"after step {done}"
    return f"Stopped by {stop.signal.name} {when}. {fix}."


def _header(experiment: Experiment, policy: dict[str, str], progress: Progress) -> dict[str, str]:
    algorithm = experiment.algorithm
    return {
        "run": str(experiment.run_dir),
        "algorithm": algorithm.name,
        "model": str(experiment.policy.model_path),
        "steps": f"{progress.step} of {algorithm.num_steps} done"
        if progress.step
        else str(algorithm.num_steps),
        **{f"policy {name}": value for name, value in policy.items()},
    }


@dataclass(frozen=True)
class Evaluation:
    """Result of `nemorl eval`."""

    model: Path
    origin: Origin | None  # of a model that was exported from a run
    metrics: dict[str, float]
    samples: Path


def evaluate(experiment: Experiment) -> Evaluation:
    """Measure the model on the validation tasks. Raises NemorlError."""
    return run_to_end(_evaluate(experiment))


async def _evaluate(experiment: Experiment) -> Evaluation:
    folder = experiment.run_dir / "eval"
    evaluated = experiment.model_copy(update={"run_dir": folder})
    samples = folder / "samples.jsonl"
    with full_disk_named("The evaluation", experiment.run_dir.parent, "Make room, or set another run_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        samples.unlink(missing_ok=True)
    started = started_session(evaluated, policy=False, sampling=True, install_signals=_cancel_at_sigterm)
    async with started as session, session.generating():
        metrics, groups = await validate(session, evaluated, validation_sets(evaluated))
    writer = JsonLinesWriter(samples)
    for sample in samples_of(0, groups, "validation"):
        writer.append(asdict(sample))
    writer.close()
    model = experiment.policy.model_path
    origin = Origin.read(model)
    content = {"model": str(model), "origin": asdict(origin) if origin else None, "metrics": metrics}
    write_atomically(folder / "metrics.json", json.dumps(content, indent=2) + "\n")
    return Evaluation(model, origin, metrics, samples)


def _cancel_at_sigterm() -> None:
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
