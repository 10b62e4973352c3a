"""Process groups: joining the policy's processes and laying Megatron's axes over them.

Pipeline stages and recomputation, in Megatron's words.

Where processes of several machines find each other: a store that one process serves by TCP.
"""

import fcntl
import logging
import random
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from nemorl.config.policy import FullRecompute, LayoutConfig, NoRecompute, RecomputeConfig, SelectiveRecompute
from nemorl.models.layout_rules import norms_are_fused
from nemorl.models.shape import ModelShape

from .device import DeviceKind, communication_backend, use_interface
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
        # Interleaved stages exchange with one neighbor in both directions at a time, and of two stages both
        # neighbors are the same: only separate sends keep the two apart.
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


LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_REQUEST = struct.Struct("256s")
_ADDRESS = slice(20, 24)  # in the kernel's answer


def store_at(rendezvous: str, timeout: timedelta) -> PrefixStore:
    """A connection to the store of `tcp://host:port/name`; every name has keys of its own."""
    place = urlsplit(rendezvous)
    host, port = place.hostname, place.port
    assert host is not None, f"{rendezvous} names no host"
    assert port is not None, f"{rendezvous} names no port"
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(place.path, store)


def interface_towards(rendezvous: str) -> str | None:
    """The network interface of this machine that reaches the store; None where none has that address.

    Else gloo would take the one of the machine's name, which on many machines is a loopback address.
    """
    place = urlsplit(rendezvous)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((place.hostname, place.port))  # sends nothing
        own = way.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                asked = _REQUEST.pack(name.encode())
                if socket.inet_ntoa(fcntl.ioctl(way, _SIOCGIFADDR, asked)[_ADDRESS]) == own:
                    return name
    return None


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
            f"policy.layout requires {layout.world_size} processes "
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


def leave() -> None:
    """Undo `join`; another layout can be joined afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
