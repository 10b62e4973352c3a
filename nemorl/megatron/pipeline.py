"""Pipeline stages and recomputation, in Megatron's words."""

from collections.abc import Mapping
from typing import Any

from nemorl.config.policy import (
    FullRecompute,
    LayoutConfig,
    NoRecompute,
    RecomputeConfig,
    SelectiveRecompute,
)
from nemorl.models.layout_rules import norms_are_fused
from nemorl.models.shape import ModelShape

from .device import DeviceKind
from .kernels import LayerKernels


def pipeline_arguments(layout: LayoutConfig, kind: DeviceKind) -> Mapping[str, Any]:
    """Fields of Megatron's configuration for stages and the runs of layers in them."""
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    first, last = layout.layers_in_first_stage, layout.layers_in_last_stage
    interleaved = chunks > 1
    return {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks if interleaved else None,
        "num_layers_in_first_pipeline_stage": first,
        # Of two stages the first says it all, and Megatron divides by the number of stages that are left.
        "num_layers_in_last_pipeline_stage": None if stages == 2 and first is not None else last,
        # Interleaved stages exchange with one neighbour in both directions at a time, and of two stages both
        # neighbours are one: only separate sends keep the two apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # A gloo send may still be reading an output when the interleaved schedule would free it.
        "deallocate_pipeline_outputs": stages > 1 and not (interleaved and kind == "cpu"),
    }


def recompute_arguments(recompute: RecomputeConfig) -> Mapping[str, Any]:
    """Fields of Megatron's configuration for what is computed again in the backward pass."""
    if isinstance(recompute, NoRecompute):
        return {}
    if isinstance(recompute, FullRecompute):
        return {
            "recompute_granularity": "full",
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


def recompute_notes(shape: ModelShape, recompute: RecomputeConfig, layers: LayerKernels) -> dict[str, str]:
    """A line for a run's header where something that is asked for has nothing to do."""
    asked = isinstance(recompute, SelectiveRecompute) and "layernorm" in recompute.modules
    if not (asked and layers == "transformer_engine" and norms_are_fused(shape)):
        return {}
    return {"recomputation": "not of norms: Transformer Engine computes them with the matrices behind them"}


def micro_batches_in_a_row(num_micro_batches: int, stages: int) -> int:
    """How many micro-batches an interleaved stage runs through one of its runs of layers before the next.

    The fewest that Megatron's schedule takes: at least as many as there are stages, and so that the last
    group is whole or also has that many. Raises ValueError for fewer micro-batches than stages.
    """
    for group in range(stages, num_micro_batches + 1):
        left = num_micro_batches % group
        if left == 0 or left >= stages:
            return group
    raise ValueError(
        f"{num_micro_batches} micro-batches cannot keep {stages} interleaved pipeline stages busy: with "
        "policy.layout.virtual_pipeline_parallel_size above 1 there have to be as many as stages"
    )
