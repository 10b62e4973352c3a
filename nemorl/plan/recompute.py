"""The choice of `policy.recompute: {name: auto}` and of `policy.offload_activations: {layers: auto}`.

Recomputation alone: the least work with which a run fits. With offloading the fewest seconds, by the plan of
time: what the backward pass repeats, against copies to the host and back that do not hide behind computation.
Imports no torch.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from nemorl.config.experiment import Experiment
from nemorl.config.policy import (
    ActivationOffloadConfig,
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

from .costs import Attained
from .generation_time import default_lengths
from .hardware import Hardware, known_hardware
from .machine import Machine, host_problems, memory_problems
from .memory import policy_memory
from .operations import forward_operations
from .problems import planned_processes
from .training_time import Training

Fits = Callable[[Experiment], bool]


@dataclass(frozen=True)
class Chosen:
    """An experiment with what the plan has chosen for `auto`."""

    experiment: Experiment
    reason: str = ""  # in seconds, where something is offloaded, or could be


def with_recompute(experiment: Experiment, recompute: RecomputeConfig) -> Experiment:
    return _with_fields(experiment, recompute=recompute)


def with_settings_of(experiment: Experiment, settled: Experiment) -> Experiment:
    """The experiment with what another one recomputes and offloads."""
    policy = settled.policy
    offload = policy.offload_activations
    return _with_fields(experiment, recompute=policy.recompute, offload_activations=offload)


def kept_by(recompute: RecomputeConfig, offload: ActivationOffloadConfig | None) -> str:
    """What is recomputed, and offloaded if something is, in words."""
    return recompute.described + ("" if offload is None else f"; offloaded: {offload.described}")


def leaves_a_choice(policy: PolicyConfig) -> bool:
    """True if the plan chooses what is recomputed or offloaded."""
    return isinstance(policy.recompute, AutoRecompute) or _offload_is_chosen(policy)


def settled(experiment: Experiment, machine: Machine, *, training: bool = True) -> Chosen:
    """The experiment with the settings that `auto` resolves to on this machine.

    The GPUs of a cluster are taken to be as those of this machine, if it has some. Nothing is recomputed or
    offloaded where the memory is not known, and where `plan_run` will report why the run cannot start.
    """
    if not leaves_a_choice(experiment.policy):
        return Chosen(experiment)
    try:
        shape = policy_shape(experiment.policy)
    except (BrokenModelFolder, UnsupportedModel):
        return Chosen(_with_nothing(experiment))
    if not planned_processes(_with_nothing(experiment), shape, training=training)[0]:
        return Chosen(_with_nothing(experiment))

    like_ours = machine.gpus and experiment.cluster.gpus_per_node and not machine.nodes
    known = replace(machine, nodes=experiment.cluster.num_nodes) if like_ours else machine
    on_gpus = experiment.cluster.gpus_per_node > 0 and machine.gpus

    def fits(choice: Experiment) -> bool:
        processes, _ = planned_processes(choice, shape, training=training)
        return not any(memory_problems(choice, processes, known))

    def fits_host(choice: Experiment) -> bool:
        processes, _ = planned_processes(choice, shape, training=training)
        return not any(host_problems(choice, processes, known))

    hardware = known_hardware(machine.gpus[0].name) if on_gpus else None
    return choose(experiment, shape, fits, hardware, fits_host)


def with_settled_recompute(experiment: Experiment, machine: Machine, *, training: bool = True) -> Experiment:
    """The experiment of `settled`."""
    return settled(experiment, machine, training=training).experiment


def choose(
    experiment: Experiment,
    shape: ModelShape,
    fits: Fits,
    hardware: Hardware | None = None,
    fits_host: Fits = lambda _: True,
) -> Chosen:
    """`auto` replaced by settings with which the experiment `fits`, or by those of least memory if none do.

    Nothing is offloaded without the rates of a device with a host, `hardware`, or where it does not fit into
    the memory of the host. Layouts must divide the model.
    """
    policy = experiment.policy
    if not leaves_a_choice(policy):
        return Chosen(experiment)
    options: list[ChosenRecompute] = (
        _by_work(shape, policy) if isinstance(policy.recompute, AutoRecompute) else [policy.recompute]
    )
    offloads = _offload_is_chosen(policy)
    base = _with_fields(experiment, offload_activations=None) if offloads else experiment
    choices = [with_recompute(base, option) for option in options]
    plain = next(filter(fits, choices), None)
    device = _device(hardware, policy) if offloads else None
    if device is None:
        return Chosen(plain or _smallest(choices, shape))

    def timed(choice: Experiment) -> tuple[float, Experiment]:
        training = Training(choice.policy, shape, device, Attained(), default_lengths(choice))
        return training.update(choice.algorithm.sequences_per_update).seconds, choice

    # Of those with more work than what fits alone none is faster.
    less = choices if plain is None else choices[: choices.index(plain)]
    most = max(layers_by_stage(shape.num_layers, policy.layout))
    most //= policy.layout.virtual_pipeline_parallel_size
    found = [timed(left) for choice in less if (left := _fewest(choice, most, fits, fits_host)) is not None]
    if not found:
        smallest = [*choices, *(_with_layers(choice, most) for choice in choices)]
        return Chosen(plain or _smallest(smallest, shape))
    best = min(found, key=lambda one: one[0])
    if plain is None:
        return Chosen(best[1], f"{best[0]:.3g} s for an optimizer step, and without offloading nothing fits")
    alone = timed(plain)
    taken, other, how = (best, alone, "without") if best[0] < alone[0] else (alone, best, "with")
    policy = other[1].policy
    what = f"recompute {policy.recompute.described}"
    if policy.offload_activations is not None:
        what += f", offload {policy.offload_activations.described}"
    step = f"{taken[0]:.3g} s for an optimizer step"
    return Chosen(taken[1], f"{step}, and {other[0]:.3g} s {how} offloading ({what})")


def fitting(
    experiment: Experiment, shape: ModelShape, memory_bytes: int | None, hardware: Hardware | None = None
) -> Chosen:
    """`auto` replaced by settings with which a rank of the policy alone fits into a device's memory."""
    if memory_bytes is None:
        return Chosen(_with_nothing(experiment) if leaves_a_choice(experiment.policy) else experiment)
    return choose(
        experiment, shape, lambda choice: policy_memory(choice, shape).on_device <= memory_bytes, hardware
    )


def fitting_recompute(
    experiment: Experiment, shape: ModelShape, memory_bytes: int | None, hardware: Hardware | None = None
) -> Experiment:
    """The experiment of `fitting`."""
    return fitting(experiment, shape, memory_bytes, hardware).experiment


def _offload_is_chosen(policy: PolicyConfig) -> bool:
    return policy.offload_activations is not None and policy.offload_activations.layers == "auto"


def _with_fields(experiment: Experiment, **fields: object) -> Experiment:
    return experiment.model_copy(update={"policy": experiment.policy.model_copy(update=fields)})


def _with_nothing(experiment: Experiment) -> Experiment:
    """Nothing recomputed or offloaded where the plan has the choice."""
    policy = experiment.policy
    fields: dict[str, object] = {}
    if isinstance(policy.recompute, AutoRecompute):
        fields["recompute"] = NoRecompute()
    if _offload_is_chosen(policy):
        fields["offload_activations"] = None
    return _with_fields(experiment, **fields)


def _with_layers(experiment: Experiment, layers: int) -> Experiment:
    return _with_fields(experiment, offload_activations=ActivationOffloadConfig(layers=layers))


def _device(hardware: Hardware | None, policy: PolicyConfig) -> Hardware | None:
    """In the policy's precision; None where a rate is not known, and without an accelerator."""
    if hardware is None or hardware.cores or not hardware.host_rate:
        return None
    if policy.precision == "float32" and not hardware.operations_float32:
        return None
    return hardware.in_precision(policy.precision)


def _smallest(choices: list[Experiment], shape: ModelShape) -> Experiment:
    return min(choices, key=lambda choice: policy_memory(choice, shape).activations)


def _fewest(choice: Experiment, most: int, fits: Fits, fits_host: Fits) -> Experiment | None:
    """With the fewest offloaded layers with which it fits; None if it does with none."""
    if not fits(_with_layers(choice, most)):
        return None
    counts = range(1, most + 1)
    fewest = bisect_left(counts, True, key=lambda layers: fits(_with_layers(choice, layers)))
    left = _with_layers(choice, counts[fewest])
    return left if fits_host(left) else None


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
