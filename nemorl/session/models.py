"""The models of a run: which processes hold them, and how these are started.

All models of a run that learn, kept together: one checkpoint holds all of them or does not exist.

Groups of processes that share devices: one has them at a time, as far as the others leave.

All ranks of a model as one: on the devices, beside them, sampling, and in checkpoints.

The driver's handle on a model: batches laid over its ranks, one call for every stage.

Where the ranks of models meet: a store of the driver's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.cluster.mesh import Mesh
from nemorl.cluster.placement import Placement
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, models_of
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import DeadlineConfig
from nemorl.data.losses import Loss, SequenceMetric, TokenEstimator
from nemorl.data.micro_batches import BatchPlan, packing_metrics, plan_batch
from nemorl.errors import RunError
from nemorl.megatron.checkpoint_store import FileRecord
from nemorl.megatron.stats import Evaluation, LogprobStats, TrainStats, ValueStats
from nemorl.models.registry import load_shape
from nemorl.weights.process_group import served_store

from .shard import Column, Field, SequencePlace, column_of, column_shards, make_shards


class Keeper(Protocol):
    """A model as checkpoints see it; `ModelGroup` is one."""

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write all that training needs to go on; records have paths relative to the folder."""
        ...

    async def copy_for_checkpoint(self) -> None:
        """Copy all that aside."""
        ...

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write the copy while training goes on."""
        ...

    async def restore(self, folder: Path) -> None:
        """Take what was written."""
        ...


class TrainedModels:
    """The policy's files lie in the checkpoint's folder itself, those of others in folders of their names."""

    def __init__(self, models: Mapping[str, Keeper]) -> None:
        self._models = models

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write all of them, one after the other: they may share devices."""
        return [
            record
            for name, model in self._models.items()
            for record in _placed(name, await model.save(folder_of(folder, name)))
        ]

    async def copy_for_checkpoint(self) -> None:
        """Copy all of them aside, one after the other."""
        for model in self._models.values():
            await model.copy_for_checkpoint()

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write the copies at the same time, while the models go on."""
        written = await asyncio.gather(
            *(model.write_copy(folder_of(folder, name)) for name, model in self._models.items())
        )
        placed = map(_placed, self._models, written)
        return [record for records in placed for record in records]

    async def restore(self, folder: Path) -> None:
        """Take all of them from a checkpoint. Raises RunError where one is not in it."""
        missing = [name for name in self._models if not folder_of(folder, name).is_dir()]
        if missing:
            raise RunError(
                f"{folder} holds no {' and no '.join(missing)}, as a run of another algorithm wrote it: go "
                "on with the algorithm it began with, or begin a new run from an export of its weights"
            )
        for name, model in self._models.items():
            await model.restore(folder_of(folder, name))


def folder_of(checkpoint: Path, name: str) -> Path:
    """Where the files of a model lie in a checkpoint."""
    return checkpoint if name == "policy" else checkpoint / name


def _placed(name: str, records: Sequence[FileRecord]) -> list[FileRecord]:
    """Records of files as the checkpoint names them."""
    if name == "policy":
        return list(records)
    return [replace(record, path=f"{name}/{record.path}") for record in records]


class Tenant(Protocol):
    """A group that lives on the shared devices."""

    async def leave(self) -> None:
        """Leave the devices as far as it is told to; does nothing while it is away."""
        ...

    async def settle(self) -> None:
        """Take back what has left; does nothing where nothing has."""
        ...


class DeviceScheduler:
    """Who has the devices. A group asks for its turn before it computes; nobody else has to remember.

    Reward models are asked by others than the loop, at any time: they get the devices while something is
    sampled, and keep them until they have answered.
    """

    def __init__(self, residents: Sequence[Tenant]) -> None:
        self._residents = [*residents]
        self._changing = asyncio.Condition()
        self._sampling = False  # it is generation's turn

    def join(self, resident: Tenant) -> None:
        """One more lives there, and is there now."""
        self._residents.append(resident)

    async def give_to(self, resident: Tenant | None) -> None:
        """Let the others leave, and this one take back what it had there; None is generation."""
        async with self._changing:
            await self._change_to(resident)
            self._sampling = resident is None
            self._changing.notify_all()

    @asynccontextmanager
    async def borrow_during_generation(self, resident: Tenant) -> AsyncIterator[None]:
        """Inside, this one has the devices. It waits for generation's turn; the next turn waits for it."""
        async with self._changing:
            await self._changing.wait_for(lambda: self._sampling)
            await self._change_to(resident)
            yield

    async def _change_to(self, resident: Tenant | None) -> None:
        for other in self._residents:
            if other is not resident:
                await other.leave()
        if resident is not None:
            await resident.settle()


# Beyond a deadline that the ranks keep by themselves, and then say what did not finish.
GRACE_SECONDS = 30.0


class HeldModel:
    """A model that its ranks hold, and take turns on the devices with. Belongs to one event loop."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, deadlines: DeadlineConfig, *, trains: bool
    ) -> None:
        self.group = group
        self.trains = trains
        self._config = config
        self._deadlines = deadlines
        self.turns: DeviceScheduler | None = None  # of groups that share devices
        self._is_away = False

    async def leave(self) -> None:
        """Leave the devices as far as `offload` says. What needs them later takes them back by itself."""
        wanted = self._config.offload
        if (wanted.weights or wanted.optimizer) and not self._is_away:
            self._is_away = True
            await self.group.call("offload", stage="offload", deadline_seconds=self._deadlines.refit)

    async def settle(self) -> None:
        """Undo `leave`."""
        if self._is_away:
            await self.group.call("onload", stage="onload", deadline_seconds=self._deadlines.refit)
            self._is_away = False

    async def come_back(self) -> None:
        """Take the devices; the groups that share them leave, as far as theirs says."""
        if self.turns is None:
            await self.settle()
        else:
            await self.turns.give_to(self)

    async def give_devices_away(self) -> None:
        """Let generation have the devices: all that live there leave."""
        if self.turns is None:
            await self.leave()
        else:
            await self.turns.give_to(None)

    async def gpus(self) -> list[tuple[str, ...]]:
        """Of each rank, by the names that CUDA_VISIBLE_DEVICES takes; none on a CPU."""
        return await self.group.call("gpus", stage="start", deadline_seconds=self._deadlines.start)

    @property
    def samplers(self) -> list[Worker]:
        """Of a policy that samples by itself: who answers requests, one for each data-parallel copy."""
        return [self.group.workers[rank] for rank in self.group.mesh.output_ranks]

    @asynccontextmanager
    async def sampling(self, version: int) -> AsyncIterator[None]:
        """Inside, the policy samples by itself; its weights are of `version`. It does nothing else there."""
        seconds = self._deadlines.generation + GRACE_SECONDS
        serving = asyncio.ensure_future(
            self.group.call("serve", version, stage="generation", deadline_seconds=seconds)
        )
        try:
            yield
        finally:
            with suppress(ClusterError):  # what ended a rank ended `serve` too, which tells of it
                await asyncio.gather(
                    *(
                        worker.call("stop_serving", stage="generation", deadline_seconds=seconds)
                        for worker in self.samplers
                    )
                )
            await serving

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write model, optimizer, schedule and random states into a folder."""
        await self.come_back()
        return _together(await self._checkpoint("save_checkpoint", folder.absolute()))

    async def copy_for_checkpoint(self) -> None:
        """Copy all that aside, in the memory of the ranks."""
        await self.come_back()
        await self._checkpoint("copy_for_checkpoint")

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write what was copied, while the ranks do other work; ends before anything is copied again."""
        records = await self.group.call_background(
            "write_copy",
            folder.absolute(),
            stage="checkpoint",
            deadline_seconds=self._deadlines.checkpoint,
        )
        return _together(records)

    async def restore(self, folder: Path) -> None:
        """Take all that from a folder."""
        await self.come_back()
        await self._checkpoint("load_checkpoint", folder.absolute())

    async def header(self) -> dict[str, str]:
        """Device, layout and kernels in use."""
        found = await self.group.call("header", stage="start", deadline_seconds=self._deadlines.start)
        return found[0]  # type: ignore[no-any-return]

    async def _checkpoint(self, method: str, *args: Path) -> list[Any]:
        return await self.group.call(
            method, *args, stage="checkpoint", deadline_seconds=self._deadlines.checkpoint
        )


def _together(records: Sequence[tuple[FileRecord, ...]]) -> list[FileRecord]:
    return [record for of_rank in records for record in of_rank]


class ModelGroup(HeldModel):
    """A model as it computes: the policy, a critic, a reference, a teacher."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, deadlines: DeadlineConfig, *, trains: bool
    ) -> None:
        super().__init__(group, config, deadlines, trains=trains)
        self._hidden_size = load_shape(self._config.model_path, self._config.head).hidden_size
        self._plan: BatchPlan | None = None
        self._lengths: list[int] = []  # tokens of the loaded sequences

    async def load(
        self,
        sequences: Sequence[SequencePlace],
        *,
        kind: Literal["trajectories", "examples"],
        num_minibatches: int = 1,
    ) -> None:
        """Lay a batch over the data-parallel ranks; every rank fetches its sequences and keeps them."""
        layout = self._config.layout
        interleaved = layout.virtual_pipeline_parallel_size > 1
        self._lengths = [s.num_tokens for s in sequences]
        self._plan = plan_batch(
            self._lengths,
            self.group.mesh.data,
            num_minibatches,
            self._config.micro_batch_tokens,
            self._hidden_size,
            fewest=layout.pipeline_parallel_size if interleaved else 1,
            units=[-place if s.compared is None else s.compared.unit for place, s in enumerate(sequences, 1)],
        )
        await self.group.call_sharded(
            f"load_{kind}",
            make_shards(sequences, self._plan),
            stage="loading a batch",
            deadline_seconds=self._deadlines.logprobs,
            resolve=True,
        )

    async def take_advantages(self, sequences: Sequence[SequencePlace]) -> None:
        """New advantages for the loaded batch, which is of these sequences."""
        await self._sharded("take_advantages", make_shards(sequences, self._loaded()), stage="advantages")

    async def share(self, field: Field) -> Column:
        """A field of the loaded batch, for another group that has loaded the same sequences."""
        outputs = self.group.mesh.output_ranks
        stores = await self.group.call_sharded(
            "share",
            [rank in outputs for rank in range(self.group.mesh.world_size)],
            field,
            stage=field,
            deadline_seconds=self._deadlines.logprobs,
            axis="rank",
            outputs="output_ranks",
        )
        return column_of(stores, self._loaded())

    async def take(self, field: Field, column: Column) -> None:
        """Fill a field of the loaded batch with what another group has shared."""
        await self._sharded("take", column_shards(column, self._loaded()), field, stage=field)

    async def estimate(self, estimator: TokenEstimator) -> dict[str, float]:
        """Compute the batch's `advantages`, and `returns` for a critic; figures."""
        metrics = await self.group.call(
            "estimate", estimator, stage="advantages", deadline_seconds=self._deadlines.logprobs
        )
        return metrics[0]  # type: ignore[no-any-return]

    async def sequence_metrics(self, metric: SequenceMetric) -> list[float]:
        """A number for each loaded sequence, in the order of `load`."""
        plan = self._loaded()
        metrics = await self.group.call(
            "sequence_metrics",
            metric,
            stage="advantages",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        found = dict(zip(chain(*plan.ranks), chain(*metrics), strict=True))
        return [found[place] for place in range(len(found))]

    async def _sharded(self, method: str, shards: Sequence[Any], *args: Any, stage: str) -> None:
        await self.group.call_sharded(
            method, shards, *args, stage=stage, deadline_seconds=self._deadlines.logprobs, resolve=True
        )

    def packing_metrics(self) -> dict[str, float]:
        """How evenly the loaded batch is spread, and how full its micro-batches are."""
        return packing_metrics(
            self._loaded(), self._lengths, self._config.micro_batch_tokens, self._hidden_size
        )

    async def logprobs(self, *, old: bool, reference: bool, entropy: bool = False) -> LogprobStats:
        """Compute the batch's `old_logprobs` and `reference_logprobs`, which stay on the workers.

        With `entropy` also `old_entropies`, which belong to the old logprobs.
        """
        await self.come_back()
        stats = await self.group.call_sharded(
            "compute_logprobs",
            self._batches(),
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            old=old,
            reference=reference,
            entropy=entropy,
        )
        return stats[0]  # type: ignore[no-any-return]

    async def values(self) -> ValueStats:
        """Compute the batch's `values`, of a critic; they stay on the workers until they are shared."""
        await self.come_back()
        stats = await self.group.call_sharded(
            "compute_values", self._batches(), stage="values", deadline_seconds=self._deadlines.logprobs
        )
        return stats[0]  # type: ignore[no-any-return]

    async def top(self, k: int) -> None:
        """Compute the batch's `top_ids` and `top_logprobs`, which stay on the workers."""
        await self.come_back()
        await self.group.call_sharded(
            "compute_top", self._batches(), k, stage="logprobs", deadline_seconds=self._deadlines.logprobs
        )

    async def ask_teacher(
        self, config: EndpointTeacherConfig, name: str, taught: Set[int], top_k: int | None
    ) -> None:
        """Let a server say what it thinks of the loaded sequences with these numbers.

        It fills their `reference_logprobs`, or their `top_ids` and `top_logprobs`, on the output ranks, which
        may then share them.
        """
        numbers: list[list[int]] = [[] for _ in range(self.group.mesh.world_size)]
        for rank, held in zip(self.group.mesh.output_ranks, self._loaded().ranks, strict=True):
            numbers[rank] = [row for row, place in enumerate(held) if place in taught]
        seconds = self._deadlines.logprobs
        await self.group.call_sharded(
            "ask_teacher",
            numbers,
            config,
            name,
            top_k,
            seconds,
            stage="teachers",
            deadline_seconds=seconds + GRACE_SECONDS,
            axis="rank",
        )

    async def train(self, loss: Loss, minibatch: int = 0) -> TrainStats:
        """One optimizer step over a minibatch of the loaded batch."""
        await self.come_back()
        stats = await self.group.call_sharded(
            "train_on",
            self._loaded().minibatches[minibatch],
            loss=loss,
            stage="training",
            deadline_seconds=self._deadlines.training,
        )
        return stats[0]  # type: ignore[no-any-return]

    async def evaluate(self, loss: Loss) -> Evaluation:
        """The loss of the whole loaded batch under the weights as they are."""
        await self.come_back()
        metrics = await self.group.call_sharded(
            "evaluate_on",
            self._batches(),
            loss=loss,
            stage="validation",
            deadline_seconds=self._deadlines.training,
        )
        return metrics[0]  # type: ignore[no-any-return]

    async def sequence_logprobs(self, *, reference: bool) -> list[float]:
        """The summed logprobs of each loaded sequence's learnt tokens, in the order of `load`.

        Under the weights as they are, or under the reference's.
        """
        await self.come_back()
        plan = self._loaded()
        sums = await self.group.call_sharded(
            "sequence_logprobs",
            self._batches(),
            reference=reference,
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        found = dict(zip(chain(*plan.ranks), chain(*sums), strict=True))
        return [found[place] for place in range(len(found))]

    def _batches(self) -> list[list[list[int]]]:
        """[rank][micro-batch] of all minibatches together."""
        plan = self._loaded()
        return [
            [batch for minibatch in plan.minibatches for batch in minibatch[rank]]
            for rank in range(self.group.mesh.data)
        ]

    def _loaded(self) -> BatchPlan:
        if self._plan is None:
            raise RuntimeError("no batch was loaded: call load before logprobs and train")
        return self._plan


StartGroup = Callable[..., Awaitable[WorkerGroup]]


@dataclass(frozen=True)
class ModelStarter:
    """Starts the groups of an experiment's models."""

    experiment: Experiment
    placement: Placement
    device: Literal["cpu", "cuda"]
    start_group: StartGroup  # (name, target, kwargs of each rank, **options of `WorkerGroup.start`)

    async def start(self, rendezvous: str, *, training: bool) -> dict[str, WorkerGroup]:
        """The groups by name, at once; without training the policy alone. Its ranks meet at that place."""
        models = self.learners(training=training)
        own = [model.name for model in models if not model.on_policy_devices]
        threads = self.placement.threads(self.experiment.cluster.policy_threads, *own)
        groups = await asyncio.gather(*(self.start_model(model, rendezvous, threads) for model in models))
        return {model.name: group for model, group in zip(models, groups, strict=True)}

    def learners(self, *, training: bool) -> list[ModelSpec]:
        """The models that `start` starts."""
        learners = [model for model in models_of(self.experiment) if not model.scores]
        return learners if training else learners[:1]

    async def start_model(self, model: ModelSpec, rendezvous: str, threads: int) -> WorkerGroup:
        """The group of one model; `rendezvous` is the place of a store (`serve_rendezvous`)."""
        algorithm, cluster = self.experiment.algorithm, self.experiment.cluster
        deadlines, ranks = cluster.deadlines, model.config.layout.world_size
        shared: dict[str, Any] = {
            "config": model.config,
            "world_size": ranks,
            "rendezvous": f"tcp://{rendezvous}/{model.name}",
            "device": self.device,
            "threads": threads,
            "temperature": self.experiment.generation.sampling.temperature if algorithm.online else 1.0,
            "seed": self.experiment.seed,
            "keep_reference": False,
            "deadline_seconds": max(deadlines.training, deadlines.checkpoint, deadlines.refit),
            "trains": model.trains,
        }
        options: dict[str, Any] = {"threads": threads, "mesh": Mesh.of(model.config.layout)}
        host = "nemorl.session.policy_host:PolicyHost"
        if model.name == "policy":
            shared["keep_reference"] = algorithm.keeps_reference and self.experiment.reference is None
            if not self.experiment.generation.has_engines:
                host = "nemorl.session.policy_host:SamplingPolicyHost"
                tokenizer = model.config.tokenizer.path or model.config.model_path
                shared["generation"] = self.experiment.generation
                shared["tokenizer_path"] = tokenizer.absolute()
        kwargs = [{**shared, "rank": rank} for rank in range(ranks)]
        return await self.start_group(model.name, host, kwargs, **options)


def handles(experiment: Experiment, groups: Mapping[str, WorkerGroup]) -> dict[str, ModelGroup]:
    """A handle on each group that was started; those on the policy's devices take turns."""
    deadlines = experiment.cluster.deadlines
    models = [model for model in models_of(experiment) if model.name in groups]
    found = {
        model.name: ModelGroup(groups[model.name], model.config, deadlines, trains=model.trains)
        for model in models
    }
    residents = [found[model.name] for model in models if model.name == "policy" or model.on_policy_devices]
    turns = DeviceScheduler(residents)
    for resident in residents:
        resident.turns = turns
    return found


@contextmanager
def serve_rendezvous(host: str) -> Iterator[str]:
    """host:port of a store that this process serves while the block runs, at an address of this machine."""
    _store, place = served_store(host)
    yield place
