"""Typed handles on what the run's processes host: the only place that names remote methods as strings.

    loop ─▶ handle ─▶ WorkerGroup ─▶ [Ray] Actor ─▶ PolicyWorker | RolloutWorker | engine

Rollout workers use `EngineHandle` too, so this module imports torch for type checks only.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemorl.cluster.errors import ClusterError, WorkerFailed
from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import DeadlineConfig
from nemorl.errors import RunError
from nemorl.generation.router import Replica, RouterMetrics
from nemorl.generation.types import (
    EngineHealth,
    EngineStats,
    GenerationRequest,
    ReplicaLost,
    Report,
    RequestRefused,
)
from nemorl.models.registry import load_shape
from nemorl.rollout.collector import GroupAssignment, GroupSummary

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl.data.losses import (
        Evaluation,
        LogprobStats,
        Loss,
        SequenceMetric,
        TokenEstimator,
        TrainStats,
        ValueStats,
    )
    from nemorl.data.shards import Column, Field, LoadedBatch, SequencePlace
    from nemorl.megatron.checkpoint_store import FileRecord
    from nemorl.serve.app import Listening
    from nemorl.weights.messages import (
        Part,
        ReceiveReport,
        ReceiverLayout,
        RefitSession,
        SenderLayout,
        SendReport,
    )

    from .devices import DeviceScheduler

# Beyond a deadline that the processes keep themselves, and whose error says what did not finish.
GRACE_SECONDS = 30.0
_ABORT_SECONDS = 30.0
_ABANDON_SECONDS = 30.0
_REFUSED = f"{RequestRefused.__module__}.{RequestRefused.__qualname__}"


class ModelHandle:
    """A model: the policy, a critic, a reference, a teacher or a reward model. Belongs to one event loop."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, deadlines: DeadlineConfig, *, trains: bool
    ) -> None:
        self.group = group
        self.trains = trains
        self.devices: DeviceScheduler | None = None  # if other groups compute on the same devices
        self._config = config
        self._hidden_size = load_shape(config.model_path, config.head).hidden_size
        self._deadlines = deadlines
        self._offloaded = False
        self._batch: LoadedBatch | None = None

    # Devices

    async def offload(self) -> None:
        """Free device memory as far as the model's `offload` says; calls that need it take it back."""
        if (self._config.offload.weights or self._config.offload.optimizer) and not self._offloaded:
            self._offloaded = True
            await self.group.call("offload", stage="offload", deadline_seconds=self._deadlines.refit)

    async def reload(self) -> None:
        """Undo `offload`."""
        if self._offloaded:
            await self.group.call("onload", stage="onload", deadline_seconds=self._deadlines.refit)
            self._offloaded = False

    async def onload(self) -> None:
        """Take the devices; models that share them offload."""
        if self.devices is None:
            await self.reload()
        else:
            await self.devices.give_to(self)

    async def release_devices(self) -> None:
        """Give the devices to generation: all models that share them offload."""
        if self.devices is None:
            await self.offload()
        else:
            await self.devices.give_to(None)

    async def header(self) -> dict[str, str]:
        """Device, layout and kernels in use."""
        headers: list[dict[str, str]] = await self.group.call(
            "header", stage="start", deadline_seconds=self._deadlines.start
        )
        return headers[0]

    # Batches

    async def load(
        self,
        sequences: "Sequence[SequencePlace]",
        *,
        kind: Literal["trajectories", "examples"],
        num_minibatches: int = 1,
    ) -> None:
        """Lay a batch over the data-parallel ranks; every rank fetches its sequences and keeps them."""
        from nemorl.data.shards import LoadedBatch

        self._batch = LoadedBatch.plan_for(
            sequences, self._config, self._hidden_size, self.group.mesh.data, num_minibatches
        )
        method = "load_trajectories" if kind == "trajectories" else "load_examples"
        await self._to_ranks(method, self._batch.shards(sequences), stage="loading a batch")

    async def take_advantages(self, sequences: "Sequence[SequencePlace]") -> None:
        """Replace the advantages of the loaded batch, which is of these sequences."""
        await self._to_ranks("take_advantages", self.batch.shards(sequences), stage="advantages")

    async def share(self, field: "Field") -> "Column":
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
            keep=field,
        )
        return self.batch.column(stores)

    async def take(self, field: "Field", column: "Column") -> None:
        """Fill a field of the loaded batch with what another group has shared."""
        await self._to_ranks("take", self.batch.column_shards(column), field, stage=field)

    async def estimate(self, estimator: "TokenEstimator") -> dict[str, float]:
        """Compute the batch's `advantages`, and `returns` for a critic; metrics of the estimator."""
        metrics: list[dict[str, float]] = await self.group.call(
            "estimate", estimator, stage="advantages", deadline_seconds=self._deadlines.logprobs
        )
        return metrics[0]

    async def sequence_metrics(self, metric: "SequenceMetric") -> list[float]:
        """A number for each loaded sequence, in the order of `load`."""
        values = await self.group.call(
            "sequence_metrics",
            metric,
            stage="advantages",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        return self.batch.in_order(values)

    async def fill(
        self, sequences: Set[int], compute: "Callable[..., Mapping[str, Tensor]]", *, stage: str
    ) -> None:
        """Fill the fields that `compute` returns for the loaded sequences with these numbers.

        On the output ranks, which may then share them. It gets the deadline as `seconds`.
        """
        numbers: list[list[int]] = [[] for _ in range(self.group.mesh.world_size)]
        for rank, held in zip(self.group.mesh.output_ranks, self.batch.plan.ranks, strict=True):
            numbers[rank] = [row for row, place in enumerate(held) if place in sequences]
        seconds = self._deadlines.logprobs
        await self.group.call_sharded(
            "fill",
            numbers,
            partial(compute, seconds=seconds),
            stage=stage,
            deadline_seconds=seconds + GRACE_SECONDS,
            axis="rank",
        )

    def packing_metrics(self) -> dict[str, float]:
        """How evenly the loaded batch is spread, and how full its micro-batches are."""
        return self.batch.packing_metrics()

    @property
    def batch(self) -> "LoadedBatch":
        """The loaded batch."""
        if self._batch is None:
            raise RuntimeError("no batch is loaded: call load first")
        return self._batch

    async def _to_ranks(self, method: str, shards: Sequence[Any], *args: Any, stage: str) -> None:
        await self.group.call_sharded(
            method, shards, *args, stage=stage, deadline_seconds=self._deadlines.logprobs, resolve=True
        )

    # Computation

    async def logprobs(self, *, old: bool, reference: bool, entropy: bool = False) -> "LogprobStats":
        """Compute the batch's `old_logprobs` and `reference_logprobs`, which stay on the workers.

        With `entropy` also `old_entropies`, which belong to the old logprobs.
        """
        stats: list[LogprobStats] = await self._compute(
            "compute_logprobs",
            self.batch.micro_batches,
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            old=old,
            reference=reference,
            entropy=entropy,
        )
        return stats[0]

    async def values(self) -> "ValueStats":
        """Compute the batch's `values`, of a critic; they stay on the workers until they are shared."""
        stats: list[ValueStats] = await self._compute(
            "compute_values",
            self.batch.micro_batches,
            stage="values",
            deadline_seconds=self._deadlines.logprobs,
        )
        return stats[0]

    async def top(self, k: int) -> None:
        """Compute the batch's `top_ids` and `top_logprobs`, which stay on the workers."""
        await self._compute(
            "compute_top",
            self.batch.micro_batches,
            k,
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
        )

    async def train(self, loss: "Loss", minibatch: int = 0) -> "TrainStats":
        """One optimizer step over a minibatch of the loaded batch."""
        stats: list[TrainStats] = await self._compute(
            "train",
            self.batch.plan.minibatches[minibatch],
            loss,
            stage="training",
            deadline_seconds=self._deadlines.training,
        )
        return stats[0]

    async def evaluate(self, loss: "Loss") -> "Evaluation":
        """The loss of the complete loaded batch under the current weights."""
        evaluations: list[Evaluation] = await self._compute(
            "evaluate",
            self.batch.micro_batches,
            loss,
            stage="validation",
            deadline_seconds=self._deadlines.training,
        )
        return evaluations[0]

    async def sequence_logprobs(self, *, reference: bool) -> list[float]:
        """The summed logprobs of each loaded sequence's trained tokens, in the order of `load`.

        Under the current weights, or under the reference's.
        """
        sums = await self._compute(
            "sequence_logprobs",
            self.batch.micro_batches,
            reference=reference,
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        return self.batch.in_order(sums)

    async def _compute(self, method: str, *args: Any, **options: Any) -> list[Any]:
        await self.onload()
        return await self.group.call_sharded(method, *args, **options)

    # Sampling, by a policy without engines

    @property
    def samplers(self) -> "list[EngineHandle]":
        """The leader of each data-parallel copy, which answers requests."""
        workers = self.group.workers
        return [
            EngineHandle(replace(workers[rank], prefix="sampler.")) for rank in self.group.mesh.output_ranks
        ]

    @asynccontextmanager
    async def sampling(self, version: int) -> AsyncIterator[None]:
        """Inside, the policy samples; its weights are of `version`. It does nothing else meanwhile."""
        seconds = self._deadlines.generation + GRACE_SECONDS
        serving = asyncio.ensure_future(
            self.group.call("serve", version, stage="generation", deadline_seconds=seconds)
        )
        try:
            yield
        finally:
            with suppress(ClusterError):  # what ended a rank ended `serve` too, which reports it
                await asyncio.gather(
                    *(
                        sampler.worker.call("stop", stage="generation", deadline_seconds=seconds)
                        for sampler in self.samplers
                    )
                )
            await serving

    # Checkpoints

    async def save(self, folder: Path) -> "list[FileRecord]":
        """Write model, optimizer, schedule and random states into a folder."""
        await self.onload()
        return _flat(await self._checkpoint("save_checkpoint", folder.absolute()))

    async def copy_for_checkpoint(self) -> None:
        """Copy all that `save` writes within the memory of the ranks."""
        await self.onload()
        await self._checkpoint("copy_for_checkpoint")

    async def write_copy(self, folder: Path) -> "list[FileRecord]":
        """Write the copy while the ranks do other work; ends before anything is copied again."""
        records = await self.group.call_background(
            "write_copy",
            folder.absolute(),
            stage="checkpoint",
            deadline_seconds=self._deadlines.checkpoint,
        )
        return _flat(records)

    async def restore(self, folder: Path) -> None:
        """Load what `save` wrote."""
        await self.onload()
        await self._checkpoint("load_checkpoint", folder.absolute())

    async def _checkpoint(self, method: str, *args: Path) -> list[Any]:
        return await self.group.call(
            method, *args, stage="checkpoint", deadline_seconds=self._deadlines.checkpoint
        )


@dataclass(frozen=True)
class TrainedModels:
    """All models of a run that train, in one checkpoint, which holds all of them or does not exist.

    The policy's files are in the checkpoint's folder itself, those of others in folders of their names.
    """

    models: Mapping[str, ModelHandle]

    async def save(self, folder: Path) -> "list[FileRecord]":
        """Write all of them, in sequence: they may share devices."""
        return [
            record
            for name, model in self.models.items()
            for record in _placed(name, await model.save(folder_of(folder, name)))
        ]

    async def copy_for_checkpoint(self) -> None:
        """Copy all of them, in sequence."""
        for model in self.models.values():
            await model.copy_for_checkpoint()

    async def write_copy(self, folder: Path) -> "list[FileRecord]":
        """Write the copies at the same time, while training continues."""
        written = await asyncio.gather(
            *(model.write_copy(folder_of(folder, name)) for name, model in self.models.items())
        )
        return [record for placed in map(_placed, self.models, written) for record in placed]

    async def restore(self, folder: Path) -> None:
        """Load all of them from a checkpoint. Raises RunError where one is not in it."""
        missing = [name for name in self.models if not folder_of(folder, name).is_dir()]
        if missing:
            raise RunError(
                f"{folder} holds no {' and no '.join(missing)}, as a run of another algorithm wrote it: "
                "resume with the algorithm it began with, or start a new run from an export of its weights"
            )
        for name, model in self.models.items():
            await model.restore(folder_of(folder, name))


def folder_of(checkpoint: Path, name: str) -> Path:
    """The folder of a model's files in a checkpoint."""
    return checkpoint if name == "policy" else checkpoint / name


def _placed(name: str, records: "Sequence[FileRecord]") -> "list[FileRecord]":
    """Records of files with paths relative to the checkpoint."""
    if name == "policy":
        return list(records)
    return [replace(record, path=f"{name}/{record.path}") for record in records]


def _flat(records: "Sequence[tuple[FileRecord, ...]]") -> "list[FileRecord]":
    return [record for of_rank in records for record in of_rank]


@dataclass(frozen=True)
class EngineHandle:
    """An engine, or a policy rank that samples. Can be sent to other processes."""

    worker: Worker

    @property
    def rank(self) -> int:
        """Its rank in the group."""
        return self.worker.rank

    @property
    def name(self) -> str:
        """As routers and errors call it."""
        return f"generation replica {self.worker.rank}"

    def as_replica(self) -> Replica:
        """As a router calls it."""
        return Replica(self.name, self.generate, self.abort)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[Sequence[Report], None]:
        """Reports of these requests as they come. Raises RequestRefused or ReplicaLost."""
        # What was sampled together travels together: an item of a stream costs Ray about a millisecond.
        batches = self.worker.stream(
            "generate_batches",
            requests,
            stage="generation",
            deadline_seconds=max(request.deadline_seconds for request in requests) + GRACE_SECONDS,
        )
        try:
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        except WorkerFailed as error:
            if error.kind == _REFUSED:
                raise RequestRefused(error.message) from error
            raise ReplicaLost(str(error)) from error
        except ClusterError as error:
            raise ReplicaLost(str(error)) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests whose callers no longer wait."""
        await self.worker.call("abort", request_ids, stage="abort", deadline_seconds=_ABORT_SECONDS)

    async def health(self, deadline_seconds: float) -> EngineHealth:
        """State of the engine. Raises what ended it."""
        health: EngineHealth = await self.worker.call(
            "health", stage="health check", deadline_seconds=deadline_seconds
        )
        return health

    async def stats(self, deadline_seconds: float) -> EngineStats:
        """What was done since the last call."""
        stats: EngineStats = await self.worker.call(
            "stats", stage="metrics", deadline_seconds=deadline_seconds
        )
        return stats

    async def sleep(self, level: int, deadline_seconds: float) -> None:
        """Leave the devices: 1 keeps the weights in host memory, 2 keeps nothing."""
        await self.worker.call("sleep", level, stage="engines sleep", deadline_seconds=deadline_seconds)

    async def wake(self, tags: tuple[str, ...], deadline_seconds: float) -> None:
        """Take `weights`, `kv_cache` or, without tags, both back onto the devices."""
        await self.worker.call("wake", tags, stage="engines wake", deadline_seconds=deadline_seconds)


@dataclass(frozen=True)
class _WeightSide:
    """One side of the weight exchange. A failed call leaves the processes with the version they had."""

    group: WorkerGroup
    deadline_seconds: float

    async def _call(self, method: str, *args: Any, deadline_seconds: float | None = None) -> list[Any]:
        return await self.group.call(
            method,
            *args,
            stage="refit",
            deadline_seconds=deadline_seconds or self.deadline_seconds,
            ends_group=False,
        )

    async def _prepare(self, method: str, parts: Sequence[Any]) -> None:
        await self.group.call_sharded(
            method,
            parts,
            axis="rank",
            stage="refit",
            deadline_seconds=self.deadline_seconds,
            ends_group=False,
        )


class PolicySenders(_WeightSide):
    """All policy ranks (`SenderGroup`)."""

    async def describe(self) -> "Sequence[SenderLayout]":
        """What each rank holds."""
        return await self._call("sender.describe")

    async def prepare(self, parts: "Sequence[Part]") -> None:
        """Give every rank its part of the plan."""
        await self._prepare("sender.prepare", parts)

    async def send(self, session: "RefitSession") -> "Sequence[SendReport]":
        """Send on every rank."""
        return await self._call("sender.send", session)


@dataclass(frozen=True)
class GenerationReceivers(_WeightSide):
    """All generation ranks (`ReceiverGroup`).

    A process of the group is a replica, which may have several ranks (tensor parallel and so on). Here ranks
    are numbered through all replicas, in sequence.
    """

    _ranks: list[int] = field(default_factory=list)  # of each replica, after `describe`

    async def describe(self) -> "Sequence[ReceiverLayout]":
        """What each rank needs."""
        layouts: list[tuple[ReceiverLayout, ...]] = await self._call("describe_weights")
        self._ranks[:] = map(len, layouts)
        return [layout for of_replica in layouts for layout in of_replica]

    async def prepare(self, parts: "Sequence[Part]") -> None:
        """Give every replica its ranks' parts of the plan."""
        left = iter(parts)
        of_replicas = [tuple(itertools.islice(left, count)) for count in self._ranks]
        await self._prepare("prepare_refit", of_replicas)

    async def receive(self, session: "RefitSession") -> "Sequence[ReceiveReport]":
        """Receive on every rank."""
        reports: list[tuple[ReceiveReport, ...]] = await self._call("receive_weights", session)
        return [report for of_replica in reports for report in of_replica]

    async def commit(self, version: int) -> None:
        """Make what was received the weights in use, on every rank."""
        await self._call("commit_weights", version)

    async def abandon(self) -> None:
        """Have every rank discard an update that did not finish."""
        # An engine that hangs has mostly been waited for already, until the refit's own deadline.
        await self._call("abandon_refit", deadline_seconds=min(self.deadline_seconds, _ABANDON_SECONDS))


@dataclass(frozen=True)
class RouterHandle:
    """The routers of a group of rollout workers or endpoints."""

    group: WorkerGroup

    async def take_metrics(self, deadline_seconds: float) -> list[RouterMetrics]:
        """What became of requests since the last call, by router."""
        return await self.group.call(
            "take_router_metrics", stage="metrics", deadline_seconds=deadline_seconds
        )

    async def lost_replicas(self, deadline_seconds: float) -> list[dict[str, str]]:
        """The cause of each loss by the replica's name, by router."""
        return await self.group.call("lost_replicas", stage="health check", deadline_seconds=deadline_seconds)

    async def add(self, replica: Replica, deadline_seconds: float) -> None:
        """Send requests to this replica too, which takes the place of a lost one."""
        await self.group.call("add_engine", replica, stage="generation", deadline_seconds=deadline_seconds)

    async def listen(self, deadline_seconds: float) -> "Listening":
        """Have the endpoint answer from now on; its address."""
        listening: list[Listening] = await self.group.call(
            "listen", stage="start", deadline_seconds=deadline_seconds
        )
        return listening[0]


@dataclass(frozen=True)
class RolloutHandle:
    """A rollout worker."""

    worker: Worker
    deadline_seconds: float

    async def run_groups(self, assignments: Sequence[GroupAssignment]) -> AsyncIterator[GroupSummary]:
        """Summaries as the groups end; they refer to the trajectories, which stay in the object store."""
        pairs = self.worker.stream(
            "stream_groups",
            assignments,
            stage="generation",
            deadline_seconds=self.deadline_seconds,
            pairs=True,
        )
        async with aclosing(pairs):
            async for reference, summary in pairs:
                yield replace(summary, reference=reference)
