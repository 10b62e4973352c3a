"""From a checked experiment to a finished run: what `nemorl train` and `nemorl eval` call.

What an experiment learns from and the loop that it learns in, put together for a started session.
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
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.algorithm import DistillationAlgorithm, DistillationConfig, IterativePreferenceConfig, OfflineBase, OnlineConfig, OnPolicyDistillationConfig, RejectionSamplingConfig
from nemorl.config.auxiliary import teachers_held
from nemorl.config.checks.metrics import reward_weights
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.load import to_yaml
from nemorl.data.datasets import TaskOrder, load_tasks
from nemorl.errors import RunError, RunStopped
from nemorl.megatron.checkpoint_store import CheckpointStore, Found
from nemorl.observe.files import write_atomically
from nemorl.observe.metrics import SampleWriter
from nemorl.observe.observer import Observer
from nemorl.observe.report import write_report
from nemorl.observe.run_folder import RunFolder
from nemorl.observe.trackers import check_trackers
from nemorl.rollout.collector import Collector, CollectorPlan
from nemorl.session.session import Session, open_session
from nemorl.algorithms.best_of_n import BestOfNUpdate
from .checkpoints import Checkpoints, Origin, Progress, full_disk_named, replace_hf
from nemorl.algorithms.distillation import DistillationUpdate
from nemorl.algorithms.filters import refill
from nemorl.algorithms.gate import LogprobGate
from nemorl.algorithms.offline import OfflineLoop, ReferenceSums, reference_sums
from nemorl.algorithms.offline_data import OfflineData, load_offline_data, offline_algorithm
from nemorl.algorithms.online import OnlineLoop, PolicyGradientUpdate, Scorer, Update
from .recorder import RunRecorder, samples_of
from .stop import EarlyStop, StepCancelled, StopRequest
from nemorl.algorithms.teachers import Teachers, teachers_of_tasks
from .validation import validate, validation_sets

OnlineAlgorithm = (
    OnlineConfig | OnPolicyDistillationConfig | IterativePreferenceConfig | RejectionSamplingConfig
)


@dataclass(frozen=True)
class TrainingData:
    """The training data in their order, and where in it the run stands."""

    order: TaskOrder
    position: int
    done: int  # steps that the run has behind it
    offline: OfflineData | None  # of a run that learns from data as it stands
    taught_by: Sequence[str] = ()  # names of the teachers of the tasks, of on-policy distillation


def load_data(experiment: Experiment, progress: Progress) -> TrainingData:
    """Read what the experiment learns from; `progress` says where in it. Raises NemorlError."""
    algorithm, offline, taught_by = experiment.algorithm, None, []
    if isinstance(algorithm, OfflineBase):
        offline = load_offline_data(experiment, algorithm)
        size = len(offline.units)
    else:
        tasks = load_tasks(experiment.data.train, experiment.data)
        size = len(tasks)
        if isinstance(algorithm, OnPolicyDistillationConfig):
            taught_by = teachers_of_tasks(tasks, algorithm.teacher_key, list(experiment.teachers))
    order = TaskOrder(size, experiment.seed, experiment.data.shuffle)
    return TrainingData(order, progress.position, progress.step, offline, taught_by)


async def reference_of(
    experiment: Experiment, data: TrainingData, session: Session, observer: Observer
) -> ReferenceSums:
    """What the weights that the run starts from say of all that it compares, where the algorithm asks."""
    algorithm = experiment.algorithm
    if data.offline is None or not isinstance(algorithm, OfflineBase) or not algorithm.precomputes_reference:
        return ReferenceSums()
    left = algorithm.num_steps - data.done
    examples = partial(data.offline.compared, data.order, algorithm, data.position, left)
    multiple = experiment.policy.layout.fewest_units
    model = experiment.policy.model_path
    return await reference_sums(examples, experiment.run_dir, model, session, observer, multiple)


def loop_of(
    experiment: Experiment,
    data: TrainingData,
    references: ReferenceSums,
    session: Session,
    observer: Observer,
    recorder: RunRecorder,
) -> OnlineLoop | OfflineLoop:
    """The loop of the experiment's algorithm, which goes on where data and books stand."""
    algorithm = experiment.algorithm
    if isinstance(algorithm, OfflineBase):
        assert data.offline is not None
        return OfflineLoop(
            algorithm,
            offline_algorithm(algorithm),
            session,
            data.offline.units,
            data.offline.held_out,
            references,
            data.order,
            data.position,
            observer,
            recorder,
            experiment.policy.layout.fewest_units,
            _teachers(experiment, algorithm, session) if isinstance(algorithm, DistillationConfig) else None,
        )
    collector = _collector(experiment, algorithm, data, session, recorder.done)
    learning = _learning(experiment, algorithm, data.taught_by, session, observer, recorder)
    return OnlineLoop(algorithm, session, collector, learning, observer, recorder)


def _collector(
    experiment: Experiment, algorithm: OnlineAlgorithm, data: TrainingData, session: Session, done: int
) -> Collector:
    plan = CollectorPlan(
        groups_per_step=algorithm.num_prompts_per_step,
        samples_per_group=algorithm.num_generations_per_prompt,
        max_staleness=algorithm.max_staleness,
        texts_per_step=experiment.logger.samples_per_step,
        num_steps=algorithm.num_steps,
        greedy_baseline=algorithm.greedy_baseline,
    )
    seconds = experiment.cluster.deadlines.generation
    replacing = refill(algorithm.filters, algorithm.num_prompts_per_step)
    return Collector(session.rollout, data.order, plan, seconds, data.position, done, replacing)


def _learning(
    experiment: Experiment,
    algorithm: OnlineAlgorithm,
    taught_by: Sequence[str],
    session: Session,
    observer: Observer,
    recorder: RunRecorder,
) -> Update:
    multiple = experiment.policy.layout.fewest_units
    gate = LogprobGate(algorithm, experiment.generation)
    if isinstance(algorithm, IterativePreferenceConfig | RejectionSamplingConfig):
        return BestOfNUpdate(algorithm, session, observer, recorder, gate, multiple)
    if isinstance(algorithm, OnPolicyDistillationConfig):
        teachers = _teachers(experiment, algorithm, session)
        return DistillationUpdate(algorithm, session, observer, recorder, gate, teachers, taught_by, multiple)
    scorer = Scorer(algorithm, reward_weights(experiment.env, experiment.rewards))
    return PolicyGradientUpdate(algorithm, scorer, session, observer, recorder, gate)


def _teachers(experiment: Experiment, algorithm: DistillationAlgorithm, session: Session) -> Teachers:
    multiples = {
        name: teacher.worker_config(experiment.policy).layout.fewest_units
        for name, teacher in teachers_held(experiment.teachers).items()
    }
    return Teachers(session, experiment.teachers, multiples, algorithm.loss.top_k)


logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves."""

    run_dir: Path
    report: Path | None  # None where there was no room for it
    hf_dir: Path | None  # the final weights, where `checkpointing.save_hf` asks for them


@dataclass(frozen=True)
class Evaluation:
    """Figures of `nemorl eval`."""

    model: Path
    origin: Origin | None  # of the model, where it was exported from a run
    metrics: dict[str, float]
    samples: Path


def train(experiment: Experiment, resume: bool = False) -> RunResult:
    """Run an experiment to its end, or from its newest whole checkpoint on. Raises NemorlError."""
    check_trackers(experiment.logger)
    store = CheckpointStore(experiment.run_dir / "checkpoints")
    found = store.latest_valid() if resume else None
    if resume and found is None and store.corrupt():
        raise RunError(
            f"No checkpoint in {store.folder} is whole; damaged are {', '.join(store.corrupt())}. To begin "
            "anew, remove the run folder or take another run_dir."
        )
    if found is not None and (why := _why_finished(experiment, found)):
        return _finished(experiment, found, why)
    yaml = to_yaml(experiment)
    if resume:
        folder = RunFolder.resume(experiment.run_dir, yaml, found.step if found else None)
    else:
        folder = RunFolder.create(experiment.run_dir, yaml)
    with Observer(folder, experiment.logger, total_steps=experiment.algorithm.num_steps) as observer:
        return _run_to_end(_stoppable(experiment, observer, store, found))


def evaluate(experiment: Experiment) -> Evaluation:
    """Measure the model on the validation tasks, without training it. Raises NemorlError."""
    return _run_to_end(_evaluate(experiment))


async def _stoppable(
    experiment: Experiment, observer: Observer, store: CheckpointStore, found: Found | None
) -> RunResult:
    """`_train`. Raises RunStopped where a signal ends it."""
    stop = StopRequest()
    stop.listen()
    try:
        return await _train(experiment, observer, store, found, stop)
    except asyncio.CancelledError:
        if stop.by is None or stop.at_once:
            raise
        raise RunStopped(_stopped(stop.by, store, "outside its steps")) from None


async def _train(
    experiment: Experiment, observer: Observer, store: CheckpointStore, found: Found | None, stop: StopRequest
) -> RunResult:
    progress = Progress.read(found.path) if found else Progress()
    data = load_data(experiment, progress)  # what is wrong with it shows before any process starts
    sampling = experiment.algorithm.generates
    with observer.stage("start", outside_step=True):
        stack = AsyncExitStack()
        started = _session(experiment, policy=True, sampling=sampling, listen=stop.listen)
        session = await stack.enter_async_context(started)
    async with stack:
        observer.header({**_header(experiment, await session.learner.header(), progress), **session.nodes})
        references = await reference_of(experiment, data, session, observer)
        if found is not None:
            with observer.stage("restore", outside_step=True):
                await session.trained.restore(found.path)
        async with Checkpoints(experiment, session.trained, store) as checkpoints:
            recorder = RunRecorder(experiment, session, observer, checkpoints, progress, stop)
            loop = loop_of(experiment, data, references, session, observer, recorder)
            with stop.stepping(), suppress(StepCancelled):
                await loop.run()
            if stop.by is not None and not recorder.finished:
                await recorder.save(last=True)
                await checkpoints.settle()
                raise RunStopped(_stopped(stop.by, store, f"after step {recorder.done}"))
        hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
        if hf_dir is not None:
            with observer.stage("export", outside_step=True):
                replace_hf(store.path(recorder.done), recorder.done, hf_dir, experiment)
        return RunResult(experiment.run_dir, recorder.summarize(), hf_dir)


def _why_finished(experiment: Experiment, found: Found) -> str:
    """Why nothing is left to train after a checkpoint, with the mend; empty where something is."""
    num_steps = experiment.algorithm.num_steps
    if found.step >= num_steps:
        return f"To train on, raise algorithm.num_steps, {num_steps}"
    progress = Progress.read(found.path)
    stop = EarlyStop(experiment.algorithm.early_stop, progress.best_value, progress.waited)
    return f"To train on, raise algorithm.early_stop.patience: {stop}" if stop.over else ""


def _finished(experiment: Experiment, found: Found, why: str) -> RunResult:
    """A run with nothing left to train: starts nothing, and writes what its end may have lacked room for."""
    logger.warning(
        "%s is finished: its newest checkpoint is of step %d, so nothing is started. %s.",
        experiment.run_dir,
        found.step,
        why,
    )
    hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
    if hf_dir is not None:
        origin = Origin.read(hf_dir)
        if origin is None or origin.step != found.step:
            replace_hf(found.path, found.step, hf_dir, experiment)
    return RunResult(experiment.run_dir, write_report(experiment.run_dir), hf_dir)


async def _evaluate(experiment: Experiment) -> Evaluation:
    folder = experiment.run_dir / "eval"
    apart = experiment.model_copy(update={"run_dir": folder})
    samples = folder / "samples.jsonl"
    with full_disk_named("The evaluation", experiment.run_dir.parent, "Make room, or name another run_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        samples.unlink(missing_ok=True)
    started = _session(apart, policy=False, sampling=True, listen=_end_at_sigterm)
    async with started as session, session.generating():
        metrics, groups = await validate(session, apart, validation_sets(apart))
    writer = SampleWriter(samples)
    writer.write(list(samples_of(0, groups, "validation")))
    writer.close()
    model = experiment.policy.model_path
    origin = Origin.read(model)
    measured = {"model": str(model), "origin": asdict(origin) if origin else None, "figures": metrics}
    write_atomically(folder / "figures.json", json.dumps(measured, indent=2) + "\n")
    return Evaluation(model, origin, metrics, samples)


@asynccontextmanager
async def _session(
    experiment: Experiment, *, policy: bool, sampling: bool, listen: Callable[[], None]
) -> AsyncIterator[Session]:
    """A session in a Ray of its own, or in the one that RAY_ADDRESS names.

    `listen` is called once Ray runs, because Ray takes the signals for itself when it starts.
    """
    models = {model.name: sampling if model.scores else policy for model in models_of(experiment)}
    policy = policy or not experiment.generation.has_engines  # which then samples by itself
    wanted = {**models, "policy": policy, "generation": sampling, "rollout": sampling, "endpoint": sampling}
    requests = [request for request in worker_requests(experiment) if wanted[request.group]]
    with ClusterRuntime(experiment.cluster, requests) as runtime:
        listen()
        placement = await runtime.reserve()
        try:
            async with open_session(experiment, placement, policy=policy, sampling=sampling) as session:
                yield session
        finally:
            placement.release()


def _end_at_sigterm() -> None:
    """Let the work end in order when the process is told to terminate."""
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise RunError(
            "The command was told to terminate at once and has ended its processes. "
            "A run goes on from its newest checkpoint with --resume."
        ) from None


def _stopped(by: signal.Signals, store: CheckpointStore, where: str) -> str:
    """What is told of a run that a signal has stopped."""
    newest = max(store.steps(), default=None)
    there = "from the beginning: there is no checkpoint" if newest is None else f"from step {newest}"
    return f"The run was told to stop ({by.name}) and did so {where}. With --resume it goes on {there}."


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
