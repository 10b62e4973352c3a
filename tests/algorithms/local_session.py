"""A run's learner in the process of the test: the policy worker itself, without Ray."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemorl.algorithms.offline import (
    OfflineAlgorithm,
    OfflineData,
    ReferenceSums,
    load_offline_data,
    objective_of,
    reference_sums,
)
from nemorl.config.experiment import Experiment
from nemorl.data.losses import Evaluation, LogprobStats, Loss, TrainStats
from nemorl.data.shards import SequencePlace, plan_batch
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.layout import SCALAR_HEAD
from nemorl.observe.metrics import StepMetrics
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import DataPlace
from nemorl.rollout.versions import UNBROKEN
from nemorl.run.checkpoints import Progress
from nemorl.run.recorder import RunRecorder

HIDDEN = 32


def start_host(experiment: Experiment, folder: Path) -> PolicyWorker:
    """One process, with a reference."""
    return PolicyWorker(
        experiment.policy,
        rank=0,
        world_size=1,
        rendezvous=f"file://{folder}/meet",
        device="cpu",
        threads=1,
        temperature=1.0,
        keep_reference=True,
        deadline_seconds=60,
        load=True,
    )


class Stored(tuple[Any, ...]):
    """A list that is distinguished from others by what it is, as an object reference is."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class LocalLearner:
    """What `ModelHandle` does for one rank."""

    devices = None

    def __init__(self, host: PolicyWorker, tokens: int) -> None:
        self.host = host
        self.loads = 0
        self.forwards = 0
        self._tokens = tokens

    async def load(self, sequences: Sequence[SequencePlace], *, kind: str, num_minibatches: int = 1) -> None:
        """Plan and pack."""
        self._lengths = [s.num_tokens for s in sequences]
        units = [-n if s.compared is None else s.compared.unit for n, s in enumerate(sequences, 1)]
        self._plan = plan_batch(self._lengths, 1, 1, self._tokens, HIDDEN, units=units)
        (shard,) = self._plan.shards(sequences)
        getattr(self.host, f"load_{kind}")(shard)
        self.loads += 1

    async def logprobs(
        self, *, old: bool, reference: bool, entropy: bool = False, collision: bool = False
    ) -> LogprobStats:
        """Of the loaded batch."""
        return self.host.compute_logprobs(self._micro_batches, old=old, reference=reference)

    async def sequence_logprobs(self, *, reference: bool) -> list[float]:
        """In the order of the load."""
        self.forwards += 1
        sums = self.host.sequence_logprobs(self._micro_batches, reference=reference)
        found = dict(zip(self._plan.ranks[0], sums, strict=True))
        return [found[place] for place in range(len(sums))]

    async def evaluate(self, loss: Loss) -> Evaluation:
        """Nothing learns."""
        return self.host.evaluate(self._micro_batches, loss)

    async def train(self, loss: Loss, minibatch: int = 0, *, keep: bool = False) -> TrainStats:
        """One step."""
        return self.host.train(self._micro_batches, loss)

    def packing_metrics(self) -> dict[str, float]:
        """Of the plan."""
        return self._plan.packing_metrics()

    @property
    def _micro_batches(self) -> list[list[int]]:
        return self._plan.minibatches[0][0]


class Run:
    """An offline run over a host that may have had others before; its weights are those of the folder."""

    def __init__(self, experiment: Experiment, host: PolicyWorker) -> None:
        self.experiment = experiment
        self.lines: list[StepMetrics] = []
        self.learner = LocalLearner(host, experiment.policy.micro_batch_tokens)
        self.session: Any = SimpleNamespace(
            learner=self.learner, store=Stored, lineage=UNBROKEN, num_model_restarts=0
        )
        self.observer: Any = SimpleNamespace(stage=no_stage, end_step=lambda step: {}, step=self._step)
        head = host.parameters().get(SCALAR_HEAD.param)
        if head is not None:  # which the folder of a language model lacks
            head.data.zero_()
        host.load_hf(experiment.policy.model_path)

    def _step(self, step: int, version: int, values: dict[str, float]) -> StepMetrics:
        self.lines.append(StepMetrics(step, version, values))
        return self.lines[-1]

    async def references(self, data: OfflineData, order: TaskOrder) -> ReferenceSums:
        """Computed beforehand, as `nemorl train` does."""
        config: Any = self.experiment.algorithm
        if not config.precomputes_reference:
            return ReferenceSums()
        examples = partial(data.compared, order, config, 0, config.num_steps)
        run_dir, model = self.experiment.run_dir, self.experiment.policy.model_path
        return await reference_sums(examples, run_dir, model, self.session, self.observer, 1)

    async def run(self) -> list[dict[str, float]]:
        """The metrics of every line."""
        config: Any = self.experiment.algorithm
        data = load_offline_data(self.experiment, config)
        order = TaskOrder(len(data.units), self.experiment.seed, self.experiment.data.shuffle)
        references = await self.references(data, order)
        checkpoints: Any = SimpleNamespace(check=lambda: None, due_copy=lambda step, has_line: False)
        recorder = RunRecorder(self.experiment, self.session, self.observer, checkpoints, Progress())
        algorithm = OfflineAlgorithm(
            config,
            objective_of(config),
            self.session,
            data,
            references,
            order,
            DataPlace(),
            self.observer,
            multiple=1,
        )
        if data.held_out:
            recorder.measure = algorithm.validation_metrics
        await recorder.start()
        for number in recorder.steps():
            await recorder.finish(number, await algorithm.step(number), algorithm.place)
        return [line.values for line in self.lines]


def no_stage(name: str, **_: Any) -> Any:
    return nullcontext(SimpleNamespace(advance=lambda *_, **__: None))
