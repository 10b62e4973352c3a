"""The processes of a run: started, connected, and ended together."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import ray

from nemorl.cluster.errors import WorkerDied
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.placement import Placement
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, models_of
from nemorl.config.generation import EndpointConfig
from nemorl.errors import NemorlError
from nemorl.generation.types import NoReplicaLeft
from nemorl.observe.files import write_atomically
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.collector import RunGroups
from nemorl.serve.app import answering
from nemorl.weights.channel import TransportOptions
from nemorl.weights.exchange import RefitStats, WeightExchange
from nemorl.weights.process_group import served_store

from .devices import DeviceScheduler, share_policy_devices
from .handles import (
    EngineHandle,
    GenerationReceivers,
    ModelHandle,
    PolicySenders,
    RolloutHandle,
    RouterHandle,
    TrainedModels,
)
from .scoring import RewardScorer, Scoring, reporting_failures, reward_routes, scored_by_url
from .supervisor import ReplicaSupervisor

# Of a process whose workers hold its GPUs, which it must see nevertheless.
SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True)
class Starter:
    """How each group of an experiment is started."""

    experiment: Experiment
    placement: Placement

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where models and engines compute."""
        return "cuda" if self.experiment.cluster.gpus_per_node else "cpu"

    def trained_or_read(self, *, training: bool) -> list[ModelSpec]:
        """The models that `models` starts: without training the policy alone."""
        models = [model for model in models_of(self.experiment) if not model.scores]
        return models if training else models[:1]

    @asynccontextmanager
    async def models(self, *, training: bool) -> AsyncIterator[dict[str, WorkerGroup]]:
        """The policy and, for training, the other models, by name; their rendezvous lasts until the end."""
        models = self.trained_or_read(training=training)
        with serve_rendezvous(self.placement.driver_address(*(m.name for m in models))) as rendezvous:
            at_once = [model.name for model in models if not model.on_policy_devices]
            threads = self.placement.threads(self.experiment.cluster.policy_threads, *at_once)
            groups = await asyncio.gather(*(self._start_model(m, rendezvous, threads) for m in models))
            yield {model.name: group for model, group in zip(models, groups, strict=True)}

    @asynccontextmanager
    async def model(self, model: ModelSpec) -> AsyncIterator[WorkerGroup]:
        """One model; its rendezvous lasts until the end."""
        threads = self.placement.threads(self.experiment.cluster.policy_threads, model.name)
        with serve_rendezvous(self.placement.driver_address(model.name)) as rendezvous:
            yield await self._start_model(model, rendezvous, threads)

    async def _start_model(self, model: ModelSpec, rendezvous: str, threads: int) -> WorkerGroup:
        algorithm, deadlines = self.experiment.algorithm, self.experiment.cluster.deadlines
        shared: dict[str, Any] = {
            "config": model.config,
            "world_size": model.config.layout.world_size,
            "rendezvous": f"tcp://{rendezvous}/{model.name}",
            "device": self.device,
            "threads": threads,
            "temperature": self.experiment.generation.sampling.temperature if algorithm.online else 1.0,
            "seed": self.experiment.seed,
            "keep_reference": False,
            "deadline_seconds": max(deadlines.training, deadlines.checkpoint, deadlines.refit),
            "trains": model.trains,
            "load": True,
        }
        target = "nemorl.megatron.worker:PolicyWorker"
        if model.name == "policy":
            shared["keep_reference"] = algorithm.keeps_reference and self.experiment.reference is None
            if not self.experiment.generation.has_engines:
                target = "nemorl.generation.megatron_engine:SamplingPolicyWorker"
                tokenizer = model.config.tokenizer.path or model.config.model_path
                shared["generation"] = self.experiment.generation
                shared["tokenizer_path"] = tokenizer.absolute()
        kwargs = [{**shared, "rank": rank} for rank in range(model.config.layout.world_size)]
        return await self._start(
            model.name, target, kwargs, threads=threads, mesh=Mesh.of(model.config.layout)
        )

    async def generation(self, gpus: Sequence[tuple[str, ...]] = ()) -> WorkerGroup:
        """The engines; `gpus` are those of the policy's ranks whose devices they share, if any.

        An engine sees those of its own ranks first, and the others on its node, from which weights come too.
        """
        config, policy, cluster = self.experiment.generation, self.experiment.policy, self.experiment.cluster
        threads = self.placement.threads(config.threads, "generation")
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
        shared |= config.host_options(policy)
        ranks: list[dict[str, Any]] = [{**shared, "rank": rank} for rank in range(config.replicas)]
        options: dict[str, Any] = {"threads": threads, "concurrent": True}
        if config.workers_hold_gpus:
            options["environment"] = SEES_ALL_GPUS
            for kwargs, bundle in zip(ranks, self.placement.bundles["generation"], strict=True):
                kwargs["bundle"] = bundle
        if gpus:
            for kwargs, shared_with in zip(ranks, self.placement.host_ranks("generation"), strict=True):
                here = self.placement.on_node_of("generation", kwargs["rank"], "policy")
                others = [rank for rank in here if rank not in shared_with]
                kwargs["gpus"] = tuple(name for rank in (*shared_with, *others) for name in gpus[rank])
        return await self._start("generation", config.host_class, ranks, **options)

    async def endpoint(self, engines: Sequence[EngineHandle]) -> WorkerGroup:
        """The endpoint over these engines."""
        return await self._start(
            "endpoint",
            "nemorl.session.endpoints:EndpointHost",
            [{"experiment": self.experiment, "engines": [engine.as_replica() for engine in engines]}],
            threads=1,
            concurrent=True,
        )

    async def rollout(self, engines: Sequence[EngineHandle], scoring: Scoring) -> WorkerGroup:
        """The rollout workers over these engines, with the reward models of `scoring`."""
        experiment = self.experiment.model_copy(update={"rewards": scoring.rewards})
        count = self.experiment.cluster.rollout_workers
        return await self._start(
            "rollout",
            "nemorl.rollout.worker:RayRolloutWorker",
            [{"experiment": experiment, "engines": [engine.as_replica() for engine in engines]}] * count,
            threads=1,
            concurrent=True,
            environment=scoring.environment,
        )

    def run_groups(self, rollout: WorkerGroup) -> list[RunGroups]:
        """The rollout workers as the collector calls them."""
        seconds = self.experiment.cluster.deadlines.generation
        return [RolloutHandle(worker, seconds).run_groups for worker in rollout.workers]

    def exchange(self, policy: WorkerGroup, generation: WorkerGroup) -> WeightExchange:
        """The weight exchange from the one to the other."""
        # The groups' own deadline comes later, so that the rank that waits can say for whom.
        seconds = self.experiment.cluster.deadlines.refit
        return WeightExchange(
            PolicySenders(policy, seconds + 10),
            GenerationReceivers(generation, seconds + 10),
            self.experiment.generation.bucket_megabytes * 2**20,
            seconds,
            TransportOptions(
                self.experiment.generation.transport,
                self.experiment.run_dir.absolute() / "weights",
                self.experiment.generation.delta,
                self.experiment.generation.check_one_in or (1 if self.device == "cpu" else 16),
                share_gpus=self.device == "cuda" and self.experiment.generation.shares_devices,
                host=ray.util.get_node_ip_address(),
            ),
        )

    async def _start(
        self, name: str, target: str, kwargs: Sequence[dict[str, Any]], **options: Any
    ) -> WorkerGroup:
        return await WorkerGroup.start(
            name,
            target,
            kwargs,
            placement=self.placement,
            run_dir=self.experiment.run_dir,
            deadline_seconds=self.experiment.cluster.deadlines.start,
            **options,
        )


logger = logging.getLogger(__name__)


@dataclass
class Session:
    """The started processes. Parts that the run does not need are missing."""

    policy: ModelHandle | None = None
    models: dict[str, ModelHandle] = field(default_factory=dict)  # by name; the policy is among them
    rollout: Sequence[RunGroups] = ()
    exchange: WeightExchange | None = None
    replicas: ReplicaSupervisor | None = None  # of engines
    version: int = 0  # of the weights that generation samples with; 0: those of the model's folder
    policy_samples: bool = False  # without engines
    engines_sleep: bool = False  # while they do not sample
    nodes: Mapping[str, str] = field(default_factory=dict)  # of a run over several: the processes on each

    @property
    def engines(self) -> ReplicaSupervisor:
        """The engines, of a session that has any."""
        assert self.replicas is not None, "this session was started without engines"
        return self.replicas

    @property
    def learner(self) -> ModelHandle:
        """The policy, of a session that has one."""
        assert self.policy is not None, "this session was started without a policy"
        return self.policy

    @property
    def trained(self) -> TrainedModels:
        """The models that learn, for checkpoints."""
        return TrainedModels({name: model for name, model in self.models.items() if model.trains})

    @property
    def models_share_devices(self) -> bool:
        """True if another model is on the policy's devices, so that they cannot compute at the same time."""
        return sum(model.devices is not None for model in self.models.values()) > 1

    def model(self, name: str) -> ModelHandle:
        """A model of `nemorl.config.facts.models_of` by its name, such as `critic`."""
        assert name in self.models, f"this session was started without a {name}"
        return self.models[name]

    async def update_weights(self, version: int) -> dict[str, float]:
        """Bring generation to the policy's weights, which are of `version`; metrics of the refit, if any."""
        if self.policy_samples:
            self.version = version
        if self.exchange is None or version == self.version:
            return {}
        if self.policy is not None:
            await self.policy.onload()
        async with self.engines.refitting():
            stats = await self._refit(self.exchange, self.engines, version)
            self.version = version
        return {
            "refit/gigabytes": stats.num_bytes / 1e9,
            "refit/gigabytes_per_second": stats.gigabytes_per_second,
        }

    async def _refit(self, exchange: WeightExchange, replicas: ReplicaSupervisor, version: int) -> RefitStats:
        """Refit; after the loss of an engine, again with the others."""
        while True:
            try:
                return await exchange.refit(version)
            except NemorlError as error:
                try:
                    lost = await replicas.lost_in_refit()
                except NoReplicaLeft as exhausted:  # maybe a consequence
                    if not (isinstance(error, WorkerDied) and error.is_reported_in(exhausted)):
                        exhausted.add_note(f"The refit to version {version} ended with: {error}")
                    raise
                if not lost:
                    raise
                logger.warning("retrying weight update to version %d: %s", version, error)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Inside, generation samples: engines, to which the policy may leave its devices, or the policy."""
        async with AsyncExitStack() as stack:
            if self.policy is not None:
                await self.policy.release_devices()
            if self.policy_samples:
                await stack.enter_async_context(self.learner.sampling(self.version))
            if self.replicas is not None and self.engines_sleep:
                await stack.enter_async_context(self.replicas.awake())
            yield

    async def generation_metrics(self) -> dict[str, float]:
        """State of the engines; empty for a session without engines."""
        return await self.replicas.metrics() if self.replicas is not None else {}

    def store(self, sequences: Sequence[Any]) -> Any:
        """A reference by which workers find these sequences, for as long as a process holds it.

        A worker that needs one sequence reads the whole list, so store what is used together.
        """
        return ray.put(list(sequences))


@asynccontextmanager
async def open_session(
    experiment: Experiment, placement: Placement, *, policy: bool, sampling: bool
) -> AsyncIterator[Session]:
    """Start the requested parts, each group as early as possible; end all of them when the block ends."""
    async with AsyncExitStack() as stack:
        opening = _Opening(experiment, Starter(experiment, placement), stack)
        session = opening.session
        session.nodes = placement.described
        session.policy_samples = sampling and not experiment.generation.has_engines
        learns, asks = policy or session.policy_samples, sampling and not session.policy_samples
        if learns and asks and experiment.generation.shares_devices:
            await opening.models(training=policy)
            await opening.engines_on_policy_devices(session.learner)
        else:
            await asyncio.gather(
                opening.models(training=policy) if learns else _nothing(),
                opening.engines() if asks else _nothing(),
            )
        if asks:
            await opening.callers(session.engines)
        elif session.policy_samples:
            await opening.rollout(session.learner.samplers)
        takes_weights = experiment.generation.takes_weights
        if session.policy is not None and session.replicas is not None and takes_weights:
            session.exchange = opening.starter.exchange(session.policy.group, session.replicas.group)
            session.replicas.on_change(session.exchange.layout_changed)
        yield session


@dataclass(frozen=True)
class _Opening:
    """A session while its groups are started, which end with the stack."""

    experiment: Experiment
    starter: Starter
    stack: AsyncExitStack
    session: Session = field(default_factory=Session)

    async def models(self, *, training: bool) -> None:
        """The policy and, for training, the auxiliary models."""
        groups = await self.stack.enter_async_context(self.starter.models(training=training))
        for group in groups.values():
            self._ends(group)
        deadlines = self.experiment.cluster.deadlines
        self.session.models = {
            model.name: ModelHandle(groups[model.name], model.config, deadlines, trains=model.trains)
            for model in self.starter.trained_or_read(training=training)
        }
        share_policy_devices(self.experiment, self.session.models)
        self.session.policy = self.session.models["policy"]

    async def engines(self, gpus: Sequence[tuple[str, ...]] = ()) -> None:
        """The engines; `gpus` are those of the policy ranks whose devices they share."""
        shares = self.experiment.generation.shares_devices
        group = self._ends(await self.starter.generation(gpus))
        replicas = ReplicaSupervisor(group, self.experiment.cluster.deadlines, shares_devices=shares)
        self.stack.push_async_callback(replicas.close)
        self.session.replicas, self.session.engines_sleep = replicas, shares

    async def engines_on_policy_devices(self, policy: ModelHandle) -> None:
        """Engines on the policy's devices, which models may take back when they sleep."""
        gpus = policy.group.gpus if self.starter.device == "cuda" else []
        await policy.release_devices()
        await self.engines(gpus)
        await self.session.engines.sleep()

    async def callers(self, replicas: ReplicaSupervisor) -> None:
        """The processes that send requests to the engines: the endpoint, if any, and the rollout workers."""
        if self.experiment.generation.endpoint is not None:
            endpoint = RouterHandle(self._ends(await self.starter.endpoint(replicas.engines)))
            replicas.connect(endpoint)
            await _open_endpoint(endpoint, self.experiment)
        replicas.connect(RouterHandle(await self.rollout(replicas.engines)))
        replicas.start_watch()

    async def reward_models(self) -> Scoring:
        """Groups of reward models, each behind an endpoint of this process."""
        models = [model for model in models_of(self.experiment) if model.scores]
        groups = await asyncio.gather(
            *(self.stack.enter_async_context(self.starter.model(model)) for model in models)
        )
        address = self.starter.placement.driver_address("rollout")
        endpoint, deadlines = EndpointConfig(port=0), self.experiment.cluster.deadlines
        chat, listening = self.experiment.data.chat, {}
        for model, group in zip(models, groups, strict=True):
            handle = ModelHandle(self._ends(group), model.config, deadlines, trains=False)
            devices = self._devices_of(handle) if model.on_policy_devices else None
            scorer = RewardScorer(handle, model.config.layout.fewest_units, devices)
            routes = reward_routes(model.config, endpoint, chat=chat, score=reporting_failures(scorer))
            at = await self.stack.enter_async_context(answering(endpoint, routes, address))
            listening[model.name] = at
        return scored_by_url(self.experiment.rewards, listening, endpoint)

    def _devices_of(self, reward_model: ModelHandle) -> DeviceScheduler | None:
        """The scheduler of the policy's devices, which it joins; without a policy none is needed."""
        devices = self.session.policy.devices if self.session.policy is not None else None
        if devices is not None:
            devices.join(reward_model)
        return devices

    async def rollout(self, samplers: Sequence[EngineHandle]) -> WorkerGroup:
        """The rollout workers."""
        group = self._ends(await self.starter.rollout(samplers, await self.reward_models()))
        self.session.rollout = self.starter.run_groups(group)
        return group

    def _ends(self, group: WorkerGroup) -> WorkerGroup:
        """The group, which ends with the session, by the error that ends it, if any."""

        async def end(
            kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            await group.shutdown(after=error)

        self.stack.push_async_exit(end)
        return group


@asynccontextmanager
async def open_engines(experiment: Experiment, placement: Placement) -> AsyncIterator[ReplicaSupervisor]:
    """Start the engines alone, and end them when the block ends."""
    async with AsyncExitStack() as stack:
        opening = _Opening(experiment, Starter(experiment, placement), stack)
        await opening.engines()
        replicas = opening.session.engines
        replicas.start_watch()
        yield replicas


async def _open_endpoint(endpoint: RouterHandle, experiment: Experiment) -> None:
    """Start the endpoint and log its address. A key generated for this run is in its folder and in no log."""
    at = await endpoint.listen(experiment.cluster.deadlines.start)
    if not at.generated:
        logger.warning("the engines answer at %s", at.url)
        return
    file = RunPaths(experiment.run_dir).endpoint_key
    write_atomically(file, at.api_key + "\n", private=True)
    logger.warning("the engines answer at %s; the key is in %s", at.url, file)


@contextmanager
def serve_rendezvous(host: str) -> Iterator[str]:
    """host:port of a store that this process serves while the block runs, at an address of this machine."""
    _store, address = served_store(host)
    yield address


async def _nothing() -> None:
    """Replaces the start of a group that is not started."""
