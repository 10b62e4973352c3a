"""Process groups: joining the policy's processes and laying Megatron's axes over them."""

import logging
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from nemorl.config.policy import LayoutConfig

from .context import ContextShare
from .device import DeviceKind, communication_backend, use_interface
from .meeting import LOOPBACK_INTERFACE, interface_towards, store_at

logger = logging.getLogger(__name__)

# The model has no dropout and its weights are read, not drawn: the seed only makes the generators defined.
SEED = 1234


def join(
    layout: LayoutConfig,
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    device: DeviceKind,
    deadline_seconds: float,
) -> None:
    """Meet the other processes and make Megatron's groups in its order tp, cp, ep, dp, pp.

    `rendezvous` is a file for processes of one machine, such as `file:///dev/shm/run/policy`, or a store
    that some process serves, such as `tcp://10.0.0.1:29500/policy`; its path keeps groups apart. A collective
    that takes longer than `deadline_seconds` fails on every rank.
    """
    if world_size != layout.world_size:
        raise ValueError(
            f"policy.layout wants {layout.world_size} processes "
            f"({layout.tensor_parallel_size} TP x {layout.pipeline_parallel_size} PP x "
            f"{layout.context_parallel_size} CP x {layout.data_parallel_size} DP) "
            f"but {world_size} were started"
        )
    timeout = timedelta(seconds=deadline_seconds)
    where: dict[str, Any] = {"init_method": rendezvous}
    interface: str | None = LOOPBACK_INTERFACE
    if rendezvous.startswith("tcp:"):
        where, interface = {"store": store_at(rendezvous, timeout)}, interface_towards(rendezvous)
    if interface is not None:
        use_interface(device, interface)
    dist.init_process_group(
        communication_backend(device),
        **where,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    chunks = layout.virtual_pipeline_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        distributed_timeout_minutes=deadline_seconds / 60,
        create_gloo_process_groups=False,
    )
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)


def context_share() -> ContextShare:
    """This rank's part of every sequence."""
    return ContextShare(
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_group(),
    )


def leave() -> None:
    """Undo `join`; another layout can be joined afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
