"""The search for a run's placement, layout and split of devices by the plan of time. Imports no torch.

The stages of the policy depend on its devices and layout alone, and generation on the engines alone, so the
best of each is found for each number of devices. Of layouts those are tried whose messages of each layer stay
within an NVLink domain: TP x CP of at most 8, ETP of 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.config.policy import LayoutConfig
from nemorl.models.shape import ModelShape

from .costs import Attained
from .hardware import Hardware
from .layouts import LayoutChoice, list_layouts
from .memory import policy_memory
from .step_time import RunPlan, StepTime, UnplannedRun
from .training_time import Lengths

_SPLITS = 8  # parts of the devices of which engines of their own take some
_MAX_ENGINE = 32  # devices of one engine
_MAX_STAGES, _MAX_CHUNKS = 16, 4
_TOKENS_OF_CP = 4096  # of a sequence, for each rank that shares it
_MIN_SEQUENCES = 8  # whose keys and values an engine must have room for


@dataclass(frozen=True)
class Suggestion:
    """A run that fits, and its step."""

    plan: RunPlan
    step: StepTime
    layouts: int  # that fit on the policy's devices, of which this is the fastest
    memory: int  # bytes of the policy's fullest rank

    @property
    def reason(self) -> str:
        stage = self.step.stages[self.step.longest]
        share = stage.seconds / self.step.seconds
        waiting = max(self.step.idle, key=lambda group: self.step.idle[group])
        layout = (
            f"fastest of {self.layouts} layouts that fit" if self.layouts > 1 else "only layout that fits"
        )
        bound = f"{self.step.longest} is {share:.0%} of the step, bound by {stage.bound}"
        return f"{bound}; {waiting} {self.step.idle[waiting]:.0%} idle; {layout}"

    @property
    def overrides(self) -> list[str]:
        """The fields that were searched, as a command line takes them."""
        experiment, generation = self.plan.experiment, self.plan.experiment.generation
        layout = experiment.policy.layout.model_dump(exclude_defaults=True)
        fields = [f"policy.layout={_yaml(layout)}", f"generation.replicas={generation.replicas}"]
        fields.append(f"generation.tensor_parallel_size={self.plan.engine.tensor}")
        if hasattr(generation, "colocated"):
            fields.append(f"generation.colocated={str(generation.shares_devices).lower()}")
            if generation.shares_devices and experiment.algorithm.allows_staleness:
                fields.append(f"generation.on_update={generation.on_update}")
        return [*fields, f"algorithm.max_staleness={getattr(experiment.algorithm, 'max_staleness', 0)}"]


def suggest(
    experiment: Experiment,
    shape: ModelShape,
    hardware: Hardware,
    lengths: Lengths,
    num_devices: int,
    staleness: Sequence[int],
    attained: Attained | None = None,
) -> list[Suggestion]:
    """The fastest run for each placement, split and staleness, in ascending order of their steps' seconds.

    Layouts leave the margin of the hardware's memory free. Engines share the policy's devices where the back
    end can. Raises `UnplannedRun`.
    """
    generation = experiment.generation
    if not isinstance(experiment.algorithm, OnlineBase):
        raise UnplannedRun(f"algorithm.name = {experiment.algorithm.name}: choose an algorithm that samples")
    if not hasattr(generation, "tensor_parallel_size"):
        fix = "choose one whose engines have a tensor_parallel_size"
        raise UnplannedRun(f"generation.backend = {generation.backend}: its engines have one size; {fix}")
    constants = Attained() if attained is None else attained
    found: list[Suggestion] = []
    longest = experiment.policy.max_sequence_length

    def allowed(layout: LayoutConfig) -> bool:
        sizes = (layout.tensor_parallel_size, layout.context_parallel_size, layout.expert_parallel_size)
        return (
            all(size & (size - 1) == 0 for size in sizes)
            and layout.tensor_parallel_size * layout.context_parallel_size <= min(hardware.domain, 8)
            and layout.context_parallel_size * _TOKENS_OF_CP <= max(longest, _TOKENS_OF_CP)
            and layout.expert_tensor_parallel_size == 1
            and layout.virtual_pipeline_parallel_size <= _MAX_CHUNKS
            and layout.pipeline_parallel_size <= _MAX_STAGES
        )

    for of_policy, colocated in _placements(num_devices, hasattr(generation, "colocated")):
        own = of_policy if colocated else num_devices - of_policy
        placed = _with_generation(experiment, {"colocated": colocated} if colocated else {})
        if not colocated and generation.shares_devices:
            placed = _with_generation(experiment, {"colocated": False})
        choices = list_layouts(placed, shape, of_policy, hardware.usable_bytes, allowed, hardware)
        fitting = [choice for choice in choices if choice.fits]
        if not fitting:
            continue
        for behind in staleness:
            algorithm = placed.algorithm.model_copy(update={"max_staleness": behind})
            base = placed.model_copy(update={"algorithm": algorithm})
            if colocated and behind:  # what runs when the policy trains is read again after that
                if experiment.algorithm.group_seconds is not None:
                    continue
                base = _with_generation(base, {"on_update": "restart"})
            plans = [RunPlan(e, shape, hardware, lengths, constants) for e in _with_engines(base, own)]
            plans = [plan for plan in plans if plan.engine.cached_tokens >= _MIN_SEQUENCES * lengths.sequence]
            if not plans:
                continue
            engines = min(plans, key=lambda plan: plan.generation_cost.seconds)
            steps = ((plan, plan.step()) for plan in (_laid_out(engines, choice) for choice in fitting))
            plan, step = min(steps, key=lambda pair: pair[1].seconds)
            memory = policy_memory(plan.experiment, shape).on_device
            found.append(Suggestion(plan, step, len(fitting), memory))
    return sorted(found, key=lambda suggestion: suggestion.step.seconds)


def _placements(num_devices: int, can_share: bool) -> Iterator[tuple[int, bool]]:
    """Devices of the policy, and whether engines share them."""
    if can_share:
        yield num_devices, True
    parts = min(_SPLITS, num_devices)
    yield from ((size, False) for size in sorted({num_devices * n // parts for n in range(1, parts)}))


def _with_engines(experiment: Experiment, devices: int) -> Iterator[Experiment]:
    """Engines of every power of two that divides the devices they have together."""
    size = 1
    while size <= min(devices, _MAX_ENGINE):
        if devices % size == 0:
            fields = {"tensor_parallel_size": size, "pipeline_parallel_size": 1, "max_replicas": None}
            yield _with_generation(experiment, fields | {"replicas": devices // size})
        size *= 2


def _with_generation(experiment: Experiment, fields: Mapping[str, Any]) -> Experiment:
    generation = experiment.generation.model_copy(update=fields)
    offload = experiment.policy.offload.model_copy(
        update={"weights": generation.shares_devices, "optimizer": generation.shares_devices}
    )
    policy = experiment.policy.model_copy(update={"offload": offload})
    return experiment.model_copy(update={"generation": generation, "policy": policy})


def _laid_out(plan: RunPlan, choice: LayoutChoice) -> RunPlan:
    fields = {"layout": choice.layout, "recompute": choice.recompute, "offload_activations": choice.offload}
    policy = plan.experiment.policy.model_copy(update=fields)
    laid_out = replace(plan, experiment=plan.experiment.model_copy(update={"policy": policy}))
    vars(laid_out).update(
        engine=plan.engine, generation_cost=plan.generation_cost
    )  # which do not depend on it
    return laid_out


def _yaml(fields: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {str(value).lower()}" for name, value in fields.items()) + "}"
