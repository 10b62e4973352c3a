"""What an experiment learns from and the loop that it learns in, put together for a started session."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nemorl.config.algorithm import (
    DistillationAlgorithm,
    DistillationConfig,
    IterativePreferenceConfig,
    OfflineBase,
    OnlineConfig,
    OnPolicyDistillationConfig,
    RejectionSamplingConfig,
)
from nemorl.config.auxiliary import teachers_held
from nemorl.config.checks.metrics import reward_weights
from nemorl.config.experiment import Experiment
from nemorl.data.datasets import TaskOrder, load_tasks
from nemorl.observe.observer import Observer
from nemorl.rollout.collector import Collector, CollectorPlan
from nemorl.session.session import Session

from .best_of_n import PickedLearning
from .checkpoints import Progress
from .distillation import DistilledLearning
from .filters import refill
from .gate import LogprobGate
from .learning import Learning
from .offline import OfflineLoop
from .offline_data import OfflineData, load_offline_data, offline_algorithm
from .online import Learns, OnlineLoop
from .recorder import Bookkeeper
from .reference_sums import ReferenceSums, reference_sums
from .scoring import Scorer
from .teachers import Teachers, teachers_of_tasks

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
    books: Bookkeeper,
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
            books,
            experiment.policy.layout.fewest_units,
            _teachers(experiment, algorithm, session) if isinstance(algorithm, DistillationConfig) else None,
        )
    collector = _collector(experiment, algorithm, data, session, books.done)
    learning = _learning(experiment, algorithm, data.taught_by, session, observer, books)
    return OnlineLoop(algorithm, session, collector, learning, observer, books)


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
    books: Bookkeeper,
) -> Learns:
    multiple = experiment.policy.layout.fewest_units
    gate = LogprobGate(algorithm, experiment.generation)
    if isinstance(algorithm, IterativePreferenceConfig | RejectionSamplingConfig):
        return PickedLearning(algorithm, session, observer, books, gate, multiple)
    if isinstance(algorithm, OnPolicyDistillationConfig):
        teachers = _teachers(experiment, algorithm, session)
        return DistilledLearning(algorithm, session, observer, books, gate, teachers, taught_by, multiple)
    scorer = Scorer(algorithm, reward_weights(experiment.env, experiment.rewards))
    return Learning(algorithm, scorer, session, observer, books, gate)


def _teachers(experiment: Experiment, algorithm: DistillationAlgorithm, session: Session) -> Teachers:
    multiples = {
        name: teacher.worker_config(experiment.policy).layout.fewest_units
        for name, teacher in teachers_held(experiment.teachers).items()
    }
    return Teachers(session, experiment.teachers, multiples, algorithm.loss.top_k)
