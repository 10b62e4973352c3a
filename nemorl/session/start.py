"""How each group of processes of an experiment is started."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import ray

from nemorl.cluster.group import Worker, WorkerGroup
from nemorl.cluster.placement import Placement
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.rollout.dispatch import RunGroups
from nemorl.rollout.worker import groups_of
from nemorl.weights.channel import TransportOptions
from nemorl.weights.exchange import WeightExchange

from .meeting import meeting_place
from .models import ModelStarter
from .refit import GenerationReceivers, PolicySenders
from .scoring import Scoring

# What runs in the process of an engine.
HOSTS = {
    "torch": "nemorl.session.generation_host:GenerationHost",
    "openai": "nemorl.session.hosts:OpenAIHost",
    "vllm": "nemorl.session.vllm_host:VllmHost",
    "trtllm": "nemorl.session.trtllm_host:TrtllmHost",
}
# TensorRT-LLM's workers hold a replica's GPUs, not its own process, which must see them nevertheless.
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

    @asynccontextmanager
    async def models(self, *, training: bool) -> AsyncIterator[dict[str, WorkerGroup]]:
        """The policy and, for training, the models beside it, by name; their place to meet ends with this."""
        starter = self._models
        names = [model.name for model in starter.learners(training=training)]
        with meeting_place(self.placement.driver_address(*names)) as meeting:
            yield await starter.start(meeting, training=training)

    @asynccontextmanager
    async def model(self, model: ModelSpec) -> AsyncIterator[WorkerGroup]:
        """A model by itself, likewise."""
        threads = self.placement.threads(self.experiment.cluster.policy_threads, model.name)
        with meeting_place(self.placement.driver_address(model.name)) as meeting:
            yield await self._models.start_model(model, meeting, threads)

    @property
    def _models(self) -> ModelStarter:
        return ModelStarter(self.experiment, self.placement, self.device, self._start)

    async def generation(self, gpus: Sequence[tuple[str, ...]] = ()) -> WorkerGroup:
        """The engines; `gpus` are those of the ranks that they are beside, if they are.

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
        if config.backend == "vllm":
            shared["return_experts"] = policy.moe.router_replay
            shared["lora"] = policy.lora if config.adapters == "separate" else None
        ranks: list[dict[str, Any]] = [{**shared, "rank": rank} for rank in range(config.replicas)]
        options: dict[str, Any] = {"threads": threads, "concurrent": True}
        if config.backend == "trtllm":
            options["environment"] = SEES_ALL_GPUS
            for kwargs, bundle in zip(ranks, self.placement.bundles["generation"], strict=True):
                kwargs["bundle"] = bundle
        if gpus:
            for kwargs, neighbours in zip(ranks, self.placement.beside("generation"), strict=True):
                here = self.placement.on_node_of("generation", kwargs["rank"], "policy")
                others = [rank for rank in here if rank not in neighbours]
                kwargs["gpus"] = tuple(name for rank in (*neighbours, *others) for name in gpus[rank])
        return await self._start("generation", HOSTS[config.backend], ranks, **options)

    async def endpoint(self, engines: Sequence[Worker]) -> WorkerGroup:
        """The endpoint over these engines."""
        return await self._start(
            "endpoint",
            "nemorl.session.serving:EndpointHost",
            [{"experiment": self.experiment, "engines": list(engines)}],
            threads=1,
            concurrent=True,
        )

    async def rollout(self, engines: Sequence[Worker], scoring: Scoring) -> WorkerGroup:
        """The rollout workers, who ask these engines, and reward models by what `scoring` says."""
        experiment = self.experiment.model_copy(update={"rewards": scoring.rewards})
        count = self.experiment.cluster.rollout_workers
        return await self._start(
            "rollout",
            "nemorl.rollout.worker:RayRolloutWorker",
            [{"experiment": experiment, "engines": list(engines)}] * count,
            threads=1,
            concurrent=True,
            environment=scoring.environment,
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
        return await WorkerGroup.start_async(
            name,
            target,
            kwargs,
            placement=self.placement,
            run_dir=self.experiment.run_dir,
            deadline_seconds=self.experiment.cluster.deadlines.start,
            **options,
        )
