"""Process groups: joining the policy's processes and laying Megatron's axes over them."""

import fcntl
import os
import random
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from nemorl.config.policy import LayoutConfig

from .device import DeviceKind

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def _interface_towards(host: str, port: int) -> str | None:
    """The network interface that reaches an address, if any: gloo's choice is on many machines a loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, port))  # sends nothing
        own = way.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(way, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None


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
    start_seconds: float = 600.0,
) -> None:
    """Meet the other processes and make Megatron's groups in its order tp, cp, ep, dp, pp.

    `rendezvous` is a file of this machine, such as `file:///dev/shm/run/policy`, or a store such as
    `tcp://10.0.0.1:29500/policy`, whose path keeps groups apart. A collective fails after `deadline_seconds`;
    at a store, the last process may come `start_seconds` after the first one.
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
    interface: str | None = "lo"
    if rendezvous.startswith("tcp:"):
        address = urlsplit(rendezvous)
        host, port = str(address.hostname), int(address.port or 0)
        store: Store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        store = PrefixStore(address.path, store)  # every name has keys of its own
        store.set(f"started/{rank}", "")
        store.wait([f"started/{rank}" for rank in range(world_size)], timedelta(seconds=start_seconds))
        where = {"store": store}
        interface = _interface_towards(host, port)
    if device == "cpu" and interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, **where, rank=rank, world_size=world_size, timeout=timeout)
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
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
