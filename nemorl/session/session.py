"""All processes of a run: placed, started, connected, and ended together."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import ray

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import Placement, threads_per_worker
from nemorl.cluster.worker import Worker
from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError
from nemorl.generation.errors import NoReplicaLeft
from nemorl.observe.files import write_whole
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.dispatch import RunGroups
from nemorl.rollout.ray_worker import groups_of
from nemorl.weights.exchange import RefitStats, WeightExchange
from nemorl.weights.venue import TransportOptions

from .model_group import ModelGroup
from .models import ModelStarter, handles
from .pool import GenerationPool
from .refit import GenerationReceivers, PolicySenders
from .trained import TrainedModels

logger = logging.getLogger(__name__)

# What runs in the process of an engine.
HOSTS = {
    "torch": "nemorl.session.generation_host:GenerationHost",
    "openai": "nemorl.session.openai_host:OpenAIHost",
    "vllm": "nemorl.session.vllm_host:VllmHost",
    "trtllm": "nemorl.session.trtllm_host:TrtllmHost",
}
# TensorRT-LLM's workers hold a replica's GPUs, not its own process, which must see them nevertheless.
SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass
class Session:
    """The started processes. A part that the run does not need is not there."""

    policy: ModelGroup | None = None
    models: dict[str, ModelGroup] = field(default_factory=dict)  # by name; the policy is among them
    generation: WorkerGroup | None = None
    rollout: Sequence[RunGroups] = ()
    exchange: WeightExchange | None = None
    pool: GenerationPool | None = None
    version: int = 0  # of the weights that generation samples with; it loads the model's own as 0
    policy_samples: bool = False  # by itself, without engines
    engines_sleep: bool = False  # but while they sample

    @property
    def engines(self) -> GenerationPool:
        """The engines, of a session that has any."""
        assert self.pool is not None, "this session was started without engines"
        return self.pool

    @property
    def learner(self) -> ModelGroup:
        """The policy, of a session that has one."""
        assert self.policy is not None, "this session was started without a policy"
        return self.policy

    @property
    def trained(self) -> TrainedModels:
        """The models that learn, for checkpoints."""
        return TrainedModels({name: model for name, model in self.models.items() if model.trains})

    @property
    def models_share_devices(self) -> bool:
        """Whether another model lives where the policy does, so that they cannot work at the same time."""
        return sum(model.turns is not None for model in self.models.values()) > 1

    def model(self, name: str) -> ModelGroup:
        """A model of `nemorl.config.models.models_of` by its name, such as `critic`."""
        assert name in self.models, f"this session was started without a {name}"
        return self.models[name]

    async def hand_over(self, version: int) -> dict[str, float]:
        """Bring generation to the policy's weights, which are of `version`; figures of the refit, if any."""
        if self.policy_samples:
            self.version = version
        if self.exchange is None or version == self.version:
            return {}
        if self.policy is not None:
            await self.policy.come_back()
        async with self.engines.refitting():
            stats = await self._refit(self.exchange, self.engines, version)
            self.version = version
        return {
            "refit/gigabytes": stats.num_bytes / 1e9,
            "refit/gigabytes_per_second": stats.gigabytes_per_second,
        }

    async def _refit(self, exchange: WeightExchange, pool: GenerationPool, version: int) -> RefitStats:
        """A refit that a lost engine broke off is done again with the others."""
        while True:
            try:
                return await asyncio.to_thread(exchange.refit, version)
            except NemorlError as error:
                try:
                    lost = await pool.lost_in_refit()
                except NoReplicaLeft as nobody:  # maybe a consequence
                    nobody.add_note(f"The refit to version {version} ended with: {error}")
                    raise
                if not lost:
                    raise
                logger.warning("the refit to version %d begins anew: %s", version, error)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Inside, generation samples: engines, to which the policy may leave its devices, or the policy."""
        async with AsyncExitStack() as stack:
            if self.policy is not None:
                await self.policy.give_devices_away()
            if self.policy_samples:
                await stack.enter_async_context(self.learner.sampling(self.version))
            if self.pool is not None and self.engines_sleep:
                await stack.enter_async_context(self.pool.awake())
            yield

    async def generation_figures(self) -> dict[str, float]:
        """How the engines are; nothing of a session that samples nothing."""
        return await self.pool.figures() if self.pool is not None else {}

    def store(self, sequences: Sequence[Any]) -> Any:
        """A reference by which workers find these sequences, for as long as somebody holds it.

        A worker that needs one sequence reads the whole list, so store what is used together.
        """
        return ray.put(list(sequences))


@asynccontextmanager
async def open_session(
    experiment: Experiment, placement: Placement, *, policy: bool, sampling: bool
) -> AsyncIterator[Session]:
    """Start the parts that are asked for, each group as soon as it can; end them all when the block ends."""
    session = Session()
    async with AsyncExitStack() as stack:
        rendezvous = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemorl-policy-"))
        starter = _Starter(experiment, placement)
        session.policy_samples = sampling and not experiment.generation.has_engines
        models, engines = await asyncio.gather(
            starter.models(Path(rendezvous), training=policy)
            if policy or session.policy_samples
            else _nothing(),
            starter.generation() if sampling and not session.policy_samples else _nothing(),
        )
        if models is not None:
            for model in models.values():
                stack.push_async_exit(_end(model))
            session.models = handles(experiment, models)
            session.policy = session.models["policy"]
        if engines is not None:
            session.generation = engines
            stack.push_async_exit(_end(engines))
            session.engines_sleep = experiment.generation.shares_devices
            session.pool = pool = GenerationPool(engines, experiment.cluster.deadlines)
            stack.push_async_callback(pool.close)
            if experiment.generation.endpoint is not None:
                endpoint = await starter.endpoint(engines.workers)
                stack.push_async_exit(_end(endpoint))
                pool.serve(endpoint)
                await _tell_endpoint(endpoint, experiment)
            rollout = await starter.rollout(engines.workers)
            stack.push_async_exit(_end(rollout))
            pool.serve(rollout)
            pool.start_watch()
            session.rollout = starter.run_groups(rollout)
        elif session.policy_samples:
            rollout = await starter.rollout(session.learner.samplers)
            stack.push_async_exit(_end(rollout))
            session.rollout = starter.run_groups(rollout)
        takes_weights = experiment.generation.takes_weights
        if session.policy is not None and session.generation is not None and takes_weights:
            session.exchange = starter.exchange(session.policy.group, session.generation)
            pool.on_change(session.exchange.layout_changed)
        yield session


@asynccontextmanager
async def open_engines(experiment: Experiment, placement: Placement) -> AsyncIterator[GenerationPool]:
    """Start the engines alone, and end them when the block ends."""
    async with AsyncExitStack() as stack:
        engines = await _Starter(experiment, placement).generation()
        stack.push_async_exit(_end(engines))
        pool = GenerationPool(engines, experiment.cluster.deadlines)
        stack.push_async_callback(pool.close)
        pool.start_watch()
        yield pool


async def _tell_endpoint(endpoint: WorkerGroup, experiment: Experiment) -> None:
    """Let it listen, and say where. A key that was made for this run stands in its folder and in no log."""
    deadline = experiment.cluster.deadlines.start
    (at,) = await endpoint.call_async("listen", stage="start", deadline_seconds=deadline)
    if not at.generated:
        logger.warning("the engines answer at %s", at.url)
        return
    file = RunPaths(experiment.run_dir).endpoint_key
    write_whole(file, at.api_key + "\n", private=True)
    logger.warning("the engines answer at %s; the key is in %s", at.url, file)


def _end(group: WorkerGroup) -> Callable[..., Coroutine[Any, Any, None]]:
    """What ends a group when the session ends, with the error that ends it, if any."""

    async def end(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await group.shutdown_async(after=error)

    return end


async def _nothing() -> None:
    """In place of a group that is not wanted."""


@dataclass(frozen=True)
class _Starter:
    """How each group of an experiment is started."""

    experiment: Experiment
    placement: Placement

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.experiment.cluster.gpus_per_node else "cpu"

    async def models(self, rendezvous: Path, *, training: bool) -> dict[str, WorkerGroup]:
        return await ModelStarter(self.experiment, self.device, self._start).start(
            rendezvous, training=training
        )

    async def generation(self) -> WorkerGroup:
        config, policy, cluster = self.experiment.generation, self.experiment.policy, self.experiment.cluster
        threads = threads_per_worker(config.threads, config.replicas, cluster.num_nodes)
        shared: dict[str, Any] = {
            "model_path": policy.model_path.absolute(),
            "config": config,
            "device": self.device,
            "threads": threads,
            "tokenizer_path": (policy.tokenizer.path or policy.model_path).absolute(),
            "max_sequence_length": policy.max_sequence_length,
            "precision": policy.precision,
            "commit_seconds": cluster.deadlines.refit,
        }
        if config.backend == "vllm":
            shared["return_experts"] = policy.moe.router_replay
            shared["lora"] = policy.lora if config.adapters == "separate" else None
        ranks: list[dict[str, Any]] = [{**shared, "rank": rank} for rank in range(config.replicas)]
        options: dict[str, Any] = {"threads": threads, "concurrent": True}
        if config.backend == "trtllm":
            options["environment"] = SEES_ALL_GPUS
            for kwargs, bundle in zip(ranks, self.placement.bundles["generation"], strict=True):
                kwargs["bundle"] = bundle
        return await self._start("generation", HOSTS[config.backend], ranks, **options)

    async def endpoint(self, engines: Sequence[Worker]) -> WorkerGroup:
        return await self._start(
            "endpoint",
            "nemorl.session.serving:EndpointHost",
            [{"experiment": self.experiment, "engines": list(engines)}],
            threads=1,
            concurrent=True,
        )

    async def rollout(self, engines: Sequence[Worker]) -> WorkerGroup:
        count = self.experiment.cluster.rollout_workers
        return await self._start(
            "rollout",
            "nemorl.rollout.ray_worker:RayRolloutWorker",
            [{"experiment": self.experiment, "engines": list(engines)}] * count,
            threads=1,
            concurrent=True,
        )

    def run_groups(self, rollout: WorkerGroup) -> list[RunGroups]:
        """Its workers as the collector calls them."""
        seconds = self.experiment.cluster.deadlines.generation
        return [groups_of(worker, seconds) for worker in rollout.workers]

    def exchange(self, policy: WorkerGroup, generation: WorkerGroup) -> WeightExchange:
        """The way from the one to the other."""
        # The groups' own deadline comes later, so that the rank that waits can say for whom.
        seconds = self.experiment.cluster.deadlines.refit
        return WeightExchange(
            PolicySenders(policy, seconds + 10),
            GenerationReceivers(generation, seconds + 10),
            self.experiment.generation.bucket_megabytes * 2**20,
            seconds,
            TransportOptions(
                self.experiment.generation.transport,
                self.experiment.run_dir / "weights",
                self.experiment.generation.delta,
                self.experiment.generation.check_one_in or (1 if self.device == "cpu" else 16),
                share_gpus=self.device == "cuda" and self.experiment.generation.shares_devices,
                host=ray.util.get_node_ip_address(),
            ),
        )

    async def _start(
        self, name: str, target: str, kwargs: Sequence[dict[str, Any]], **options: Any
    ) -> WorkerGroup:
        return await WorkerGroup.start_async(
            name,
            target,
            kwargs,
            placement=self.placement,
            run_dir=self.experiment.run_dir,
            deadline_seconds=self.experiment.cluster.deadlines.start,
            **options,
        )
