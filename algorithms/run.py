"""From a checked experiment to a finished run: what `nemorl train`, `eval` and `models export` call."""

import asyncio
import json
import logging
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.algorithm import (
    DistillationAlgorithm,
    DistillationConfig,
    IterativePreferenceConfig,
    OfflineBase,
    OnlineConfig,
    OnPolicyDistillationConfig,
    PreferenceConfig,
    RejectionSamplingConfig,
)
from nemorl.config.checks.figures import reward_weights
from nemorl.config.experiment import Experiment
from nemorl.config.groups import teachers_held
from nemorl.config.load import load_experiment, to_yaml
from nemorl.config.models import models_of
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import load_tasks
from nemorl.data.order import TaskOrder
from nemorl.errors import ConfigError, RunError
from nemorl.megatron.checkpoint_store import CheckpointStore, Found, verify
from nemorl.megatron.hf_export import export_hf
from nemorl.megatron.peft_export import export_adapter
from nemorl.observe.files import write_whole
from nemorl.observe.observer import Observer
from nemorl.observe.report import write_report
from nemorl.observe.run_folder import RunFolder, RunPaths
from nemorl.observe.samples import SampleWriter
from nemorl.observe.trackers import check_trackers
from nemorl.rollout.collector import Collector, CollectorPlan
from nemorl.session.session import Session, open_session
from nemorl.session.trained import folder_of

from .bookkeeping import Bookkeeper, samples_of
from .checkpoints import Checkpoints, Progress
from .distillation import DistilledLearning
from .early_stop import EarlyStop
from .evaluate import validate, validation_sets
from .filters import refill
from .full_disk import full_disk_named
from .gate import LogprobGate
from .learning import Learning
from .offline import OfflineLoop
from .offline_data import OfflineData, load_offline_data, offline_algorithm
from .online import Learns, OnlineLoop
from .origin import Origin
from .picking import PickedLearning
from .reference_sums import ReferenceSums, reference_sums
from .scoring import Scorer
from .teachers import Teachers, teachers_of_tasks

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
    figures: dict[str, float]
    samples: Path


def train(experiment: Experiment, resume: bool = False) -> RunResult:
    """Run an experiment to its end, or from its newest whole checkpoint on. Raises NemorlError."""
    check_trackers(experiment.logger)
    store = CheckpointStore(experiment.run_dir / "checkpoints")
    found = store.latest_valid() if resume else None
    if resume and found is None and store.damaged():
        raise RunError(
            f"No checkpoint in {store.folder} is whole; damaged are {', '.join(store.damaged())}. To begin "
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
        return _run_to_end(_train(experiment, observer, store, found))


def evaluate(experiment: Experiment) -> Evaluation:
    """Measure the model on the validation tasks, without training it. Raises NemorlError."""
    return _run_to_end(_evaluate(experiment))


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    form: Literal["hf", "adapter", "megatron"] = "hf",
    model: str = "policy",
) -> None:
    """Write the weights of a checkpoint of a run folder as a Hugging Face folder, its adapters as PEFT keeps
    them, or a checkpoint of megatron-core. Of several models that learn, `model` is one. Raises NemorlError.
    """
    _refuse_what_is_no_checkpoint(checkpoint)
    step = verify(checkpoint).step
    run_dir = checkpoint.absolute().parents[1]
    config = RunPaths(run_dir).config
    if not config.exists():
        raise RunError(
            f"{checkpoint} does not lie in the `checkpoints` of a run folder: {config}, which says what "
            "model it is of, does not exist. Name a folder such as RUN_DIR/checkpoints/step_00000010."
        )
    section = _model_of_run(config, model)
    with full_disk_named(f"The weights of {checkpoint}", out.parent, "Make room, or name another folder."):
        _exporter(form)(folder_of(checkpoint, model), out, section)
        Origin(str(run_dir), step).write(out)


def _model_of_run(config: Path, name: str) -> PolicyConfig:
    """A model that learns by a run's config.yaml, which an older version may have written."""
    try:
        models = {model.name: model.config for model in models_of(load_experiment(config)) if model.trains}
    except ConfigError as error:
        raise RunError(
            f"{error}\nIt says which model the checkpoint is of, in the fields of the version that wrote it. "
            "Keep a copy of it, correct these fields in it (remove those that are no more) and export again."
        ) from error
    if name not in models:
        raise RunError(f"no {name} learns in the run of {config}: take --model {' or '.join(models)}")
    return models[name]


def _exporter(form: str) -> Callable[[Path, Path, PolicyConfig], None]:
    if form == "megatron":
        from nemorl.megatron.dist_checkpoint import export_megatron  # imports Megatron, which takes seconds

        return export_megatron
    return export_adapter if form == "adapter" else export_hf


def _refuse_what_is_no_checkpoint(folder: Path) -> None:
    """Name the newest checkpoint to a person who named the run, its `checkpoints`, or what is not there."""
    if not folder.exists():
        beside = CheckpointStore(folder.parent)
        mend = "name one such as RUN_DIR/checkpoints/step_00000010"
        if steps := beside.steps():
            mend = f"the newest there is {beside.path(steps[-1])}"
        raise RunError(f"there is no checkpoint {folder}: {mend}")
    for place in (folder / "checkpoints", folder):
        store = CheckpointStore(place)
        if steps := store.steps():
            raise RunError(
                f"{folder} holds checkpoints: name one of them; the newest is {store.path(steps[-1])}"
            )
    if RunPaths(folder).holds_run:
        raise RunError(f"{folder} is a run without a checkpoint yet: there are no weights to export")


async def _train(
    experiment: Experiment, observer: Observer, store: CheckpointStore, found: Found | None
) -> RunResult:
    progress = Progress.read(found.path) if found else Progress()
    data = _load_data(experiment, progress)  # what is wrong with it shows before any process starts
    sampling = experiment.algorithm.generates
    with observer.stage("start", outside_step=True):
        stack = AsyncExitStack()
        session = await stack.enter_async_context(_session(experiment, policy=True, sampling=sampling))
    async with stack:
        observer.header(_header(experiment, await session.learner.header(), progress))
        references = await _references(experiment, data, session, observer)
        if found is not None:
            with observer.stage("restore", outside_step=True):
                await session.trained.restore(found.path)
        async with Checkpoints(experiment, session.trained, store) as checkpoints:
            books = Bookkeeper(experiment, session, observer, checkpoints, progress)
            await _loop(experiment, data, references, session, observer, books).run()
        hf_dir = experiment.run_dir / "hf" if experiment.checkpointing.save_hf else None
        if hf_dir is not None:
            with observer.stage("export", outside_step=True):
                _replace_hf(store.path(books.done), books.done, hf_dir, experiment)
        return RunResult(experiment.run_dir, books.summarize(), hf_dir)


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
            _replace_hf(found.path, found.step, hf_dir, experiment)
    return RunResult(experiment.run_dir, write_report(experiment.run_dir), hf_dir)


def _replace_hf(checkpoint: Path, step: int, hf_dir: Path, experiment: Experiment) -> None:
    """Write `hf_dir` anew; what an earlier run left there stays until the new folder is whole."""
    mend = f"All checkpoints are whole: make room, then `nemorl models export {checkpoint} {hf_dir}`."
    fresh = hf_dir.with_name(".hf.new")
    with full_disk_named("The Hugging Face folder of checkpointing.save_hf", hf_dir.parent, mend):
        shutil.rmtree(fresh, ignore_errors=True)
        export_hf(checkpoint, fresh, experiment.policy)
        Origin(str(experiment.run_dir.absolute()), step).write(fresh)
        shutil.rmtree(hf_dir, ignore_errors=True)
        fresh.rename(hf_dir)


@dataclass(frozen=True)
class TrainingData:
    """The training data in their order, and where in it the run stands."""

    order: TaskOrder
    position: int
    offline: OfflineData | None  # of a run that learns from data as it stands
    taught_by: Sequence[str] = ()  # names of the teachers of the tasks, of on-policy distillation


def _load_data(experiment: Experiment, progress: Progress) -> TrainingData:
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
    return TrainingData(order, progress.position, offline, taught_by)


async def _references(
    experiment: Experiment, data: TrainingData, session: Session, observer: Observer
) -> ReferenceSums:
    """What the weights that the run starts from say of all that it compares, where the algorithm asks."""
    algorithm = experiment.algorithm
    if data.offline is None or not isinstance(algorithm, PreferenceConfig):
        return ReferenceSums()
    if not algorithm.precomputes_reference:
        return ReferenceSums()
    examples = data.offline.of_steps(data.order, algorithm.num_steps * algorithm.batch_size)
    multiple = experiment.policy.layout.fewest_units
    model = experiment.policy.model_path
    return await reference_sums(examples, experiment.run_dir, model, session, observer, multiple)


def _loop(
    experiment: Experiment,
    data: TrainingData,
    references: ReferenceSums,
    session: Session,
    observer: Observer,
    books: Bookkeeper,
) -> OnlineLoop | OfflineLoop:
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
            books,
            experiment.policy.layout.fewest_units,
            _teachers(experiment, algorithm, session) if isinstance(algorithm, DistillationConfig) else None,
        )
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
    collector = Collector(session.rollout, data.order, plan, seconds, data.position, books.done, replacing)
    learning = _learning(experiment, algorithm, data.taught_by, session, observer, books)
    return OnlineLoop(algorithm, session, collector, learning, observer, books)


def _teachers(experiment: Experiment, algorithm: DistillationAlgorithm, session: Session) -> Teachers:
    multiples = {
        name: teacher.worker_config(experiment.policy).layout.fewest_units
        for name, teacher in teachers_held(experiment.teachers).items()
    }
    return Teachers(session, experiment.teachers, multiples, algorithm.loss.top_k)


def _learning(
    experiment: Experiment,
    algorithm: OnlineConfig
    | OnPolicyDistillationConfig
    | IterativePreferenceConfig
    | RejectionSamplingConfig,
    taught_by: Sequence[str],
    session: Session,
    observer: Observer,
    books: Bookkeeper,
) -> Learns:
    multiple = experiment.policy.layout.fewest_units
    if isinstance(algorithm, IterativePreferenceConfig | RejectionSamplingConfig):
        return PickedLearning(algorithm, session, observer, books, multiple)
    gate = LogprobGate(algorithm, experiment.generation)
    if isinstance(algorithm, OnPolicyDistillationConfig):
        teachers = _teachers(experiment, algorithm, session)
        return DistilledLearning(algorithm, session, observer, books, gate, teachers, taught_by, multiple)
    scorer = Scorer(algorithm, reward_weights(experiment.env, experiment.rewards))
    return Learning(algorithm, scorer, session, observer, books, gate)


async def _evaluate(experiment: Experiment) -> Evaluation:
    folder = experiment.run_dir / "eval"
    apart = experiment.model_copy(update={"run_dir": folder})
    samples = folder / "samples.jsonl"
    with full_disk_named("The evaluation", experiment.run_dir.parent, "Make room, or name another run_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        samples.unlink(missing_ok=True)
    async with _session(apart, policy=False, sampling=True) as session, session.generating():
        figures, groups = await validate(session, apart, validation_sets(apart))
    writer = SampleWriter(samples)
    writer.write(list(samples_of(0, groups, "validation")))
    writer.close()
    model = experiment.policy.model_path
    origin = Origin.read(model)
    measured = {"model": str(model), "origin": asdict(origin) if origin else None, "figures": figures}
    write_whole(folder / "figures.json", json.dumps(measured, indent=2) + "\n")
    return Evaluation(model, origin, figures, samples)


@asynccontextmanager
async def _session(experiment: Experiment, *, policy: bool, sampling: bool) -> AsyncIterator[Session]:
    """A session in a Ray of its own, or in the one that RAY_ADDRESS names."""
    models = {model.name: sampling if model.scores else policy for model in models_of(experiment)}
    policy = policy or not experiment.generation.has_engines  # which then samples by itself
    wanted = {**models, "policy": policy, "generation": sampling, "rollout": sampling, "endpoint": sampling}
    requests = [request for request in worker_requests(experiment) if wanted[request.group]]
    with ClusterRuntime(experiment.cluster, requests) as runtime:
        _end_at_sigterm()
        placement = await runtime.reserve()
        try:
            async with open_session(experiment, placement, policy=policy, sampling=sampling) as session:
                yield session
        finally:
            placement.release()


def _end_at_sigterm() -> None:
    """Let the work end in order when the process is told to terminate, as schedulers do before a time limit.

    Called once Ray runs, because Ray takes the signal for itself when it starts.
    """
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise RunError(
            "The run was told to terminate (SIGTERM) and has ended its processes. "
            "Go on from its newest checkpoint with --resume."
        ) from None


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
