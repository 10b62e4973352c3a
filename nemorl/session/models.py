"""The models of a run: which processes hold them, and how these are started."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.mesh import Mesh
from nemorl.cluster.placement import Placement
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, models_of

from .device_turns import DeviceTurns
from .model_group import ModelGroup

StartGroup = Callable[..., Awaitable[WorkerGroup]]


@dataclass(frozen=True)
class ModelStarter:
    """Starts the groups of an experiment's models."""

    experiment: Experiment
    placement: Placement
    device: Literal["cpu", "cuda"]
    start_group: StartGroup  # (name, target, kwargs of each rank, **options of `WorkerGroup.start_async`)

    async def start(self, meeting: str, *, training: bool) -> dict[str, WorkerGroup]:
        """The groups by name, at once; without training the policy alone. Its ranks meet at that place."""
        models = self.learners(training=training)
        own = [model.name for model in models if not model.on_policy_devices]
        threads = self.placement.threads(self.experiment.cluster.policy_threads, *own)
        groups = await asyncio.gather(*(self.start_model(model, meeting, threads) for model in models))
        return {model.name: group for model, group in zip(models, groups, strict=True)}

    def learners(self, *, training: bool) -> list[ModelSpec]:
        """The models that `start` starts."""
        learners = [model for model in models_of(self.experiment) if not model.scores]
        return learners if training else learners[:1]

    async def start_model(self, model: ModelSpec, meeting: str, threads: int) -> WorkerGroup:
        """The group of one model; `meeting` is the place of a store (`meeting_place`)."""
        algorithm, cluster = self.experiment.algorithm, self.experiment.cluster
        deadlines, ranks = cluster.deadlines, model.config.layout.world_size
        shared: dict[str, Any] = {
            "config": model.config,
            "world_size": ranks,
            "rendezvous": f"tcp://{meeting}/{model.name}",
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
                host = "nemorl.session.megatron_host:SamplingPolicyHost"
                tokenizer = model.config.tokenizer.path or model.config.model_path
                shared["generation"] = self.experiment.generation
                shared["tokenizer_path"] = tokenizer.absolute()
                options["serving"] = True
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
    turns = DeviceTurns(residents)
    for resident in residents:
        resident.turns = turns
    return found
