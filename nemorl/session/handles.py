"""Typed handles on what the run's processes host: the only place that names remote methods as strings.

    loop ─▶ handle ─▶ WorkerGroup ─▶ [Ray] Actor ─▶ PolicyWorker | RolloutWorker | engine

Rollout workers use `EngineHandle` too, so this module imports torch for type checks only.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nemorl.cluster.errors import (
    ClusterError,
    DeadlineExceeded,
    GroupEnded,
    NodeNotReplaced,
    RestartsExhausted,
    WorkerDied,
    WorkerFailed,
)
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.worker import BusySpans, Worker
from nemorl.config.facts import ModelSpec
from nemorl.config.run import ClusterConfig
from nemorl.errors import RunError
from nemorl.generation import types
from nemorl.generation.router import Replica, RouterMetrics
from nemorl.models.layout_rules import with_fewer_copies
from nemorl.models.registry import policy_shape
from nemorl.plan.utilization import ModelWork
from nemorl.rollout.concurrency import PlacesUse
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl.config.algorithm.aligned import TeacherScore
    from nemorl.data import losses, shards
    from nemorl.data.trained import Trained
    from nemorl.megatron.checkpoint_store import FileRecord
    from nemorl.rollout.stored import StepPart
    from nemorl.serve.app import Listening
    from nemorl.serve.environment_sessions import SessionCounts
    from nemorl.weights import messages

logger = logging.getLogger(__name__)

T = TypeVar("T")
BatchKind = Literal["trajectories", "examples"]
Folder = Path | Mapping[str, Path]  # of a checkpoint: of all ranks and the driver, or by the ID of a node

GRACE_SECONDS = 30.0  # beyond a deadline that the processes keep themselves, whose error names what is late
_ABORT_SECONDS = 30.0
_ABANDON_SECONDS = 30.0
_REFUSED = f"{types.RequestRefused.__module__}.{types.RequestRefused.__qualname__}"
_calls = itertools.count()  # numbers of calls of rollout workers


class TooManySkippedSteps(RunError):
    """More optimizer steps in a row were skipped than the config allows."""


class DeviceScheduler:
    """Gives the devices that models share to one at a time; reward models borrow them during generation."""

    def __init__(self, tenants: "Sequence[ModelHandle]") -> None:
        self.tenants = [*tenants]
        self._changing = asyncio.Condition()
        self._generating = False  # it is generation's turn

    async def give_to(self, tenant: "ModelHandle | None") -> None:
        """Let the others offload, then this one reload; None is generation."""
        async with self._changing:
            await self._change_to(tenant)
            self._generating = tenant is None
            self._changing.notify_all()

    @asynccontextmanager
    async def borrow_during_generation(self, tenant: "ModelHandle") -> AsyncIterator[None]:
        """Inside, this one has the devices. It waits for generation's turn; the next turn waits for it."""
        async with self._changing:
            await self._changing.wait_for(lambda: self._generating)
            await self._change_to(tenant)
            yield

    async def _change_to(self, tenant: "ModelHandle | None") -> None:
        for other in self.tenants:
            if other is not tenant:
                await other.offload()
        if tenant is not None:
            await tenant.reload()


class ModelHandle:
    """A model: the policy, a critic, a reference, a teacher or a reward model. Belongs to one event loop."""

    def __init__(
        self,
        group: WorkerGroup,
        spec: ModelSpec,
        cluster: ClusterConfig,
        rendezvous: str = "",
    ) -> None:
        """`rendezvous`: where the ranks connect; its path is a prefix of the store's keys."""
        self.group = group
        self._rendezvous, self._restarts, self._cluster = rendezvous, 0, cluster
        self.trains = spec.trains
        self.devices = DeviceScheduler([self])  # replaced if other models compute on the same devices
        self._config = spec.config
        self._shape = policy_shape(spec.config)
        self.work = ModelWork.of(self._shape, spec.config.lora, spec.config.multi_token_prediction)
        self._deadlines = cluster.deadlines
        self._offloaded = False
        self._batch: shards.BatchPlan | None = None
        self.skipped_in_a_row = 0  # updates until the last one

    async def offload(self) -> None:
        """Free device memory as far as the model's `offload` says; does nothing if that was done."""
        if (self._config.offload.weights or self._config.offload.optimizer) and not self._offloaded:
            self._offloaded = True
            await self.group.call("offload", stage="offload", seconds=self._deadlines.refit)

    async def reload(self) -> None:
        if self._offloaded:
            await self.group.call("onload", stage="onload", seconds=self._deadlines.refit)
            self._offloaded = False

    async def onload(self) -> None:
        """Take the devices; models that share them offload."""
        await self.devices.give_to(self)

    async def release_devices(self) -> None:
        """Give the devices to generation: all models that share them offload."""
        await self.devices.give_to(None)

    async def lost_one(self) -> bool:
        """True if a process of the model has died or does not respond."""
        return await self.group.lost_one(self._deadlines.health)

    @property
    def has_lost_node(self) -> bool:
        return self.group.has_lost_node

    async def await_places(self) -> None:
        """Wait until all ranks have places on nodes that are not lost, or have fewer (`on_lost_node`).

        Raises `NodeNotReplaced`.
        """
        try:
            await self.group.await_places(self._cluster.lost_node_seconds)
        except NodeNotReplaced as error:
            if self._cluster.on_lost_node != "shrink":
                raise
            self._shrink(error)

    def _shrink(self, error: NodeNotReplaced) -> None:
        name, layout, left = self.group.name, self._config.layout, self.group.num_left
        adapters = self._config.lora is not None
        smaller = with_fewer_copies(self._shape, layout, left, adapters=adapters)
        reason = ""
        if self.group.shares_places:
            reason = f"{name} shares its places with other processes, and cannot have fewer ranks"
        elif smaller is None:
            sizes = f"no smaller data-parallel size of {layout.name} fits"
            reason = f"{left} ranks of {name} are left, and {sizes}"
        if smaller is None or reason:
            error.add_note(f"cluster.on_lost_node = shrink: {reason}")
            raise error
        sizes = f"{smaller.data_parallel_size} instead of {layout.data_parallel_size}"
        logger.warning("%s restarts with a data-parallel size of %s: no node has room for all", name, sizes)
        self._config = self._config.model_copy(update={"layout": smaller})
        self.group.shrink(Mesh.of(smaller))

    async def restart(self) -> None:
        """Replace the processes by others, which have the weights of the model's folder and no batch.

        Those of a lost node wait for a place on another one. Raises `NodeNotReplaced`, and as
        `WorkerGroup.call`.
        """
        await self.await_places()
        self._restarts += 1
        self._batch, self._offloaded, self.skipped_in_a_row = None, False, 0
        rendezvous = f"{self._rendezvous}.{self._restarts}"
        size = self._config.layout.world_size
        changed = {"rendezvous": rendezvous, "config": self._config, "world_size": size}
        await self.group.replace_all(self._deadlines.start, **changed)

    async def outlasting(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of work of a model that does not train, after restarts if it loses processes.

        The weights are those of its folder, so a restart loses only the work, which is done again from its
        beginning: it loads its own batch. Raises RestartsExhausted, and errors that no loss explains.
        """
        assert not self.trains, "a restarted model that trains has to return to a checkpoint"
        lost: ClusterError | None = None
        attempts, most = 0, self._cluster.max_model_restarts
        while True:
            try:
                if lost is not None:
                    await self._restart_in_place(lost)
                return await work()
            except NodeNotReplaced:
                raise
            except ClusterError as error:
                fails = self._cluster.on_lost_node == "fail" and self.group.has_lost_node
                if not most or fails or not await self.lost_one():
                    raise
                if attempts == most:
                    problem = f"{self.group.name} was restarted {attempts} times without completing its work"
                    raise RestartsExhausted(f"{problem} (cluster.max_model_restarts): {error}") from error
                lost, attempts = error, attempts + 1

    async def _restart_in_place(self, lost: ClusterError) -> None:
        name, began = self.group.name, time.monotonic()
        logger.warning("%s lost, restarting: %s", name, lost)
        for other in self.devices.tenants:
            if other is not self:
                await other.offload()
        await self.restart()
        logger.warning("%s restarted in %.1f s", name, time.monotonic() - began)

    async def header(self) -> dict[str, str]:
        seconds = self._deadlines.start
        headers: list[dict[str, str]]
        headers = await self._call("header", stage="start", seconds=seconds, outputs="first")
        return headers[0]

    @asynccontextmanager
    async def profiled(self, step: int, folder: Path) -> AsyncIterator[None]:
        """Inside, the model's processes record what they do, if this step is one of `policy.profile`."""
        config, deadline = self._config.profile, self._deadlines.checkpoint
        if config is None or step not in config.step_numbers:
            yield
            return
        stage = "profile"
        await self._call("start_profile", stage=stage, seconds=deadline)
        yield
        name = f"step_{step:08}-{self.group.name}"
        await self._call("end_profile", folder.absolute(), name, stage=stage, seconds=deadline)

    async def _call(self, method: str, *args: Any, seconds: float | None = None, **options: Any) -> list[Any]:
        """Call the group, within the deadline for logprobs unless another is given."""
        seconds = self._deadlines.logprobs if seconds is None else seconds
        return await self.group.call(method, *args, seconds=seconds, **options)

    def _tabulated(self, of_ranks: "Sequence[shards.ColumnShard]") -> "list[shards.ColumnShard]":
        stores = self.group.tabulate([shard.stores for shard in of_ranks])
        return [replace(shard, stores=entries) for shard, entries in zip(of_ranks, stores, strict=True)]

    def packing_metrics(self) -> dict[str, float]:
        return self.batch.packing_metrics()

    @property
    def batch(self) -> "shards.BatchPlan":
        if self._batch is None:
            raise RuntimeError("no batch is loaded: call load first")
        return self._batch

    async def load(
        self, sequences: "Sequence[shards.SequencePlace]", *, kind: BatchKind, num_minibatches: int = 1
    ) -> None:
        """Lay a batch over the data-parallel ranks; every rank fetches its sequences and keeps them."""
        from nemorl.data.shards import plan_sequences

        data, size = self.group.mesh.data, self._shape.hidden_size
        plan = partial(plan_sequences, on_gpu=self._cluster.gpus_per_node > 0)
        self._batch = plan(sequences, self._config, size, data, num_minibatches)
        method = "load_trajectories" if kind == "trajectories" else "load_examples"
        of_ranks = self._tabulated(self._batch.shards(sequences))
        # It fails if sequences were lost with their node.
        await self._call(method, shards=of_ranks, stage="loading a batch", resolve=True, ends_group=False)

    async def take_advantages(self, sequences: "Sequence[shards.SequencePlace]") -> None:
        of_ranks = self._tabulated(self.batch.shards(sequences))
        await self._call(
            "take_advantages", shards=of_ranks, stage="advantages", resolve=True, ends_group=False
        )

    async def share(self, field: "shards.Field") -> "shards.Column":
        """A field of the loaded batch, for another group that has loaded the same sequences."""
        mesh = self.group.mesh
        shares = [rank in mesh.output_ranks for rank in range(mesh.world_size)]
        stores = await self._call(
            "share", field, shards=shares, axis="rank", stage=field, outputs="output_ranks", keep=field
        )
        return self.batch.column(stores)

    async def take(self, field: "shards.Field", column: "shards.Column") -> None:
        shards = self._tabulated(self.batch.column_shards(column))
        # It fails if the column was lost with its process, and leaves the batch as it was.
        await self._call("take", field, shards=shards, stage=field, resolve=True, ends_group=False)

    async def estimate(self, estimator: "losses.TokenEstimator") -> dict[str, float]:
        """Compute the batch's `advantages`, and `returns` for a critic; metrics of the estimator."""
        metrics: list[dict[str, float]]
        metrics = await self._call("estimate", estimator, stage="advantages", outputs="first")
        return metrics[0]

    async def sequence_metrics(self, metric: "losses.SequenceMetric") -> list[float]:
        """A number for each loaded sequence, in the order of `load`."""
        values = await self._call("sequence_metrics", metric, stage="advantages", outputs="output_ranks")
        return self.batch.in_order(values)

    async def marked_values(self) -> list[list[float]]:
        """The values at the tokens of the loss mask, of each loaded sequence, in the order of `load`."""
        values = await self._call("marked_values", stage="values", outputs="output_ranks")
        return self.batch.in_order(values)

    async def fill(
        self, sequences: Set[int], compute: "Callable[..., Mapping[str, Tensor]]", *, stage: str
    ) -> None:
        """Fill the fields that `compute(…, seconds=…)` returns for loaded sequences, on the output ranks."""
        numbers: list[list[int]] = [[] for _ in range(self.group.mesh.world_size)]
        for rank, held in zip(self.group.mesh.output_ranks, self.batch.ranks, strict=True):
            numbers[rank] = [row for row, place in enumerate(held) if place in sequences]
        seconds = self._deadlines.logprobs
        of_rank, seconds = partial(compute, seconds=seconds), seconds + GRACE_SECONDS
        await self._call("fill", of_rank, shards=numbers, axis="rank", stage=stage, seconds=seconds)

    async def logprobs(
        self, *, old: bool, reference: bool, entropy: bool = False, collision: bool = False
    ) -> "losses.LogprobStats":
        """Compute `old_` and `reference_logprobs`, `old_entropies` and `old_collisions`.

        They stay on the workers.
        """
        options = {"old": old, "reference": reference, "entropy": entropy, "collision": collision}
        stats: list[losses.LogprobStats]
        stats = await self._forward("compute_logprobs", stage="logprobs", outputs="first", **options)
        return stats[0]

    async def values(self) -> "losses.ValueStats":
        """Compute the batch's `values`, of a critic; they stay on the workers until they are shared."""
        stats: list[losses.ValueStats]
        stats = await self._forward("compute_values", stage="values", outputs="first")
        return stats[0]

    async def top(self, k: int, *, scaled: bool = False, score: "TeacherScore | None" = None) -> None:
        """Compute the batch's `top_ids`, `top_logprobs` and `teacher_scores`, which stay on the workers."""
        await self._forward("compute_top", k, stage="logprobs", scaled=scaled, score=score)

    async def sequence_logprobs(self, *, reference: bool) -> list[float]:
        """The summed logprobs, or the reference's, of each sequence, in the order of `load`."""
        options = {"outputs": "output_ranks", "reference": reference}
        return self.batch.in_order(await self._forward("sequence_logprobs", stage="logprobs", **options))

    async def _forward(self, method: str, *args: Any, **options: Any) -> list[Any]:
        await self.onload()
        return await self._call(method, *args, shards=self.batch.micro_batches, **options)

    async def record(self, kept: Mapping[int, str], folder: Path, step: int) -> "tuple[list[Trained], str]":
        """What was trained of each loaded sequence, in the order of `load`, and why files are missing, if so.

        The output ranks write the arrays of the sequences of `kept`, by the names that it gives them.
        """
        numbers: list[dict[int, str]] = [{} for _ in range(self.group.mesh.world_size)]
        for rank, held in zip(self.group.mesh.output_ranks, self.batch.ranks, strict=True):
            numbers[rank] = {row: kept[place] for row, place in enumerate(held) if place in kept}
        options: dict[str, Any] = {"shards": numbers, "axis": "rank", "outputs": "output_ranks"}
        of_ranks = await self._call("record", folder, step, stage="recording", ends_group=False, **options)
        problem = next((problem for _, problem in of_ranks if problem), "")
        return self.batch.in_order([trained for trained, _ in of_ranks]), problem

    async def train(
        self, loss: "losses.Loss", minibatch: int = 0, *, keep: bool = False
    ) -> "losses.TrainStats":
        """One optimizer step. Raises `TooManySkippedSteps` if it ends a row that is too long.

        With `keep` the workers keep the logprobs of its forward passes for `record`.
        """
        await self.onload()
        shards, seconds = self.batch.minibatches[minibatch], self._deadlines.training
        stats: list[losses.TrainStats]
        options: dict[str, Any] = {"shards": shards, "seconds": seconds, "outputs": "first"}
        stats = await self._call("train", loss, keep, stage="training", **options)
        row, most = stats[0].skipped_in_a_row, self._config.max_skipped_steps
        self.skipped_in_a_row = row
        if row > most:
            raise TooManySkippedSteps(
                f"{self.group.name} skipped {row} optimizer steps in a row in stage 'training' "
                f"(policy.max_skipped_steps is {most}); of the last one {stats[0].skip_reason}. Lower the "
                "learning rate, or look at the rewards, logprobs and samples of these steps"
            )
        return stats[0]

    async def evaluate(self, loss: "losses.Loss") -> "losses.Evaluation":
        options = {"stage": "validation", "seconds": self._deadlines.training, "outputs": "first"}
        found: list[losses.Evaluation] = await self._forward("evaluate", loss, **options)
        return found[0]

    @property
    def samplers(self) -> "list[EngineHandle]":
        """The leader of each data-parallel copy of a policy without engines, which answers requests."""
        leaders = (self.group.workers[rank] for rank in self.group.mesh.output_ranks)
        return [EngineHandle(replace(leader, prefix="sampler.")) for leader in leaders]

    @asynccontextmanager
    async def sampling(self, version: int) -> AsyncIterator[None]:
        """Inside, the policy samples; its weights are of `version`. It does nothing else meanwhile."""
        seconds = self._deadlines.generation + GRACE_SECONDS
        serving = asyncio.ensure_future(self._call("serve", version, stage="generation", seconds=seconds))
        try:
            yield
        finally:
            with suppress(ClusterError):  # what ended a rank ended `serve` too, which reports it
                workers = [sampler.worker for sampler in self.samplers]
                stops = (w.call("stop", stage="generation", seconds=seconds) for w in workers)
                await asyncio.gather(*stops)
            await serving

    async def save(self, folder: Path) -> "list[FileRecord]":
        await self.onload()
        return await self._checkpoint("save_checkpoint", folder)

    async def copy_for_checkpoint(self) -> None:
        """Copy all that `save` writes within the memory of the ranks."""
        await self.onload()
        await self._checkpoint("copy_for_checkpoint")

    async def write_copy(self, folder: Folder) -> "list[FileRecord]":
        """Write the copy while the ranks do other work; ends before anything is copied again."""
        return await self._checkpoint("write_copy", folder, background=True)

    async def restore(self, folder: Folder) -> None:
        await self.onload()
        await self._checkpoint("load_checkpoint", folder)
        self.skipped_in_a_row = 0

    async def _checkpoint(
        self, method: str, folder: Folder | None = None, background: bool = False
    ) -> "list[FileRecord]":
        options: dict[str, Any] = {"seconds": self._deadlines.checkpoint, "background": background}
        # Not collective: where the disk is full, the ranks can train on.
        options["ends_group"] = method != "save_checkpoint"
        if folder is not None:
            folders = [_folder_at(folder, worker) for worker in self.group.workers]
            options |= {"shards": folders, "axis": "rank"}
        records = await self._call(method, stage="checkpoint", **options)
        return [record for of_rank in records for record in of_rank or ()]


@dataclass(frozen=True)
class TrainedModels:
    """All models of a run that train, in one checkpoint, which holds all of them or does not exist."""

    models: Mapping[str, ModelHandle]

    async def save(self, folder: Path) -> "list[FileRecord]":
        return _placed({name: await m.save(folder_of(folder, name)) for name, m in self.models.items()})

    async def copy_for_checkpoint(self) -> None:
        for model in self.models.values():
            await model.copy_for_checkpoint()

    async def write_copy(self, folder: Folder) -> "list[FileRecord]":
        """Write the copies at the same time, while training continues."""
        writes = (model.write_copy(_of_model(folder, name)) for name, model in self.models.items())
        return _placed(dict(zip(self.models, await asyncio.gather(*writes), strict=True)))

    async def restore(self, folder: Folder) -> None:
        """Load all of them from a checkpoint. Raises RunError where one is not in it."""
        if isinstance(folder, Path) and (
            missing := [name for name in self.models if not folder_of(folder, name).is_dir()]
        ):
            raise RunError(
                f"{folder} holds no {' and no '.join(missing)}, as a run of another algorithm wrote it: "
                "resume with the algorithm it began with, or start a new run from an export of its weights"
            )
        for name, model in self.models.items():
            await model.restore(_of_model(folder, name))


def folder_of(checkpoint: Path, name: str) -> Path:
    """The folder of a model's files: for the policy the checkpoint itself, for others one of their name."""
    return checkpoint if name == "policy" else checkpoint / name


def _of_model(folder: Folder, name: str) -> Folder:
    if isinstance(folder, Path):
        return folder_of(folder, name)
    return {node: folder_of(path, name) for node, path in folder.items()}


def _folder_at(folder: Folder, worker: Worker) -> Path:
    if isinstance(folder, Path):
        return folder.absolute()
    if worker.home is None:  # all ranks are on the driver's node
        (only,) = folder.values()
        return only
    if worker.home.node not in folder:
        raise GroupEnded(f"{worker.group} rank {worker.rank} was on {worker.home.name}, which was replaced")
    return folder[worker.home.node]


def _placed(written: "Mapping[str, Sequence[FileRecord]]") -> "list[FileRecord]":
    return [
        record if name == "policy" else replace(record, path=f"{name}/{record.path}")
        for name, records in written.items()
        for record in records
    ]


@dataclass(frozen=True)
class EngineHandle:
    """An engine, or a policy rank that samples. Can be sent to other processes."""

    worker: Worker

    @property
    def name(self) -> str:
        return f"generation replica {self.worker.rank}"

    def as_replica(self) -> Replica:
        return Replica(self.name, self.generate, self.abort)

    async def generate(
        self, requests: list[types.GenerationRequest]
    ) -> AsyncGenerator[Sequence[types.Report], None]:
        """Reports of these requests as they come. Raises RequestRefused or ReplicaLost."""
        # In batches, since an item of a stream costs Ray about a millisecond.
        seconds = max(request.deadline_seconds for request in requests) + GRACE_SECONDS
        batches = self.worker.stream("generate_batches", requests, stage="generation", seconds=seconds)
        try:
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        except ClusterError as error:
            if isinstance(error, WorkerFailed) and error.kind == _REFUSED:
                raise types.RequestRefused(error.message) from error
            raise types.ReplicaLost(str(error)) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.worker.call("abort", request_ids, stage="abort", seconds=_ABORT_SECONDS)

    async def sleep(self, level: int, seconds: float) -> None:
        """Leave the devices: 1 keeps the weights in host memory, 2 keeps nothing."""
        await self.worker.call("sleep", level, stage="engines sleep", seconds=seconds)

    async def wake(self, tags: tuple[str, ...], seconds: float) -> None:
        """Take `weights`, `kv_cache` or, without tags, both back onto the devices."""
        await self.worker.call("wake", tags, stage="engines wake", seconds=seconds)


@dataclass(frozen=True)
class EnginesHandle:
    """All engines that are up: by rank the answer of each, or its error."""

    group: WorkerGroup

    async def health(self, seconds: float) -> dict[int, types.EngineHealth | ClusterError]:
        """State of the engines; as error what ended one."""
        return await self.group.ask("health", stage="health check", seconds=seconds)

    async def stats(self, seconds: float) -> dict[int, types.EngineStats | ClusterError]:
        return await self.group.ask("stats", stage="metrics", seconds=seconds)


@dataclass(frozen=True)
class EnvironmentActorsHandle:
    """The actors of one environment that are up."""

    group: WorkerGroup

    async def counts(self, seconds: float) -> "dict[int, SessionCounts | ClusterError]":
        """Sessions of each by rank, or its error."""
        return await self.group.ask("counts", stage="health check", seconds=seconds)


@dataclass(frozen=True)
class _WeightSide:
    """One side of the weight exchange. A failed call leaves the processes with the version they had."""

    group: WorkerGroup
    deadline_seconds: float

    async def _call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        options = {"seconds": self.deadline_seconds, **options}
        return await self.group.call(method, *args, stage="refit", ends_group=False, **options)


class PolicySenders(_WeightSide):
    async def describe(self) -> "Sequence[messages.SenderLayout]":
        return await self._call("sender.describe")

    async def prepare(self, parts: "Sequence[messages.Part]") -> None:
        await self._call("sender.prepare", shards=parts, axis="rank")

    async def send(self, session: "messages.RefitSession") -> "Sequence[messages.SendReport]":
        return await self._call("sender.send", session)


@dataclass(frozen=True)
class GenerationReceivers(_WeightSide):
    """All generation ranks (`ReceiverGroup`), numbered through the replicas, which may have several each."""

    _ranks: list[int] = field(default_factory=list)  # of each replica, after `describe`

    async def describe(self) -> "Sequence[messages.ReceiverLayout]":
        layouts: list[tuple[messages.ReceiverLayout, ...]] = await self._call("describe_weights")
        self._ranks[:] = map(len, layouts)
        return [layout for of_replica in layouts for layout in of_replica]

    async def prepare(self, parts: "Sequence[messages.Part]") -> None:
        left = iter(parts)
        of_replicas = [tuple(itertools.islice(left, count)) for count in self._ranks]
        await self._call("prepare_refit", shards=of_replicas, axis="rank")

    async def receive(self, session: "messages.RefitSession") -> "Sequence[messages.ReceiveReport]":
        reports: list[tuple[messages.ReceiveReport, ...]] = await self._call("receive_weights", session)
        return [report for of_replica in reports for report in of_replica]

    async def commit(self, version: int) -> None:
        await self._call("commit_weights", version)

    async def abandon(self) -> None:
        # An engine that hangs has mostly been waited for already, until the refit's own deadline.
        await self._call("abandon_refit", seconds=min(self.deadline_seconds, _ABANDON_SECONDS))


@dataclass(frozen=True)
class RouterHandle:
    """The routers of a group of endpoints (`Routers`)."""

    group: WorkerGroup

    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        return await self.group.call("router.take_metrics", stage="metrics", seconds=seconds)

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        return await self.group.call("router.lost_replicas", stage="health check", seconds=seconds)

    async def add(self, replica: Replica, seconds: float) -> None:
        await self.group.call("router.add", replica, stage="generation", seconds=seconds)

    async def remove(self, name: str, seconds: float) -> None:
        await self.group.call("router.remove", name, stage="generation", seconds=seconds)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        await self.group.call("router.give_up", causes, stage="generation", seconds=seconds)

    async def listen(self, seconds: float) -> "Listening":
        listening: list[Listening] = await self.group.call("listen", stage="start", seconds=seconds)
        return listening[0]


class RolloutHandle:
    """A rollout worker and its router, in its present process. Belongs to one event loop."""

    def __init__(self, worker: Worker, seconds: float) -> None:
        """`seconds` limits the wait for one answer; groups may take longer."""
        self.worker, self._seconds = worker, seconds
        self.spans = BusySpans()  # in which the worker had groups
        self.cause: str | None = None  # of its loss
        self._returns: asyncio.Future[bool] | None = None  # False if a lost one does not
        self._finished = False  # a group, since `take_progress`

    @property
    def is_up(self) -> bool:
        return self._returns is None

    async def run_groups(
        self, assignments: Sequence[GroupAssignment]
    ) -> AsyncIterator[GroupSummary | Dropped]:
        """Summaries as the groups end; they refer to the trajectories, which stay in the object store.

        A lost worker is waited for; one that does not answer in time is lost. Groups that are lost with its
        process are dropped.
        """
        left = {assignment.group for assignment in assignments}
        if self._returns is None or await asyncio.shield(self._returns):
            worker, call, new, node = self.worker, next(_calls), assignments, self.node
            try:
                with self.spans.busy():
                    while left:
                        # The worker answers in time even if no group has ended: some take many steps.
                        reference, outcomes = await worker.call_pair(
                            "run_more",
                            call,
                            new,
                            self._seconds,
                            stage="generation",
                            seconds=self._seconds + GRACE_SECONDS,
                            num_awaited=len(left),
                        )
                        self._finished, new = self._finished or bool(outcomes), ()
                        for outcome in outcomes:
                            left.remove(outcome.group)
                            dropped = isinstance(outcome, Dropped)
                            yield outcome if dropped else replace(outcome, reference=reference, node=node)
            except (WorkerDied, DeadlineExceeded) as error:
                if worker is self.worker:
                    self.set_lost(str(error))
            finally:
                if left:
                    worker.send("end_call", call, stage="generation")
        for group in sorted(left):
            yield Dropped(group, "lost")

    async def abort_stale(self, oldest: int) -> None:
        await self._abort("abort_stale", oldest)

    async def abort_groups(self, groups: Sequence[int]) -> None:
        await self._abort("abort_groups", groups)

    async def _abort(self, method: str, which: int | Sequence[int]) -> None:
        if self.is_up:
            with suppress(ClusterError):  # its groups are dropped when it is lost
                await self.worker.call(method, which, stage="generation", seconds=_ABORT_SECONDS)

    @property
    def node(self) -> str:
        """ID of its node, in a run over several."""
        return self.worker.home.node if self.worker.home is not None else ""

    async def write_part(self, folder: Path, part: "StepPart") -> None:
        await self.worker.call("write_part", folder, part, stage="recording", seconds=self._seconds)

    async def reset(self, replicas: Sequence[Replica], seconds: float) -> None:
        await self.worker.call("router.reset", replicas, stage="generation", seconds=seconds)

    async def set_actors(self, environment: str, actors: Sequence[Worker], seconds: float) -> None:
        await self.worker.call("set_actors", environment, actors, stage="generation", seconds=seconds)

    def take_progress(self) -> bool:
        """True if a group has ended since the last call."""
        finished, self._finished = self._finished, False
        return finished

    def set_lost(self, cause: str) -> None:
        self.cause = self.cause or cause
        if self._returns is None:
            self._returns = asyncio.get_running_loop().create_future()

    def set_up(self) -> None:
        returns, self._returns, self.cause = self._returns, None, None
        if returns is not None:
            returns.set_result(True)

    def close(self, error: Exception | None = None) -> None:
        """Drop the groups that wait for it, or raise the `error`: it does not return."""
        assert self._returns is not None, "it is up"
        if error is None:
            self._returns.set_result(False)
        else:
            self._returns.set_exception(error)
            self._returns.exception()  # retrieved, even if no group waits


@dataclass(frozen=True)
class RolloutsHandle:
    """All rollout workers that are up: by rank the answer of each, or its error."""

    group: WorkerGroup

    async def set_concurrency(self, limit: int) -> dict[int, PlacesUse | ClusterError]:
        """`limit`: of each worker."""
        seconds = _ABORT_SECONDS
        return await self.group.ask("set_concurrency", limit, stage="generation", seconds=seconds)

    async def set_actors(self, environment: str, actors: Sequence[Worker], seconds: float) -> None:
        await self.group.ask("set_actors", environment, actors, stage="generation", seconds=seconds)

    async def take_metrics(self, seconds: float) -> dict[int, RouterMetrics | ClusterError]:
        return await self.group.ask("router.take_metrics", stage="metrics", seconds=seconds)

    async def lost_replicas(self, seconds: float) -> dict[int, dict[str, str] | ClusterError]:
        return await self.group.ask("router.lost_replicas", stage="health check", seconds=seconds)

    async def add(self, replica: Replica, seconds: float) -> None:
        await self.group.ask("router.add", replica, stage="generation", seconds=seconds)

    async def remove(self, name: str, seconds: float) -> None:
        await self.group.ask("router.remove", name, stage="generation", seconds=seconds)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        await self.group.ask("router.give_up", causes, stage="generation", seconds=seconds)


@dataclass(frozen=True)
class KeeperHandle:
    """The `Keeper` of another node. Can be sent to other keepers."""

    worker: Worker
    deadline_seconds: float

    async def _call(self, method: str, *args: Any) -> Any:
        return await self.worker.call(method, *args, stage="checkpoint", seconds=self.deadline_seconds)

    async def begin(self, step: int, progress: str) -> Path:
        folder: Path = await self._call("begin", step, progress)
        return folder

    async def files(self, step: int) -> list[str]:
        names: list[str] = await self._call("files", step)
        return names

    async def read(self, file: str, start: int) -> bytes:
        piece: bytes = await self._call("read", file, start)
        return piece

    async def pull(self, folder: str, names: Sequence[str], peer: "KeeperHandle") -> "list[FileRecord]":
        records: list[FileRecord] = await self._call("pull", folder, names, peer)
        return records

    async def commit(self, step: int, metrics: Mapping[str, float], records: "Sequence[FileRecord]") -> None:
        await self._call("commit", step, metrics, records)

    async def keep_only(self, step: int) -> None:
        await self._call("keep_only", step)

    async def remove_after(self, step: int) -> None:
        await self._call("remove_after", step)

    async def steps(self) -> list[int]:
        steps: list[int] = await self._call("steps")
        return steps

    async def path(self, step: int) -> Path:
        path: Path = await self._call("path", step)
        return path

    async def intact(self, step: int) -> list[str]:
        names: list[str] = await self._call("intact", step)
        return names

    async def clear(self) -> None:
        await self._call("clear")
