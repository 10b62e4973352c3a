"""The processes of a run: started, connected, and ended together.

Starter ─▶ policy and other models ─┬─ weights ─▶ engines ◀─ rollout workers, endpoint
                                    └─ reward models ◀─ HTTP ─ rollout workers
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from nemorl.cluster.errors import ClusterError, RelayLost, WorkerDied
from nemorl.cluster.group import Mesh, WorkerGroup
from nemorl.cluster.nodes import Node
from nemorl.cluster.placement import ExtraRanks, Placement, available_cores, worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.cluster.worker import Span
from nemorl.config.environment import RewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, environment_actors, models_of
from nemorl.config.generation import EndpointConfig
from nemorl.data.examples import calibration_prompts
from nemorl.errors import NemorlError, RunError
from nemorl.generation.router import Replica
from nemorl.generation.types import EngineOptions, NoReplicaLeft
from nemorl.observe.files import write_atomically
from nemorl.observe.run_folder import RunPaths
from nemorl.observe.timeline import Work
from nemorl.rollout.concurrency import ConcurrencyControl
from nemorl.rollout.versions import UNBROKEN, Lineage
from nemorl.serve.app import answering
from nemorl.weights.exchange import RefitStats, TransportOptions, WeightExchange
from nemorl.weights.process_group import served_store

from . import handles
from .scoring import RewardScorer, reporting_failures, reward_by_url, reward_routes
from .stalls import StallReporter
from .supervisor import EnvironmentSupervisor, ReplicaSupervisor, RolloutSupervisor

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_SENT = -1  # a version that no weights have, so that the first update is sent


@dataclass
class Session:
    """The started processes. Parts that the run does not need are missing."""

    models: dict[str, handles.ModelHandle] = field(default_factory=dict)  # by name; the policy is among them
    groups: dict[str, WorkerGroup] = field(default_factory=dict)  # of all processes, by name
    rollouts: RolloutSupervisor | None = None
    environments: Sequence[EnvironmentSupervisor] = ()  # that run in actors
    exchange: WeightExchange | None = None
    replicas: ReplicaSupervisor | None = None  # of engines
    concurrency: ConcurrencyControl | None = None
    version: int = 0  # of the weights that generation samples with; 0: those of the model's folder
    lineage: Lineage = UNBROKEN  # versions of the policy's weights
    policy_samples: bool = False  # without engines
    # Held while engines must keep the version they have; waiting updates come in their order.
    pinned: asyncio.Lock = field(default_factory=asyncio.Lock)
    starter: "Starter | None" = None  # for processes that are started later
    stalls: StallReporter | None = None

    @property
    def learner(self) -> handles.ModelHandle:
        return self.model("policy")

    @property
    def rollout(self) -> Sequence[handles.RolloutHandle]:
        """The rollout workers; a list that changes as they come and go."""
        return self.rollouts.handles if self.rollouts is not None else ()

    @property
    def starved(self) -> asyncio.Event:
        """Set while no engine is up and those that return require weights: what is pinned is lost."""
        return self.replicas.starved if self.replicas is not None else asyncio.Event()

    @property
    def trained(self) -> handles.TrainedModels:
        return handles.TrainedModels({name: model for name, model in self.models.items() if model.trains})

    @property
    def trained_nodes(self) -> tuple[Node, ...]:
        """The nodes on which the models that train have their ranks."""
        assert self.starter is not None, "a session that was not opened has no nodes"
        placed = self.starter.placement.nodes
        of_ranks = [node for name in self.trained.models for node in placed[name]]
        return tuple({node.id: node for node in of_ranks}.values())

    @property
    def nodes(self) -> dict[str, str]:
        """The processes on each node; empty in a run on the driver's node alone."""
        assert self.starter is not None, "a session that was not opened has no nodes"
        return self.starter.placement.described

    @property
    def driver_node(self) -> str:
        assert self.starter is not None, "a session that was not opened has no nodes"
        return self.starter.placement.driver

    async def start_keepers(self, nodes: Sequence[Node], memory_dir: Path) -> list[handles.KeeperHandle]:
        """A process on each of these nodes that keeps checkpoints in memory."""
        assert self.starter is not None, "a session that was not opened starts nothing"
        return await self.starter.keepers(nodes, memory_dir)

    def model(self, name: str) -> handles.ModelHandle:
        assert name in self.models, f"this session was started without a {name}"
        return self.models[name]

    async def run_models(self, work: Sequence[tuple[str, Callable[[], Awaitable[T]]]]) -> list[T]:
        """Run work of models, given by name: at the same time, or in sequence where they share devices.

        The first failure cancels what is left.
        """
        results: dict[int, T] = {}
        by_devices: dict[int, list[int]] = defaultdict(list)
        for number, (name, _) in enumerate(work):
            by_devices[id(self.model(name).devices)].append(number)

        async def in_sequence(numbers: list[int]) -> None:
            for number in numbers:
                results[number] = await work[number][1]()

        running = [asyncio.ensure_future(in_sequence(numbers)) for numbers in by_devices.values()]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [results[number] for number in range(len(work))]

    async def run_and_take(
        self,
        work: Sequence[tuple[str, Callable[[], Awaitable[T]]]],
        take: Callable[[Sequence[T]], Awaitable[None]],
    ) -> None:
        """`take` results of `run_models` that stay in the processes of models until the policy has them.

        If one of those that do not train is lost in between, its work is done again.
        """
        results = await self.run_models(work)
        while True:
            try:
                return await take(results)
            except ClusterError:
                frozen = [number for number, (name, _) in enumerate(work) if not self.model(name).trains]
                lost = [number for number in frozen if await self.model(work[number][0]).lost_one()]
                if not lost:
                    raise
            for number, result in zip(lost, await self.run_models([work[n] for n in lost]), strict=True):
                results[number] = result

    def take_work(self, now: float) -> dict[str, Work]:
        """When the processes worked since the last call, by kind: all teachers are one.

        What rollout workers request of engines is missing here: `generation_metrics` has their idle share.
        """
        spans: dict[str, list[list[Span]]] = defaultdict(list)
        for name, group in self.groups.items():
            if name.partition("_")[0] not in ("rollout", "endpoint", "keeper", "environment"):
                spans[name.partition("_")[0]].append(group.spans.take(now))
        if self.rollout:
            spans["rollout"] = [worker.spans.take(now) for worker in self.rollout]
        return {
            kind: Work(of_kind, is_awaited=kind not in ("reward", "rollout"), has_all=kind != "generation")
            for kind, of_kind in spans.items()
        }

    async def update_weights(self, step: int) -> dict[str, float]:
        """Give the policy's weights, of after `step`, to the engines that are left; metrics of the refit."""
        version = self.lineage.version(step)
        if self.policy_samples:
            self.version = version
        if self.exchange is None or self.replicas is None or version == self.version:
            return {}
        if "policy" in self.models:
            await self.learner.onload()
        async with self.pinned:
            stats = await self._send_weights(self.exchange, self.replicas, version)
            self.version = version
        return {} if stats is None else stats.metrics

    async def _send_weights(
        self, exchange: WeightExchange, replicas: ReplicaSupervisor, version: int
    ) -> RefitStats | None:
        """None if no engine is up: those that return get the weights while they are waited for."""
        stats: RefitStats | None = None
        async with replicas.refitting():
            while stats is None and replicas.engines:
                try:
                    stats = await exchange.refit(version)
                except NemorlError as error:
                    try:
                        lost = await replicas.lost_in_refit()
                    except NoReplicaLeft as exhausted:  # maybe a consequence
                        if not (isinstance(error, WorkerDied) and error.is_reported_in(exhausted)):
                            exhausted.add_note(f"The refit to version {version} ended with: {error}")
                        raise
                    if not lost and not isinstance(error, RelayLost):
                        raise
                    logger.warning("retrying weight update to version %d: %s", version, error)
        return stats

    @asynccontextmanager
    async def resupplying(self) -> AsyncIterator[None]:
        """Inside, where the policy does not compute, engines that return while none is up get its weights.

        Cancels what is inside and raises the error if that fails: sampling would wait in vain.
        """
        if self.exchange is None or self.replicas is None:
            yield
            return
        exchange, replicas, sending = self.exchange, self.replicas, asyncio.Lock()
        inside, failures = asyncio.current_task(), list[NemorlError]()
        assert inside is not None, "only a task can be cancelled"

        async def resend() -> None:
            while True:
                await replicas.starved.wait()
                async with sending:
                    try:
                        if replicas.shares_devices:
                            await replicas.sleep()
                        await self.learner.onload()
                        await self._send_weights(exchange, replicas, self.version)
                        await self.learner.release_devices()
                        if replicas.shares_devices:
                            await replicas.wake()
                    except NemorlError as error:
                        failures.append(error)
                        inside.cancel()
                        return

        task = asyncio.create_task(resend())
        try:
            try:
                yield
            finally:
                async with sending:  # an update that has begun is completed
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        except asyncio.CancelledError:
            if failures and inside.uncancel() == 0:  # no one else has cancelled it
                raise failures[0] from None
            raise

    async def lost_models(self) -> list[str]:
        """Names of the models of which a process has died or does not respond."""
        lost = await asyncio.gather(*(model.lost_one() for model in self.models.values()))
        return [name for name, has_lost in zip(self.models, lost, strict=True) if has_lost]

    @property
    def num_model_restarts(self) -> int:
        """Since the session was opened, with those of reward models."""
        return sum(group.num_restarts for group in self.groups.values())

    def lost_node(self, lost: Sequence[str]) -> bool:
        """True if a node of one of these models is lost."""
        return any(self.model(name).has_lost_node for name in lost)

    async def await_places(self, lost: Sequence[str]) -> None:
        """Wait until these models, and all that train, have places on nodes that are not lost.

        Raises `NodeNotReplaced`.
        """
        waits = (model.await_places() for model in self._restarted_with(lost))
        for result in await asyncio.gather(*waits, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _restarted_with(self, lost: Sequence[str]) -> list[handles.ModelHandle]:
        return [model for name, model in self.models.items() if name in lost or model.trains]

    async def restart_models(self, lost: Sequence[str]) -> None:
        """Start new processes for these models and for all that train, with the weights of their folders."""
        if self.replicas is not None and self.replicas.shares_devices:
            await self.replicas.sleep()
        restarted = self._restarted_with(lost)
        for model in self.models.values():
            if model not in restarted:
                await model.offload()
        # All of them, before any error: what starts late would be in the places of another attempt.
        results = await asyncio.gather(*(model.restart() for model in restarted), return_exceptions=True)
        if self.exchange is not None:
            self.exchange.layout_changed()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Inside, generation samples: engines, to which the policy may leave its devices, or the policy."""
        async with AsyncExitStack() as stack:
            if "policy" in self.models:
                await self.learner.release_devices()
            if self.policy_samples:
                await stack.enter_async_context(self.learner.sampling(self.version))
            if self.replicas is not None:
                await stack.enter_async_context(self.replicas.awake())
                await stack.enter_async_context(self.resupplying())
            yield

    def node_metrics(self) -> dict[str, float]:
        """Recorded once a node was lost: their number, and the ranks that each model that trains has now."""
        lost = self.starter.placement.lost if self.starter is not None else ()
        trained = self.trained.models.items()
        ranks = {f"nodes/{name}_ranks": float(model.group.mesh.world_size) for name, model in trained}
        return {"nodes/lost": float(len(lost)), **ranks} if lost else {}

    async def generation_metrics(self) -> dict[str, float]:
        metrics = self.rollouts.metrics() if self.rollouts is not None else {}
        for environment in self.environments:
            for name, value in environment.metrics().items():
                metrics[name] = metrics.get(name, 0.0) + value
        metrics |= await self.replicas.take_metrics() if self.replicas is not None else {}
        return metrics | (self.concurrency.take_metrics() if self.concurrency is not None else {})

    async def fetch(self, reference: Any, seconds: float) -> list[Any]:
        """The sequences behind a reference. Raises RunError if they do not come within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return list(await reference)
        except TimeoutError:
            problem = f"the sequences of a group could not be read within {seconds:g} s"
            fix = "raise cluster.deadlines.logprobs, or set logger.trajectories to none"
            raise RunError(f"stage 'storing trajectories': {problem}; {fix}") from None

    def store(self, sequences: Sequence[Any]) -> Any:
        """A reference by which workers read these sequences, all of them at once."""
        return ray.put(list(sequences))


@asynccontextmanager
async def reserved(experiment: Experiment, groups: set[str]) -> AsyncIterator[Placement]:
    """Places in a new Ray cluster or RAY_ADDRESS's."""
    requests = [request for request in worker_requests(experiment) if request.group in groups]
    scales = "generation" in groups and experiment.generation.can_scale
    with ClusterRuntime(experiment.cluster, requests, available_cores() if scales else 0) as runtime:
        placement = await runtime.reserve()
        try:
            yield placement
        finally:
            placement.release()


@asynccontextmanager
async def open_session(experiment: Experiment, *, policy: bool, sampling: bool) -> AsyncIterator[Session]:
    """Start the requested parts, each group as early as possible; end all of them when the block ends."""
    policy_samples = sampling and not experiment.generation.has_engines
    learns, asks = policy or policy_samples, sampling and not policy_samples
    groups = {model.name for model in models_of(experiment) if (sampling if model.scores else policy)}
    groups |= {"policy"} if learns else set()
    groups |= {"generation", "rollout", "endpoint"} if sampling else set()
    groups |= {one.group for one in environment_actors(experiment.env)} if sampling else set()
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(reserved(experiment, groups))
        session = Session(policy_samples=policy_samples)
        seconds = experiment.cluster.deadlines.stall
        session.stalls = StallReporter(experiment.run_dir, seconds, session.groups)
        session.starter = starter = Starter(experiment, placement, stack, session)
        if learns and asks and experiment.generation.shares_devices:
            await starter.models(training=policy)
            await starter.engines_on_policy_devices()
        else:
            starts = [starter.models(training=policy)] if learns else []
            await asyncio.gather(*starts, *([starter.engines()] if asks else []))
        if session.replicas is not None:
            await starter.callers(session.replicas)
        elif policy_samples:
            await starter.rollout(lambda: [sampler.as_replica() for sampler in session.learner.samplers])
        if learns and session.replicas is not None and experiment.generation.takes_weights:
            session.exchange = starter.exchange(session.learner.group, session.replicas.group)
            session.replicas.on_change = session.exchange.layout_changed
            trained, sampled = experiment.policy.trained_quantization, experiment.policy.engine_quantization
            # Engines have read weights that are not rounded, or have no scales of activations.
            unlike = (trained is not None and sampled is None) or experiment.policy.samples_by_input_scales
            if unlike or not experiment.generation.has_policy_weights:
                session.version = _NOT_SENT
        yield session


@asynccontextmanager
async def open_engines(experiment: Experiment) -> AsyncIterator[ReplicaSupervisor]:
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(reserved(experiment, {"generation"}))
        replicas = await Starter(experiment, placement, stack).engines()
        replicas.start_watch()
        yield replicas


@dataclass(frozen=True)
class Starter:
    """A session while its groups are started, which end with the stack."""

    experiment: Experiment
    placement: Placement
    stack: AsyncExitStack
    session: Session = field(default_factory=Session)

    @property
    def _on_gpus(self) -> bool:
        return bool(self.experiment.cluster.gpus_per_node)

    async def models(self, *, training: bool) -> None:
        specs = [spec for spec in models_of(self.experiment) if not spec.scores][: None if training else 1]
        rendezvous = self._rendezvous(*(spec.name for spec in specs))
        at_once = [spec.name for spec in specs if not spec.on_policy_devices]
        threads = self.placement.threads(self.experiment.cluster.policy_threads, *at_once)
        started = await asyncio.gather(*(self._start_model(spec, rendezvous, threads) for spec in specs))
        for spec, handle in zip(specs, started, strict=True):
            self.session.models[spec.name] = handle
            if spec.on_policy_devices:
                handle.devices = self.session.learner.devices
                handle.devices.tenants.append(handle)

    async def model(self, spec: ModelSpec) -> handles.ModelHandle:
        threads = self.placement.threads(self.experiment.cluster.policy_threads, spec.name)
        return await self._start_model(spec, self._rendezvous(spec.name), threads)

    def _rendezvous(self, *groups: str) -> str:
        """host:port of a store for these groups, which is served as long as it is referenced."""
        store, address = served_store(self.placement.driver_address(*groups))
        self.stack.callback(lambda: store)
        return address

    async def _start_model(self, spec: ModelSpec, rendezvous: str, threads: int) -> handles.ModelHandle:
        experiment, layout = self.experiment, spec.config.layout
        algorithm, deadlines = experiment.algorithm, experiment.cluster.deadlines
        sampling = experiment.generation.sampling
        is_policy = spec.name == "policy"
        temperature = sampling.temperature if algorithm.online else 1.0
        shared: dict[str, Any] = {
            "config": spec.config,
            "world_size": layout.world_size,
            "rendezvous": f"tcp://{rendezvous}/{spec.name}",
            "device": "cuda" if self._on_gpus else "cpu",
            "threads": threads,
            "temperature": temperature if is_policy or algorithm.online else algorithm.teacher_temperature,
            "filters": sampling if is_policy and algorithm.trains_filtered and sampling.filters else None,
            "seed": experiment.seed,
            "keep_reference": is_policy and algorithm.keeps_reference and experiment.reference is None,
            "deadline_seconds": max(deadlines.training, deadlines.checkpoint, deadlines.refit),
            "start_seconds": deadlines.start,
            "trains": spec.trains,
            "load": True,
        }
        target = "nemorl.megatron.worker:PolicyWorker"
        if is_policy and not experiment.generation.has_engines:
            target = "nemorl.generation.megatron_engine:SamplingPolicyWorker"
            shared["generation"] = experiment.generation
            shared["tokenizer_path"] = spec.config.tokenizer_folder.absolute()
        if is_policy and algorithm.generates and spec.config.samples_by_input_scales:
            prompts = await asyncio.to_thread(calibration_prompts, experiment.data, spec.config)
            shared["calibration_prompts"] = prompts
        kwargs = [{**shared, "rank": rank} for rank in range(layout.world_size)]
        options = {"threads": threads, "mesh": Mesh.of(layout), "health_seconds": deadlines.health}
        if not self._on_gpus:  # where nothing is compiled, and the import of the compiler takes two seconds
            options["environment"] = {"TORCHDYNAMO_DISABLE": "1"}
        group = await self._start(spec.name, target, kwargs, **options)
        return handles.ModelHandle(group, spec, experiment.cluster, shared["rendezvous"])

    async def engines(self, shared: WorkerGroup | None = None) -> ReplicaSupervisor:
        """The engines; each sees the GPUs of `shared` ranks on its node, those that it shares first."""
        config, policy, cluster = self.experiment.generation, self.experiment.policy, self.experiment.cluster
        config = config.with_absolute_paths()
        threads = self.placement.threads(config.threads, "generation")
        options = EngineOptions(
            model_path=policy.model_path.absolute(),
            tokenizer_path=policy.tokenizer_folder.absolute(),
            max_sequence_length=policy.max_sequence_length,
            device="cuda" if self._on_gpus else "cpu",
            precision=policy.precision,
            threads=threads,
            commit_seconds=cluster.deadlines.refit,
        )

        def kwargs_of(rank: int) -> dict[str, Any]:
            bundle = {"bundle": 0} if config.workers_hold_gpus else {}  # of a reservation of its own
            of_rank = replace(options, rank=rank)
            return {"config": config, "options": of_rank, **config.host_options(policy), **bundle}

        def of_place(rank: int) -> dict[str, Any]:
            place: dict[str, Any] = {}
            if config.workers_hold_gpus:
                place["bundle"] = self.placement.bundles["generation"][rank]
            if shared is not None and (host_ranks := self.placement.host_ranks("generation")):
                here = self.placement.on_node_of("generation", rank, shared.name)
                others = [other for other in here if other not in host_ranks[rank]]  # with weights too
                visible = (shared.gpus[number] for number in (*host_ranks[rank], *others))
                place["gpus"] = tuple(itertools.chain(*visible))
            return place

        ranks = [kwargs_of(rank) for rank in range(config.replicas)]
        environment = {}
        if config.workers_hold_gpus:  # which the engine's process has to see nevertheless
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        extra = None
        if config.can_scale:
            on_one_machine = config.transport in ("shared_memory", "cuda_ipc")
            node = self.placement.nodes["generation"][0].id if on_one_machine else None
            extra = ExtraRanks(self.placement, "generation", kwargs_of, node)
            self.stack.callback(extra.close)
        group = await self._start(
            "generation",
            config.host_class,
            ranks,
            threads=threads,
            concurrent=True,
            environment=environment,
            of_place=of_place,
            extra=extra,
        )
        replicas = ReplicaSupervisor(group, cluster, shares_devices=config.shares_devices)
        self.stack.push_async_callback(replicas.close)
        self.session.replicas = replicas
        return replicas

    async def engines_on_policy_devices(self) -> None:
        """Engines on the policy's devices, which models may take back when they sleep."""
        policy = self.session.learner
        await policy.release_devices()
        replicas = await self.engines(policy.group if self._on_gpus else None)
        await replicas.sleep()

    async def callers(self, replicas: ReplicaSupervisor) -> None:
        """Start what sends requests to the engines: the endpoint, if any, and the rollout workers."""
        if self.experiment.generation.endpoint is not None:
            targets = [engine.as_replica() for engine in replicas.engines]
            kwargs = [{"experiment": self.experiment, "engines": targets}]
            host = "nemorl.session.endpoints:EndpointHost"
            group = await self._start("endpoint", host, kwargs, threads=1, concurrent=True)
            endpoint = handles.RouterHandle(group)
            replicas.connect(endpoint)
            await open_endpoint(endpoint, self.experiment)
        rollouts = await self.rollout(lambda: replicas.announced)
        replicas.connect(rollouts)
        replicas.start_watch()
        workers, generation = rollouts.handles, self.experiment.generation
        control = ConcurrencyControl.of(
            generation, lambda: len(workers), replicas.health, rollouts.set_concurrency
        )
        if control is not None:
            self.session.concurrency = control
            self.stack.push_async_callback(control.close)
            control.start()

    async def rollout(self, engines: Callable[[], list[Replica]]) -> RolloutSupervisor:
        """The rollout workers over the present `engines`, and the reward models that they call."""
        rewards, environment = await self.reward_models()
        experiment = self.experiment.model_copy(update={"rewards": rewards})
        supervisors = await self.environment_actors()
        actors = {name: one.group.workers for name, one in supervisors.items()}
        kwargs = {"experiment": experiment, "engines": engines(), "actors": actors}
        host = "nemorl.rollout.worker:RayRolloutWorker"
        ranks = [{**kwargs, "rank": rank} for rank in range(experiment.cluster.rollout_workers)]
        group = await self._start("rollout", host, ranks, threads=1, concurrent=True, environment=environment)
        rollouts = RolloutSupervisor(group, experiment.cluster, engines, supervisors)
        self.stack.push_async_callback(rollouts.close)
        rollouts.start_watch()
        self.session.rollouts, self.session.environments = rollouts, [*supervisors.values()]
        for supervisor in supervisors.values():
            supervisor.start_watch()
        return rollouts

    async def environment_actors(self) -> dict[str, EnvironmentSupervisor]:
        """Of each environment that runs in actors, by its name."""
        supervisors, cluster = {}, self.experiment.cluster
        host = "nemorl.serve.environment_sessions:EnvironmentHost"
        for actors in environment_actors(self.experiment.env):
            max_sessions, idle_seconds = actors.placement.max_episodes, cluster.deadlines.generation
            kwargs = {"config": actors.config, "max_sessions": max_sessions, "idle_seconds": idle_seconds}
            ranks = [kwargs] * actors.placement.num_actors
            group = await self._start(actors.group, host, ranks, threads=1, concurrent=True)
            supervisors[actors.name] = EnvironmentSupervisor(group, cluster)
            self.stack.push_async_callback(supervisors[actors.name].close)
        return supervisors

    async def reward_models(self) -> tuple[tuple[RewardConfig, ...], dict[str, str]]:
        """Start the reward models; returns the rewards with their addresses, and a variable for each key."""
        rewards, environment = list(self.experiment.rewards), {}
        specs = [spec for spec in models_of(self.experiment) if spec.scores]
        models = await asyncio.gather(*(self.model(spec) for spec in specs))
        endpoint, address = EndpointConfig(port=0), self.placement.driver_address("rollout")
        for spec, model in zip(specs, models, strict=True):
            devices = None
            if spec.on_policy_devices and "policy" in self.session.models:
                devices = self.session.learner.devices
                devices.tenants.append(model)
            scorer = RewardScorer(model, spec.config.layout.fewest_units, devices)
            score, chat = reporting_failures(scorer), self.experiment.data.chat
            routes = reward_routes(spec.config, endpoint, chat=chat, score=score)
            at = await self.stack.enter_async_context(answering(endpoint, routes, address))
            place = int(spec.section.removeprefix("rewards."))
            key = f"NEMORL_REWARD_KEY_{place}"
            rewards[place], environment[key] = reward_by_url(rewards[place], at.url, key), at.api_key
        return tuple(rewards), environment

    async def keepers(self, nodes: Sequence[Node], memory_dir: Path) -> list[handles.KeeperHandle]:
        placement = self.placement.with_one_on_each("keeper", nodes)
        target, kwargs = "nemorl.run.memory:Keeper", [{"parent": memory_dir.absolute()}] * len(nodes)
        options = {"placement": placement, "threads": 1, "concurrent": True}
        group = await self._start("keeper", target, kwargs, **options)
        seconds = self.experiment.cluster.deadlines.checkpoint
        return [handles.KeeperHandle(worker, seconds) for worker in group.workers]

    def exchange(self, policy: WorkerGroup, generation: WorkerGroup) -> WeightExchange:
        config, seconds = self.experiment.generation, self.experiment.cluster.deadlines.refit
        url = config.files_url or str(self.experiment.run_dir / "weights")
        options = TransportOptions(
            config.transport,
            url if "://" in url else str(Path(url).absolute()),
            config.delta,
            config.full_version_every,
            config.check_one_in or (16 if self._on_gpus else 1),
            host=ray.util.get_node_ip_address(),
        )
        # The groups' own deadline comes later, so that the rank that waits can say for whom.
        senders = handles.PolicySenders(policy, seconds + 10)
        receivers = handles.GenerationReceivers(generation, seconds + 10)
        return WeightExchange(senders, receivers, config.bucket_megabytes * 2**20, seconds, options)

    async def _start(
        self, name: str, target: str, kwargs: Sequence[dict[str, Any]], **options: Any
    ) -> WorkerGroup:
        """Start a group, which ends with the stack, by the error that ends it, if any."""
        options = {"placement": self.placement, "run_dir": self.experiment.run_dir, **options}
        seconds, stalls = self.experiment.cluster.deadlines.start, self.session.stalls
        if stalls is not None:
            options["on_deadline"] = stalls.explain
        group = await WorkerGroup.start(name, target, kwargs, deadline_seconds=seconds, **options)
        self.session.groups[name] = group

        async def end(_kind: object, error: BaseException | None, _trace: object) -> None:
            await group.shutdown(after=error)

        self.stack.push_async_exit(end)
        return group


async def open_endpoint(endpoint: handles.RouterHandle, experiment: Experiment) -> None:
    """Start the endpoint and log its address. A key generated for this run is in its folder, in no log."""
    at = await endpoint.listen(experiment.cluster.deadlines.start)
    if not at.generated:
        logger.warning("the engines answer at %s", at.url)
        return
    file = RunPaths(experiment.run_dir).endpoint_key
    write_atomically(file, at.api_key + "\n", private=True)
    logger.warning("the engines answer at %s; the key is in %s", at.url, file)
