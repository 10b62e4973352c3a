"""All layouts of an experiment's model on a number of devices, best first. Imports no torch."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemorl.config.checks import data_parallel_divides, interleaved_stages_have_work
from nemorl.config.experiment import Experiment
from nemorl.config.policy import ActivationOffloadConfig, LayoutConfig, RecomputeConfig
from nemorl.models.layout_rules import layout_problems, recompute_problems
from nemorl.models.shape import ModelShape

from .hardware import Hardware
from .memory import ITEM_SIZE, ProcessMemory, policy_memory
from .operations import sent_elements
from .recompute import fitting

ORDER = (
    "Best first: those that fit, then fewest processes per model copy (they communicate in every layer; "
    "copies once per optimizer step), then fewest bytes sent per token."
)


@dataclass(frozen=True)
class LayoutChoice:
    layout: LayoutConfig
    recompute: RecomputeConfig  # the choice, where the experiment leaves it to the plan
    offload: ActivationOffloadConfig | None  # the same
    reason: str  # of the choice, in seconds, where something could be offloaded
    memory: ProcessMemory  # of the fullest rank
    fits: bool | None  # None where the memory of a device is not known
    bytes_per_token: int  # that a process sends within its copy, forward and backward
    idle: float  # share of the time in which a stage waits for others, with four micro-batches a stage


def list_layouts(
    experiment: Experiment,
    shape: ModelShape,
    num_devices: int,
    memory_bytes: int | None,
    allowed: Callable[[LayoutConfig], bool] = lambda layout: True,
    hardware: Hardware | None = None,
) -> list[LayoutChoice]:
    """Every allowed layout of evenly filled stages that uses all GPUs, in the order of `ORDER`.

    Without the rates of `hardware` the plan chooses no offloading.
    """
    algorithm, choices = experiment.algorithm, []
    for layout in _layouts(shape, num_devices):
        policy = experiment.policy.model_copy(update={"layout": layout})
        # Context parallelism pads sequences to two chunks a rank, so more ranks would compute padding only.
        ranks = layout.context_parallel_size
        if (
            not allowed(layout)
            or (ranks > 1 and policy.max_sequence_length < 2 * ranks)
            or any(layout_problems(shape, layout, adapters=policy.lora is not None))
            or any(recompute_problems(shape, layout, policy.recompute))
            or any(data_parallel_divides(policy, algorithm))
            or any(interleaved_stages_have_work(policy, algorithm))
        ):
            continue
        laid_out = experiment.model_copy(update={"policy": policy})
        chosen = fitting(laid_out, shape, memory_bytes, hardware)
        settings, memory = chosen.experiment.policy, policy_memory(chosen.experiment, shape)
        fits = None if memory_bytes is None else memory.on_device <= memory_bytes
        stages = layout.pipeline_parallel_size
        # (stages - 1) of the time of a micro-batch's layers, compared with four micro-batches a stage
        idle = (stages - 1) / (stages - 1 + 4 * stages * layout.virtual_pipeline_parallel_size)
        traffic = round(sum(sent_elements(shape, layout).values()) * ITEM_SIZE[policy.precision])
        how = settings.recompute, settings.offload_activations, chosen.reason
        choices.append(LayoutChoice(layout, *how, memory, fits, traffic, idle))

    def order(choice: LayoutChoice) -> tuple[float, ...]:
        copy_size = choice.layout.world_size // choice.layout.data_parallel_size
        return choice.fits is False, copy_size, choice.bytes_per_token, choice.idle, choice.memory.total

    return sorted(choices, key=order)


def _layouts(shape: ModelShape, num_devices: int) -> Iterator[LayoutConfig]:
    for stages in _divisors(num_devices):
        stage_size = num_devices // stages
        chunk_counts = _divisors(shape.num_layers // stages) if stages > 1 else [1]
        expert_sizes = [(1, 1)]
        if shape.moe is not None:
            sizes = _divisors(stage_size)
            expert_sizes = [(size, tensor) for size in sizes for tensor in _divisors(stage_size // size)]
        for tensor in _divisors(stage_size):
            for context in _divisors(stage_size // tensor):
                for chunks, (experts, expert_tensor) in itertools.product(chunk_counts, expert_sizes):
                    yield LayoutConfig(
                        tensor_parallel_size=tensor,
                        sequence_parallel=tensor > 1,  # sends as much and keeps less
                        pipeline_parallel_size=stages,
                        virtual_pipeline_parallel_size=chunks,
                        context_parallel_size=context,
                        data_parallel_size=stage_size // (tensor * context),
                        expert_parallel_size=experts,
                        expert_tensor_parallel_size=expert_tensor,
                    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
