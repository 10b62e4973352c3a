"""The choice of `policy.recompute: {name: auto}`: the least work with which a run fits. Imports no torch."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import get_args

from nemorl.config.experiment import Experiment
from nemorl.config.policy import (
    AutoRecompute,
    ChosenRecompute,
    FullRecompute,
    NoRecompute,
    PolicyConfig,
    RecomputeConfig,
    RecomputeModule,
    SelectiveRecompute,
)
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.layout_rules import layers_by_stage, norms_are_fused, recompute_problems
from nemorl.models.registry import policy_shape
from nemorl.models.shape import ModelShape

from .machine import Machine, memory_problems
from .memory import policy_memory
from .operations import attention_width, layer_products
from .problems import planned_processes

_OF_NORM = 8  # operations for each element that a norm reads


def with_recompute(experiment: Experiment, recompute: RecomputeConfig) -> Experiment:
    policy = experiment.policy.model_copy(update={"recompute": recompute})
    return experiment.model_copy(update={"policy": policy})


def with_settled_recompute(experiment: Experiment, machine: Machine, *, training: bool = True) -> Experiment:
    """The experiment with the setting that `policy.recompute: auto` resolves to on this machine.

    The GPUs of a cluster are taken to be as those of this machine, if it has some. Nothing is recomputed
    where the memory is not known, and where `plan_run` will report why the run cannot start.
    """
    if not isinstance(experiment.policy.recompute, AutoRecompute):
        return experiment
    try:
        shape = policy_shape(experiment.policy)
    except (BrokenModelFolder, UnsupportedModel):
        return with_recompute(experiment, NoRecompute())
    if not planned_processes(experiment, shape, training=training)[0]:
        return with_recompute(experiment, NoRecompute())

    like_ours = machine.gpus and experiment.cluster.gpus_per_node and not machine.nodes
    known = replace(machine, nodes=experiment.cluster.num_nodes) if like_ours else machine

    def fits(choice: Experiment) -> bool:
        processes, _ = planned_processes(choice, shape, training=training)
        return not any(memory_problems(choice, processes, known))

    return with_chosen_recompute(experiment, shape, fits)


def with_chosen_recompute(
    experiment: Experiment, shape: ModelShape, fits: Callable[[Experiment], bool]
) -> Experiment:
    """The experiment with `auto` replaced by the setting of least work with which it `fits`.

    If it fits with none, by the one of least memory. Layouts must divide the model.
    """
    if not isinstance(experiment.policy.recompute, AutoRecompute):
        return experiment
    choices = [with_recompute(experiment, option) for option in _by_work(shape, experiment.policy)]
    if (fitting := next(filter(fits, choices), None)) is not None:
        return fitting
    return min(choices, key=lambda choice: policy_memory(choice, shape).activations)


def fitting_recompute(experiment: Experiment, shape: ModelShape, memory_bytes: int | None) -> Experiment:
    """`auto` replaced by the setting with which a rank of the policy alone fits into a device's memory."""
    if memory_bytes is None and isinstance(experiment.policy.recompute, AutoRecompute):
        return with_recompute(experiment, NoRecompute())

    def fits(choice: Experiment) -> bool:
        return memory_bytes is None or policy_memory(choice, shape).on_device <= memory_bytes

    return with_chosen_recompute(experiment, shape, fits)


def forward_operations(shape: ModelShape, policy: PolicyConfig, recompute: ChosenRecompute) -> float:
    """Operations for a token that the backward pass repeats, in all layers. Products count twice."""
    if isinstance(recompute, NoRecompute):
        return 0.0
    modules = _of_modules(shape, policy.max_sequence_length)
    if isinstance(recompute, SelectiveRecompute):
        return sum(modules.get(name, 0.0) for name in recompute.modules)
    work = sum(work for name, work in modules.items() if name != "shared_experts")
    if recompute.method == "block":
        layout = policy.layout
        runs = layout.pipeline_parallel_size * layout.virtual_pipeline_parallel_size
        work *= min(1.0, recompute.num_layers * runs / shape.num_layers)
    return work


def _by_work(shape: ModelShape, policy: PolicyConfig) -> list[ChosenRecompute]:
    """All settings, those of less work first."""
    return sorted(_options(shape, policy), key=lambda option: forward_operations(shape, policy, option))


def _options(shape: ModelShape, policy: PolicyConfig) -> Iterator[ChosenRecompute]:
    yield NoRecompute()
    layout, modules = policy.layout, get_args(RecomputeModule)
    if norms_are_fused(shape) and policy.kernels != "local":
        modules = tuple(name for name in modules if name != "layernorm")  # they may be, and keep their inputs
    for size in range(1, len(modules) + 1):
        for chosen in itertools.combinations(modules, size):
            option = SelectiveRecompute(name="selective", modules=chosen)
            # Shared experts are a part of `moe`.
            repeats = {"moe", "shared_experts"} <= set(chosen)
            if not repeats and not any(recompute_problems(shape, layout, option)):
                yield option
    largest = max(layers_by_stage(shape.num_layers, layout)) // layout.virtual_pipeline_parallel_size
    for number in range(1, largest):
        yield FullRecompute(name="full", method="block", num_layers=number)
    for number in range(1, largest + 1):
        every = FullRecompute(name="full", num_layers=number)
        if not any(recompute_problems(shape, layout, every)):
            yield every


@lru_cache(maxsize=16)
def _of_modules(shape: ModelShape, max_sequence_length: int) -> Mapping[str, float]:
    """Operations of a forward pass for a token in all layers, by module; `moe` includes `shared_experts`."""
    found: dict[str, float] = defaultdict(float)
    for layer in range(shape.num_layers):
        for product in layer_products(shape, layer):
            found[product.module] += product.operations
        found["layernorm"] += 2 * _OF_NORM * shape.hidden_size
        seen = min(max_sequence_length / 2, shape.window(layer) or max_sequence_length)
        found["core_attn"] += 2 * seen * attention_width(shape)
    if "experts" in found:
        found["moe"] = found.pop("experts") + found["shared_experts"]
    return found
