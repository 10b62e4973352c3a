"""One step of every algorithm that learns from data: load a batch of examples, compute a loss, update.

    order ─examples─▶ [divergence] ─▶ load ─▶ [teachers] [reference] ─▶ train

`ReferenceSums` are the reference's logprobs of complete answers, computed once with the weights that a run
starts from and kept in a file of the run folder: a sum for each sequence, all that losses of pairs and of
single answers need. The reference's weights then need no memory.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

from nemorl.config import algorithm as configs
from nemorl.config.algorithm.base import TOTAL_LOSSES
from nemorl.config.data import DatasetConfig, TaskRows
from nemorl.config.experiment import Experiment
from nemorl.data.aligned import AlignedEncoder
from nemorl.data.datasets import load_dialogues, load_feedback, load_pairs, load_steps, load_tasks
from nemorl.data.examples import PLACEHOLDER, Encoder, Example, mismatched
from nemorl.data.losses import Loss
from nemorl.data.packed import Compared
from nemorl.data.prefixes import shared_runs
from nemorl.data.shards import SequencePlace
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.observe.files import write_atomically, write_failed
from nemorl.observe.observer import Observer
from nemorl.rollout.order import Order
from nemorl.rollout.schedule import DataPlace
from nemorl.session.session import Session

from .aligned import UNALIGNED, AlignedLoss, AlignedTeacher, aligned_metrics
from .distillation import distillation_loss
from .metrics import optimizer_metrics
from .objective import finish_metrics, means_over, sequence_weights
from .pair_losses import KtoLoss, PreferenceLoss, ScorePairLoss, StepLoss, kto_metrics, score_metrics
from .policy_losses import CrossEntropyLoss
from .teachers import Teachers, teachers_of_tasks

FILE = "reference_logprobs.json"
PROJECTIONS = "projections"  # of the run folder, from which all processes read them
_AT_A_TIME = 512  # sequences of one call, so that progress shows


@dataclass(frozen=True)
class ReferenceSums:
    sums: Mapping[str, float] = field(default_factory=dict)  # by the content of sequences

    def of(self, example: Example) -> float | None:
        """Sum over the trained tokens, 0 of an example without any; None if no sums were computed."""
        if not self.sums:
            return None
        return self.sums[_key(example)] if example.num_trained else 0.0


async def reference_sums(
    examples: Callable[[], Iterable[Example]],
    run_dir: Path,
    model: Path,
    session: Session,
    observer: Observer,
    multiple: int,
) -> ReferenceSums:
    """Read what the run folder holds, and compute the rest with the weights that the policy has now.

    Call it before the policy learns or restores anything. `examples` is called twice and gives the same.
    """
    required = {_key(example) for example in examples() if example.num_trained}
    file = run_dir / FILE
    # Size and time of the model's weights: a rewritten folder is another reference.
    stats = {str(weights): weights.stat() for weights in sorted(model.glob("*.safetensors"))}
    fingerprint = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    known: dict[str, float] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # a file that cannot be read is computed again
        content = json.loads(file.read_text(encoding="utf-8"))
        known = dict(content["sums"]) if content["model"] == fingerprint else {}
    if missing := required - known.keys():
        with observer.stage("reference", total=len(missing), unit="sequences", outside_step=True) as stage:
            left = _once(missing, examples())
            while part := dict(islice(left, _AT_A_TIME)):
                padded = [*part.values(), *[PLACEHOLDER] * (-len(part) % multiple)]
                store = session.store(padded)
                places = [SequencePlace(store, row, example.num_tokens) for row, example in enumerate(padded)]
                await session.learner.load(places, kind="examples")
                sums = await session.learner.sequence_logprobs(reference=False)
                known |= dict(zip(part, sums[: len(part)], strict=True))
                stage.advance(len(part))
        write_atomically(file, json.dumps({"model": fingerprint, "sums": known}))
    return ReferenceSums({key: known[key] for key in required})


def _once(keys: set[str], examples: Iterable[Example]) -> Iterator[tuple[str, Example]]:
    left = set(keys)
    for example in examples:
        if (key := _key(example)) in left:
            left.remove(key)
            yield key, example


def _key(example: Example) -> str:
    content = example.tokens.tobytes() + example.loss_mask.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Unit:
    """Sequences that train together: a single one, or the two of a pair."""

    examples: tuple[Example, ...]
    labels: tuple[float, ...] = (0.0,)  # of each: 1 chosen or good, -1 rejected or not, 0 neither
    margin: float = 0.0
    teachers: tuple[str, ...] = ()  # of distillation, the one of each sequence
    read: tuple[Example, ...] = ()  # by the teachers, where these have tokens of their own


@dataclass(frozen=True)
class Objective:
    """What differs between algorithms that learn from data."""

    # Of a step with this number of units; the divergence of `contrast`'s sequences is 0 if there are none.
    loss: Callable[[int, float], Loss]
    metrics: Callable[[Mapping[str, float], Mapping[str, float]], dict[str, float]] = finish_metrics
    aggregation: configs.Aggregation = "token-mean"  # of weights; tokens of rejected answers do not count
    # Sequences on which the divergence of the policy from the reference is estimated before the step.
    contrast: Callable[[Sequence[Unit]], list[Example]] = lambda units: []
    filler: Example = PLACEHOLDER  # of a batch that lacks units


def objective_of(config: configs.OfflineBase, teachers: Sequence[AlignedTeacher] = ()) -> Objective:
    """`teachers` are those of aligned distillation."""
    match config:
        case configs.SftConfig():
            return Objective(lambda *_: CrossEntropyLoss(), aggregation=config.aggregation)
        case configs.DistillationConfig():
            return Objective(lambda *_: distillation_loss(config.loss), aggregation=config.aggregation)
        case configs.AlignedDistillationConfig():
            loss = AlignedLoss(config, tuple(teachers))
            return Objective(lambda *_: loss, aligned_metrics, filler=UNALIGNED)
        case configs.PreferenceConfig():
            return Objective(
                lambda pairs, _: PreferenceLoss(config.loss, pairs, config.sft_coefficient),
                lambda sums, _: means_over("pairs", sums),
                config.sft_aggregation,
            )
        case configs.KtoConfig():
            loss_of, metrics = partial(KtoLoss, config), lambda sums, _: kto_metrics(sums)
            return Objective(loss_of, metrics, contrast=prompts_with_next_answers)
    assert isinstance(config, configs.RewardModelConfig)
    ranked = config.loss
    if ranked.name == "process":
        by_answer = ranked.aggregation == "answer-mean"
        aggregation: configs.Aggregation = "seq-mean-token-mean" if by_answer else "token-mean"
        return Objective(lambda *_: StepLoss(), lambda sums, _: score_metrics(sums), aggregation)
    return Objective(lambda pairs, _: ScorePairLoss(ranked, pairs), lambda sums, _: score_metrics(sums))


def prompts_with_next_answers(units: Sequence[Unit]) -> list[Example]:
    examples = [unit.examples[0] for unit in units]
    return mismatched(examples, max_length=max(example.num_tokens for example in examples))


@dataclass(frozen=True)
class OfflineData:
    units: Sequence[Unit]
    held_out: Sequence[Unit]  # of the validation data; empty without any
    sizes: Sequence[int]  # units of each source
    projections: Mapping[str, Path] = field(default_factory=dict)  # files of aligned distillation, by teacher

    def compared(
        self, order: Order, config: configs.OfflineBase, position: int, num_steps: int
    ) -> Iterator[Example]:
        """The sequences that `num_steps` steps from `position` and a validation compare with a reference."""
        objective, size = objective_of(config), config.batch_size
        drawn = [order.task_index(place) for place in range(position, position + num_steps * size)]
        needed = [*(self.units[index] for index in sorted(set(drawn))), *self.held_out]
        yield from (example for unit in needed for example in unit.examples)
        for start in range(0, len(drawn), size):
            yield from objective.contrast([self.units[index] for index in drawn[start : start + size]])
        if self.held_out:
            yield from objective.contrast(self.held_out)


@dataclass
class OfflineAlgorithm:
    config: configs.OfflineBase
    objective: Objective
    session: Session
    data: OfflineData
    references: ReferenceSums  # of sequences whose reference was computed beforehand
    order: Order
    place: DataPlace  # of the next unit in the order
    observer: Observer
    multiple: int  # of units into which a batch is laid over ranks and stages
    teachers: Teachers | None = None  # of distillation

    def rewind(self, step: int, place: DataPlace) -> None:
        self.place = place

    async def step(self, number: int) -> dict[str, float]:
        positions = range(self.place.position, self.place.position + self.config.batch_size)
        units = [self.data.units[self.order.task_index(position)] for position in positions]
        learner = self.session.learner
        with self.observer.stage("training"):
            loss, metrics = await self._load(units)
            self.place = DataPlace(positions.stop)
            update = await learner.train(loss)
        return {
            **self.objective.metrics(update.sums, update.maxima),
            **metrics,
            **optimizer_metrics([update]),
            **learner.packing_metrics(),
            "epoch": self.place.position / len(self.data.units),
        }

    async def validation_metrics(self) -> dict[str, float]:
        with self.observer.stage("validation"):
            loss, _ = await self._load(self.data.held_out)
            evaluation = await self.session.learner.evaluate(loss)
        metrics = self.objective.metrics(evaluation.sums, evaluation.maxima)
        loss_value = metrics.pop(next(name for name in TOTAL_LOSSES if name in metrics))
        return {"validation/loss": loss_value, **{f"validation/{name}": v for name, v in metrics.items()}}

    async def _load(self, units: Sequence[Unit]) -> tuple[Loss, dict[str, float]]:
        """Load the units, the reference and the teachers; returns their loss and metrics of these passes."""
        learner = self.session.learner
        divergence = await self._divergence(self.objective.contrast(units))
        sequences = self._sequences(units)
        await learner.load(sequences, kind="examples")
        if self.teachers is not None:
            names = list(chain.from_iterable(unit.teachers for unit in units))
            names += names[:1] * (len(sequences) - len(names))
            await self.teachers.fill(self._read(units, sequences), names, "examples")
        metrics = {} if divergence is None else {"kl/reference": divergence}
        if self.config.keeps_reference:
            scored = await learner.logprobs(old=False, reference=True)
            metrics |= {"flops/reference": scored.reference_flops} if scored.reference_flops else {}
        return self.objective.loss(len(units), divergence or 0.0), metrics

    async def _divergence(self, examples: Sequence[Example]) -> float | None:
        """The mean over sequences of `log policy - log reference`, in nats; it may be negative."""
        if not examples:
            return None
        learner = self.session.learner
        await learner.load(self._sequences([Unit((example,)) for example in examples]), kind="examples")
        policy = await learner.sequence_logprobs(reference=False)
        if self.config.precomputes_reference:
            reference = [self.references.of(example) or 0.0 for example in examples]
        else:
            reference = await learner.sequence_logprobs(reference=True)
        return (math.fsum(policy) - math.fsum(reference)) / len(examples)

    def _read(self, units: Sequence[Unit], sequences: Sequence[SequencePlace]) -> Sequence[SequencePlace]:
        """The sequences as the teachers read them, in the same order."""
        read = list(chain.from_iterable(unit.read for unit in units))
        if not read:
            return sequences
        read += [self.objective.filler] * (len(sequences) - len(read))
        store = self.session.store(read)
        return [SequencePlace(store, row, example.num_tokens) for row, example in enumerate(read)]

    def _sequences(self, units: Sequence[Unit]) -> list[SequencePlace]:
        """The sequences of the units, stored, weighted and numbered; placeholder units fill up."""
        padded = [*units, *[Unit((self.objective.filler,))] * (-len(units) % self.multiple)]
        members = [
            (example, Compared(number, label, unit.margin, self.references.of(example)), unit)
            for number, unit in enumerate(padded)
            for example, label in zip(unit.examples, unit.labels, strict=True)
        ]
        trained = [
            0 if compared.label < 0 and len(unit.examples) > 1 else example.num_trained
            for example, compared, unit in members
        ]
        weights = sequence_weights(trained, self.objective.aggregation).tolist()
        store = self.session.store([example for example, _, _ in members])
        runs = chain(*(shared_runs([example.tokens for example in unit.examples]) for unit in padded))
        return [
            SequencePlace(store, row, example.num_tokens, weight=weight, compared=compared, runs=shared)
            for row, ((example, compared, _), weight, shared) in enumerate(
                zip(members, weights, runs, strict=True)
            )
        ]


def load_offline_data(experiment: Experiment, config: configs.OfflineBase) -> OfflineData:
    """Read and encode the training and validation data. Raises DatasetError, ExampleError and WriteError."""
    data, projections = experiment.data, dict[str, Path]()
    if isinstance(config, configs.AlignedDistillationConfig):
        aligned, folder = AlignedEncoder(experiment), experiment.run_dir.absolute() / PROJECTIONS
        try:
            projections = aligned.projections(folder)
        except OSError as error:
            raise write_failed(folder, error) from error
        units_of = partial(_aligned_units, experiment, config, aligned)
    else:
        tokenizer = load_tokenizer(experiment.policy)
        length = experiment.policy.max_sequence_length
        encoder = Encoder(tokenizer, prompts_of(tokenizer, data.chat), length)
        units_of = partial(_units, experiment, config, encoder)
    validated = data.validation if config.validation.scheduled else None
    held_out: Sequence[Unit] = []
    # Tasks of a file without answers can be sampled but have no loss.
    if validated is not None and not (isinstance(validated, TaskRows) and validated.answer_key is None):
        held_out = units_of(validated)[: config.validation.num_prompts]
    sources = [units_of(source.dataset)[: source.max_tasks] for source in data.sources.values()]
    sizes = [len(units) for units in sources]
    return OfflineData(list(chain.from_iterable(sources)), held_out, sizes, projections)


def _aligned_units(
    experiment: Experiment,
    config: configs.AlignedDistillationConfig,
    encoder: AlignedEncoder,
    dataset: DatasetConfig,
) -> Sequence[Unit]:
    names = tuple(experiment.teachers)
    units = []
    for pairs in encoder.texts(load_dialogues(dataset, experiment.data), config.train_on):
        mine, read = zip(*pairs, strict=True)
        units.append(Unit(mine, (0.0,) * len(names), teachers=names, read=read))
    return units


def _units(
    experiment: Experiment, config: configs.OfflineBase, encoder: Encoder, dataset: DatasetConfig
) -> Sequence[Unit]:
    data = experiment.data
    match config:
        case configs.SftConfig():
            dialogues = load_dialogues(dataset, data)
            return [Unit((example,)) for example in encoder.dialogues(dialogues, config.train_on)]
        case configs.DistillationConfig():
            examples = encoder.dialogues(load_dialogues(dataset, data), config.train_on)
            tasks = load_tasks(dataset, data)
            names = teachers_of_tasks(tasks, config.teacher_key, experiment.teachers)
            return [Unit((e,), teachers=(name,)) for e, name in zip(examples, names, strict=True)]
        case configs.KtoConfig():
            feedback = load_feedback(dataset, data)
            labeled = zip(encoder.feedback(feedback), feedback, strict=True)
            return [Unit((example,), (1.0 if one.good else -1.0,)) for example, one in labeled]
        case configs.RewardModelConfig() if config.loss.of_steps:
            return [Unit((example,)) for example in encoder.steps(load_steps(dataset, data))]
    pairs = load_pairs(dataset, data)
    encoded = zip(encoder.pairs(pairs), pairs, strict=True)
    return [Unit(both, (1.0, -1.0), pair.margin) for both, pair in encoded]
