"""A run of `nemorl train` from a checked experiment to its end, and the measurement of `nemorl eval`.

data ─▶ session ─▶ [reference sums] ─▶ [restore] ─▶ { step ─▶ recorder } ─▶ export ─▶ report
"""

import asyncio
import gc
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from nemorl.algorithms import offline
from nemorl.algorithms.aligned import AlignedTeacher, aligned_teachers
from nemorl.algorithms.best_of_n import BestOfNUpdate
from nemorl.algorithms.distillation import DistillationUpdate
from nemorl.algorithms.filters import refill
from nemorl.algorithms.metrics import LogprobGate, Sources, rows_of, samples_of
from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.online import OnlineAlgorithm, Update
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.algorithms.teachers import Teachers, teachers_of_tasks
from nemorl.cluster.nodes import lost_nodes
from nemorl.config import algorithm as configs
from nemorl.config.auxiliary import teachers_held
from nemorl.config.experiment import Experiment
from nemorl.config.facts import reward_weights
from nemorl.config.load import to_yaml
from nemorl.data.datasets import MixedTasks, difficulties, load_tasks, source_sizes
from nemorl.errors import NemorlError, RunError, RunStopped
from nemorl.megatron.checkpoint_store import CheckpointStore, Found
from nemorl.observe.files import JsonLinesWriter, write_atomically
from nemorl.observe.index import IndexWriter
from nemorl.observe.observer import Observer
from nemorl.observe.report import write_report
from nemorl.observe.run_folder import RunFolder, RunPaths
from nemorl.observe.trackers import check_trackers
from nemorl.rollout.collector import Collector, RolloutProcess
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.order import Order, order_of
from nemorl.rollout.replay import ReplayedGroups
from nemorl.rollout.schedule import CollectorPlan, GroupSchedule
from nemorl.rollout.stored import LocalWriter, PartWriter, RolloutFiles, SampledBy, TrajectoryLog
from nemorl.session.session import Session, open_session

from .checkpoints import Checkpoints, Origin, Progress, full_disk_named, replace_hf
from .live import shown_live
from .memory import Keeper, MemoryCheckpoints, local_keeper
from .recorder import RunRecorder
from .recovery import Recovery
from .scaling import Scaling
from .stop import EarlyStop, StepCancelled, StopRequest, run_to_end
from .validation import validate, validation_sets

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OBJECTS_PER_COLLECTION = 200_000  # by default 700


@dataclass(frozen=True)
class RunResult:
    run_dir: Path
    report: Path | None  # None if the disk was full
    hf_dir: Path | None  # the final weights, with `checkpointing.save_hf`


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, the cyclic garbage collector leaves out what exists already, and rarely passes over the rest.

    The summaries of a large step have no cycles and are as many objects as the program: by default each step
    would take several passes over both.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def train(experiment: Experiment, resume: bool = False, replay: Path | None = None) -> RunResult:
    """Run an experiment to its end, or from its newest complete checkpoint on. Raises NemorlError.

    `replay`: a run folder whose stored groups are trained on, instead of sampling.
    """
    check_trackers(experiment.logger)
    stored = None if replay is None else RolloutFiles(RunPaths(replay).trajectories)
    with local_keeper(experiment, resume) as keeper:
        return _train_with(keeper, experiment, resume, stored)


def _train_with(
    keeper: Keeper | None, experiment: Experiment, resume: bool, stored: RolloutFiles | None
) -> RunResult:
    store = CheckpointStore(experiment.run_dir / "checkpoints")
    found = _newest(experiment, store, keeper) if resume else None
    if resume and found is None and (corrupt := store.corrupt()):
        problem = f"No complete checkpoint in {store.folder} (corrupt: {', '.join(corrupt)})."
        raise RunError(f"{problem} To start over, delete the run folder or set another run_dir.")
    if resume and found is None:
        logger.warning("no checkpoint in %s: starting at step 1", store.folder)
    if found is not None and (fix := fix_if_complete(experiment, found)):
        return _finish_complete_run(experiment, found, fix)
    run_dir, yaml = experiment.run_dir, to_yaml(experiment)
    step = found.step if found else None
    folder = RunFolder.resume(run_dir, yaml, step) if resume else RunFolder.create(run_dir, yaml)
    try:
        observer = Observer(
            folder,
            experiment.logger,
            total_steps=experiment.algorithm.num_steps,
            samples_ahead=experiment.samples_ahead,
            deadlines=experiment.cluster.deadlines.by_stage,
        )
        with observer:
            return run_to_end(_train(experiment, observer, store, keeper, found, stored))
    finally:
        StopRequest.restore()


def _newest(experiment: Experiment, store: CheckpointStore, keeper: Keeper | None) -> Found | None:
    """The newest complete checkpoint of the run: one that a killed driver left in memory, else on disk."""
    if keeper is None:
        return store.latest_valid()
    held = keeper.store.latest_valid()
    # A complete run has its last checkpoint on disk.
    if held is None or held.step <= max(store.steps(), default=0) or fix_if_complete(experiment, held):
        keeper.remove_all()
        return store.latest_valid()
    logger.warning("continuing from the state of step %d in %s", held.step, held.path.parent)
    return held


def fix_if_complete(experiment: Experiment, found: Found) -> str:
    """How to train further if no step is left after a checkpoint; empty if one is."""
    num_steps = experiment.algorithm.num_steps
    if found.step >= num_steps:
        return f"To train further, raise algorithm.num_steps (now {num_steps})"
    progress = Progress.read(found.path)
    stop = EarlyStop(experiment.algorithm.early_stop, progress.best_value, progress.waited)
    return f"To train further, raise algorithm.early_stop.patience; {stop}" if stop.over else ""


def _finish_complete_run(experiment: Experiment, found: Found, fix: str) -> RunResult:
    """Start nothing; write the files for which the disk may have been full at the end of the run."""
    run_dir, step = experiment.run_dir, found.step
    logger.warning("%s is already complete (checkpoint at step %d); nothing to do. %s.", run_dir, step, fix)
    hf_dir = run_dir / "hf" if experiment.checkpointing.save_hf else None
    if hf_dir is not None and ((origin := Origin.read(hf_dir)) is None or origin.step != step):
        replace_hf(found.path, step, hf_dir, experiment)
    return RunResult(run_dir, write_report(run_dir), hf_dir)


async def _train(
    experiment: Experiment,
    observer: Observer,
    store: CheckpointStore,
    keeper: Keeper | None,
    found: Found | None,
    stored: RolloutFiles | None,
) -> RunResult:
    """Run to the end. Raises RunStopped if a signal ends the run."""
    stop = StopRequest(experiment.checkpointing.stop_seconds)
    stop.install()
    try:
        return await _train_session(experiment, observer, store, keeper, found, stored, stop)
    except asyncio.CancelledError:
        if stop.signal is None or stop.immediate:
            raise
        raise RunStopped(_stopped(stop, store, keeper)) from None
    finally:
        stop.ignore()


async def _train_session(
    experiment: Experiment,
    observer: Observer,
    store: CheckpointStore,
    keeper: Keeper | None,
    found: Found | None,
    stored: RolloutFiles | None,
    stop: StopRequest,
) -> RunResult:
    config = experiment.algorithm
    progress = Progress.read(found.path) if found else Progress()
    data = load_data(experiment)  # before any process starts, so that its errors come early
    async with AsyncExitStack() as stack:
        with observer.stage("start", outside_step=True):
            sampling = config.generates and stored is None
            started = open_session(experiment, policy=True, sampling=sampling)
            session = await stack.enter_async_context(started)
            session.lineage = progress.lineage
        assert session.stalls is not None
        observer.listen(session.stalls)
        await stack.enter_async_context(session.stalls.watching())
        await stack.enter_async_context(shown_live(session, observer.live))
        if session.replicas is not None and experiment.generation.can_scale:
            number = experiment.generation.max_replicas or experiment.generation.replicas
            scaling = Scaling(experiment.run_dir, session.replicas, number)
            await stack.enter_async_context(scaling.running())
        done = f"{progress.step} of {config.num_steps} done" if progress.step else str(config.num_steps)
        observer.header(
            {
                "run": str(experiment.run_dir),
                "algorithm": config.name,
                "model": str(experiment.policy.model_path),
                "steps": done,
                **{f"policy {name}": value for name, value in (await session.learner.header()).items()},
                **session.nodes,
            }
        )
        references = offline.ReferenceSums()
        if isinstance(config, configs.OfflineBase) and config.precomputes_reference:
            assert data.examples is not None
            # Steps after a rollback continue with other data.
            left = (1 + experiment.policy.guards.max_rollbacks) * config.num_steps - progress.step
            to_compare = partial(data.examples.compared, data.order, config, progress.position, left)
            policy, multiple = experiment.policy, experiment.policy.layout.fewest_units
            references = await offline.reference_sums(
                to_compare, experiment.run_dir, policy.model_path, session, observer, multiple
            )
        if found is not None:
            with observer.stage("restore", outside_step=True):
                await session.trained.restore(found.path)
        in_memory = experiment.checkpointing.keeps_in_memory
        memory = MemoryCheckpoints(experiment, session, keeper) if in_memory else None
        async with Checkpoints(experiment, session.trained, store, memory) as checkpoints:
            recorder = RunRecorder(experiment, session, observer, checkpoints, progress, stop)
            stop.on_request = checkpoints.save_copy
            with stop.stepping(), suppress(StepCancelled), rare_collections():
                workers = [ReplayedGroups(stored, session.store)] if stored is not None else session.rollout
                algorithm = _algorithm(
                    experiment, data, references, workers, session, observer, recorder, progress
                )
                async with AsyncExitStack() as closing:
                    if isinstance(algorithm, OnlineAlgorithm):
                        closing.push_async_callback(algorithm.collector.close)
                        closing.push_async_exit(recorder.close)
                        session.stalls.queues["collector"] = algorithm.collector.queues
                        await session.update_weights(recorder.done)
                    elif algorithm.data.held_out:
                        recorder.measure = algorithm.validation_metrics
                    await recorder.start()
                    observer.take_work = session.take_work
                    recovery = Recovery(experiment, session, observer, checkpoints, recorder, algorithm)
                    for number in recorder.steps():
                        try:
                            async with session.learner.profiled(number, observer.folder.paths.profiles):
                                metrics = await algorithm.step(number)
                            metrics |= session.node_metrics()
                            await recorder.finish(number, metrics, algorithm.place)
                        except NemorlError as error:
                            await recovery.recover(number, error)
            if stop.requested and not recorder.finished:
                if not stop.expired:
                    await recorder.save(last=True)
                await checkpoints.settle(last=True)
                raise RunStopped(_stopped(stop, store, keeper, recorder.done))
        hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
        if hf_dir is not None:
            with observer.stage("export", outside_step=True):
                replace_hf(store.path(recorder.done), recorder.done, hf_dir, experiment)
        return RunResult(experiment.run_dir, recorder.summarize(), hf_dir)


@dataclass(frozen=True)
class TrainingData:
    order: Order
    examples: offline.OfflineData | None = None  # of a run that does not sample
    task_teachers: Sequence[str] = ()  # the teacher of each task, for on-policy distillation
    sources: Sources | None = None  # of a mixture


def load_data(experiment: Experiment) -> TrainingData:
    config, data = experiment.algorithm, experiment.data
    if isinstance(config, configs.OfflineBase):
        examples = offline.load_offline_data(experiment, config)
        return TrainingData(order_of(data, examples.sizes, experiment.seed, config.batch_size), examples)
    tasks = load_tasks(data.train, data)
    sizes = source_sizes(tasks)
    teachers: Sequence[str] = ()
    if isinstance(config, configs.OnPolicyDistillationConfig):
        teachers = teachers_of_tasks(tasks, config.teacher_key, experiment.teachers)
    curriculum = data.sampling.curriculum
    levels = difficulties(tasks, curriculum) if curriculum is not None else ()
    order = order_of(data, sizes, experiment.seed, config.num_prompts_per_step, levels)
    sources = None
    if isinstance(tasks, MixedTasks):
        sources = Sources(tuple(data.sources), sizes, data.sampling.pass_reward)
    return TrainingData(order, task_teachers=teachers, sources=sources)


def _algorithm(
    experiment: Experiment,
    data: TrainingData,
    references: offline.ReferenceSums,
    workers: Sequence[RolloutProcess],
    session: Session,
    observer: Observer,
    recorder: RunRecorder,
    start: Progress,
) -> OnlineAlgorithm | offline.OfflineAlgorithm:
    config, policy, teachers = experiment.algorithm, experiment.policy, None
    multiple = policy.layout.fewest_units
    distills = configs.OnPolicyDistillationConfig | configs.DistillationConfig
    if isinstance(config, distills | configs.AlignedDistillationConfig):
        held, loss = teachers_held(experiment.teachers), config.loss
        multiples = {name: held[name].worker_config(policy).layout.fewest_units for name in held}
        score = config.combination.measured if isinstance(config, configs.AlignedDistillationConfig) else None
        teachers = Teachers(session, experiment.teachers, multiples, loss.top_k, loss.scales_teacher, score)
    if isinstance(config, configs.OfflineBase):
        assert data.examples is not None
        of_data = (session, data.examples, references, data.order, start.place)
        aligned: Sequence[AlignedTeacher] = ()
        if isinstance(config, configs.AlignedDistillationConfig):
            aligned = aligned_teachers(config, data.examples.projections)
        objective = offline.objective_of(config, aligned)
        return offline.OfflineAlgorithm(config, objective, *of_data, observer, multiple, teachers)
    update: Update
    match config:
        case configs.OnPolicyDistillationConfig():
            update = DistillationUpdate(config, data.task_teachers, multiple)
        case configs.IterativePreferenceConfig() | configs.RejectionSamplingConfig():
            update = BestOfNUpdate(config, multiple)
        case configs.OnlineConfig():
            recorder.entropy = EntropyWeight.of(config.entropy, start.entropy_coefficient, start.entropy)
            weights = reward_weights(experiment.env, experiment.rewards)
            update = PolicyGradientUpdate(config, recorder.entropy, weights)
    plan = CollectorPlan(
        groups_per_step=config.num_prompts_per_step,
        samples_per_group=config.num_generations_per_prompt,
        max_staleness=config.max_staleness,
        texts_per_step=experiment.logger.samples_per_step,
        num_steps=config.num_steps,
        greedy_baseline=config.greedy_baseline,
        extra_groups=config.extra_groups,
        trains_discarded=config.corrects_age,
        fixed_weights=not experiment.generation.takes_weights,
    )
    seconds = experiment.cluster.deadlines.generation
    replacing = refill(config.filters, config.num_prompts_per_step)
    schedule = GroupSchedule(
        data.order,
        plan,
        recorder.done,
        start.place,
        replacing,
        lineage=session.lineage,
        lost_nodes=lost_nodes,
    )
    recorder.trajectories = _trajectory_log(experiment, session, recorder.done)
    collector = Collector(workers, schedule, seconds)
    gate = LogprobGate(config, experiment.generation, guarded="logprob_gap" in policy.guards.limits)
    replays = any(isinstance(worker, ReplayedGroups) for worker in workers)
    return OnlineAlgorithm(
        config,
        session,
        collector,
        update,
        gate,
        observer,
        recorder.stop.cancellable,
        teachers,
        data.sources,
        recorder.trajectories,
        None if replays or not experiment.generation.takes_weights else session.learner.work,
    )


def _trajectory_log(experiment: Experiment, session: Session, done: int) -> TrajectoryLog | None:
    """None if the run stores none. What was stored after step `done` is removed."""
    files = RolloutFiles(RunPaths(experiment.run_dir).trajectories)
    files.remove_after(done)
    if not (count := experiment.logger.num_trajectories):
        return None
    return _begun_log(files, experiment, session, count)


def _begun_log(
    files: RolloutFiles, experiment: Experiment, session: Session, num_samples: float
) -> TrajectoryLog:
    files.begin(SampledBy.of(experiment))
    here = LocalWriter(partial(session.fetch, seconds=experiment.cluster.deadlines.logprobs))

    def writers() -> Sequence[PartWriter]:
        return [worker for worker in session.rollout if worker.is_up] or [here]

    return TrajectoryLog(files, writers, num_samples)


def _stopped(
    stop: StopRequest, store: CheckpointStore, keeper: Keeper | None, done: int | None = None
) -> str:
    assert stop.signal is not None
    in_memory = keeper.store.steps() if keeper is not None else []
    newest = max([*store.steps(), *in_memory], default=None)
    fix = "Continue with --resume" if newest == done else f"Continue from step {newest} with --resume"
    if newest is None:
        fix = "There is no checkpoint: --resume starts from the beginning"
    when = "outside of its steps" if done is None else f"after step {done}"
    if done is None and stop.expired:
        when = f"in a step that did not end in half of checkpointing.stop_seconds ({stop.seconds:g})"
    return f"Stopped by {stop.signal.name} {when}. {fix}."


@dataclass(frozen=True)
class Evaluation:
    model: Path
    origin: Origin | None  # of a model that was exported from a run
    metrics: dict[str, float]
    samples: Path


def evaluate(experiment: Experiment) -> Evaluation:
    """Measure the model on the validation tasks. Raises NemorlError."""
    return run_to_end(_evaluate(experiment))


async def _evaluate(experiment: Experiment) -> Evaluation:
    model, folder = experiment.policy.model_path, experiment.run_dir / "eval"
    evaluated = experiment.model_copy(update={"run_dir": folder})
    samples = folder / "samples.jsonl"
    with full_disk_named("The evaluation", experiment.run_dir.parent, "Make room, or set another run_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        samples.unlink(missing_ok=True)
    started = open_session(evaluated, policy=False, sampling=True)
    async with started as session, session.generating():
        metrics, by_set = await validate(session, evaluated, validation_sets(evaluated))
    writer = JsonLinesWriter(samples)
    for sample in samples_of(0, list(chain(*by_set.values())), "validation"):
        writer.append(asdict(sample))
    writer.close()
    origin = Origin.read(model)
    content = {"model": str(model), "origin": asdict(origin) if origin else None, "metrics": metrics}
    write_atomically(folder / "metrics.json", json.dumps(content, indent=2) + "\n")
    return Evaluation(model, origin, metrics, samples)


def rollout(experiment: Experiment, num_groups: int) -> list[GroupSummary]:
    """Sample the first groups of training with the model, and write them into a new run folder.

    Raises NemorlError.
    """
    folder = RunFolder.create(experiment.run_dir, to_yaml(experiment))
    with closing(folder):
        return run_to_end(_rollout(experiment, num_groups, folder.paths))


async def _rollout(experiment: Experiment, num_groups: int, paths: RunPaths) -> list[GroupSummary]:
    config, files = experiment.algorithm, RolloutFiles(paths.trajectories)
    assert isinstance(config, configs.OnlineBase), "the command checks it"
    order = load_data(experiment).order
    num_samples = num_groups * config.num_generations_per_prompt
    plan = CollectorPlan(
        groups_per_step=num_groups,
        samples_per_group=config.num_generations_per_prompt,
        max_staleness=0,
        texts_per_step=num_samples,
        num_steps=1,
        greedy_baseline=config.greedy_baseline,
    )
    async with open_session(experiment, policy=False, sampling=True) as session, session.generating():
        seconds = experiment.cluster.deadlines.generation
        collector = Collector(session.rollout, GroupSchedule(order, plan), seconds)
        try:
            collector.advance(0)
            groups = await collector.next_batch()
        finally:
            await collector.close()
        await _begun_log(files, experiment, session, num_samples).write(0, groups, {})
        stored = [group.group for group in groups]
        IndexWriter(paths.trajectories).append(rows_of(0, groups, "training", stored=stored))
    with closing(JsonLinesWriter(paths.samples)) as writer:
        for sample in samples_of(0, groups, "training"):
            writer.append(asdict(sample))
    return groups
