"""All layouts of an experiment's model on a number of devices, best first. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemorl.config.checks.batches import data_parallel_divides, interleaved_stages_have_work
from nemorl.config.experiment import Experiment
from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.models.layout_rules import layout_problems, recompute_problems
from nemorl.models.shape import ModelShape

from .memory import ITEM_SIZE, ProcessMemory, policy_memory

ORDER = (
    "Best first: those that fit, then those whose copy of the model takes the fewest processes (they talk in "
    "every layer, copies once an optimizer step), then those of which a process sends the fewest bytes for a "
    "token within its copy."
)


@dataclass(frozen=True)
class LayoutChoice:
    """One layout, and what it costs."""

    layout: LayoutConfig
    memory: ProcessMemory  # of the fullest rank
    fits: bool | None  # None where the memory of a device is not known
    bytes_per_token: int  # that a process sends within its copy, forward and backward
    idle: float  # share of the time in which a stage waits for others, with four micro-batches a stage

    @property
    def copy_size(self) -> int:
        """Processes of one copy of the model."""
        layout = self.layout
        return layout.world_size // layout.data_parallel_size


def list_layouts(
    experiment: Experiment, shape: ModelShape, num_devices: int, memory_bytes: int | None
) -> list[LayoutChoice]:
    """Every layout of evenly filled stages that uses all GPUs, in the order of `ORDER`.

    Under tensor parallelism sequence parallelism is always on: it sends as much and keeps less.
    """
    choices = [
        _choice(experiment, shape, layout, memory_bytes)
        for layout in _layouts(shape, num_devices)
        if _is_valid(experiment, shape, layout)
    ]
    return sorted(
        choices, key=lambda c: (c.fits is False, c.copy_size, c.bytes_per_token, c.idle, c.memory.total)
    )


def _layouts(shape: ModelShape, num_devices: int) -> Iterator[LayoutConfig]:
    for stages in _divisors(num_devices):
        for tensor in _divisors(num_devices // stages):
            for context in _divisors(num_devices // stages // tensor):
                for chunks in _divisors(shape.num_layers // stages) if stages > 1 else (1,):
                    yield from _with_experts(
                        shape,
                        LayoutConfig(
                            tensor_parallel_size=tensor,
                            sequence_parallel=tensor > 1,
                            pipeline_parallel_size=stages,
                            virtual_pipeline_parallel_size=chunks,
                            context_parallel_size=context,
                            data_parallel_size=num_devices // (stages * tensor * context),
                        ),
                    )


def _with_experts(shape: ModelShape, layout: LayoutConfig) -> Iterator[LayoutConfig]:
    """The same with every way to lay experts over the processes of a stage."""
    if shape.moe is None:
        yield layout
        return
    for experts in _divisors(layout.stage_size):
        for tensor in _divisors(layout.stage_size // experts):
            sizes = {"expert_parallel_size": experts, "expert_tensor_parallel_size": tensor}
            yield layout.model_copy(update=sizes)


def _is_valid(experiment: Experiment, shape: ModelShape, layout: LayoutConfig) -> bool:
    policy, algorithm = _laid_out(experiment, layout).policy, experiment.algorithm
    # Context parallelism pads sequences to two chunks a rank, so more ranks would compute padding only.
    has_work = (
        layout.context_parallel_size == 1 or policy.max_sequence_length >= 2 * layout.context_parallel_size
    )
    return has_work and not (
        any(layout_problems(shape, layout, adapters=policy.lora is not None))
        or any(recompute_problems(shape, layout, policy.recompute))
        or any(data_parallel_divides(policy, algorithm))
        or any(interleaved_stages_have_work(policy, algorithm))
    )


def _choice(
    experiment: Experiment, shape: ModelShape, layout: LayoutConfig, memory_bytes: int | None
) -> LayoutChoice:
    laid_out = _laid_out(experiment, layout)
    memory = policy_memory(laid_out, shape)
    stages = layout.pipeline_parallel_size
    return LayoutChoice(
        layout,
        memory,
        None if memory_bytes is None else memory.on_device <= memory_bytes,
        _bytes_per_token(shape, laid_out.policy),
        # (stages - 1) of the time of a micro-batch's layers, compared with four micro-batches a stage
        (stages - 1) / (stages - 1 + 4 * stages * layout.virtual_pipeline_parallel_size),
    )


def _bytes_per_token(shape: ModelShape, policy: PolicyConfig) -> int:
    """Sent by a process for a token of its copy, in one forward and backward pass.

    Rings: a gathering or scattering of n elements over r ranks makes each send (r - 1) / r of them. Every
    layer gathers and scatters the hidden state twice under TP, in both directions; gathers keys and values
    under CP, and scatters their gradients; brings tokens to experts and back under EP and ETP, in both
    directions. A stage hands a hidden state on and a gradient back, once for each of its runs of layers.
    """
    layout, hidden = policy.layout, shape.hidden_size
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    own = 1 / context  # of a token: ranks of CP have their own
    layers = shape.num_layers / layout.pipeline_parallel_size
    elements = layers * 8 * hidden * own * _others(tensor)
    elements += layers * 2 * _keys_and_values(shape) / tensor * _others(context)
    if shape.moe is not None:
        with_experts = sum(map(shape.is_moe, range(shape.num_layers))) / layout.pipeline_parallel_size
        sharing = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        copies = shape.moe.top_k * layout.expert_tensor_parallel_size
        elements += with_experts * 4 * copies * hidden * own / tensor * _others(sharing)
    if layout.pipeline_parallel_size > 1:
        elements += 2 * layout.virtual_pipeline_parallel_size * hidden * own / tensor
    return round(elements * ITEM_SIZE[policy.precision])


def _keys_and_values(shape: ModelShape) -> int:
    if shape.mla is None:
        return 2 * shape.num_key_value_heads * shape.head_dim
    return shape.num_attention_heads * (shape.mla.head_dim + shape.mla.rotary_dim + shape.mla.value_dim)


def _others(ranks: int) -> float:
    """Of what ranks share, the part that one of them has to get from or send to the others."""
    return (ranks - 1) / ranks


def _laid_out(experiment: Experiment, layout: LayoutConfig) -> Experiment:
    policy = experiment.policy.model_copy(update={"layout": layout})
    return experiment.model_copy(update={"policy": policy})


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
