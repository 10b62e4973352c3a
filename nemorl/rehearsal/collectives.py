"""Collectives of one rank among any number that do not exist: all of them have what this rank has.

A sum over a group is then the group's size times this rank's value, a maximum its own, and what is gathered
are copies. What another rank alone knows and this one reads (shapes of a pipeline stage's input, orders of a
decoding copy's leader) comes from `Others`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from .accelerator import DEVICE


@dataclass
class Others:
    """Values that other ranks would send, as this rank expects them."""

    hidden_shape: tuple[int, int, int] = (0, 0, 0)  # of a micro-batch between two pipeline stages
    broadcasts: deque[Tensor] = field(default_factory=deque)  # from other ranks, in their order

    def received(self, like: Tensor) -> Tensor | None:
        """The value of a point-to-point message of integers."""
        if like.dtype == torch.int64 and like.numel() == len(self.hidden_shape):
            return torch.tensor(self.hidden_shape)
        return None


# Operators get the operation as an object that cannot be read: the newest one that was asked for.
_operation: list[Any] = [dist.ReduceOp.SUM]


def use_pretended_groups() -> None:
    """Have `init_process_group` make a group whose other ranks do not exist, whatever it is asked for."""
    initialize, reduce = dist.init_process_group, dist.all_reduce

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        initialize("fake", store=FakeStore(), rank=options["rank"], world_size=options["world_size"])

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        _operation[0] = op
        try:
            return reduce(tensor, op, *args, **kwargs)
        finally:
            _operation[0] = dist.ReduceOp.SUM

    dist.Backend.backend_capability["fake"].append(DEVICE)
    dist.init_process_group, dist.all_reduce = init_process_group, all_reduce  # type: ignore[assignment]


def _group(boxed: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


class Collectives:
    """The results of `c10d` operators; `known` gives the value of a pretended tensor if it has one.

    `forget` is called for tensors whose value depends on what only the other ranks have.
    """

    def __init__(
        self, others: Others, known: Callable[[Tensor], Tensor | None], forget: Callable[[Tensor], None]
    ) -> None:
        self._others, self._known, self._forget = others, known, forget

    def run(self, func: Any, args: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        work = FakeWork().boxed()
        match name:
            case "allreduce_" | "allreduce_coalesced_":
                for tensor in args[0]:
                    value = self._known(tensor)
                    if value is not None and _operation[0] == dist.ReduceOp.SUM:
                        value.mul_(_group(args[1]).size())
                return work if name.endswith("coalesced_") else (args[0], work)
            case "reduce_scatter_tensor_coalesced_" | "allgather_into_tensor_coalesced_":
                for output in args[0]:  # weights and gradients
                    self._forget(output)
                return work
            case "broadcast_":
                self._broadcast(args[0][0], _group(args[1]), args[2])
                return args[0], work
            case "allgather_":
                for outputs, source in zip(args[0], args[1], strict=True):
                    for output in outputs:
                        self._copy(output, source)
                return args[0], work
            case "_allgather_base_":
                self._repeat(args[0], args[1])
                return args[0], work
            case "reduce_scatter_":
                for output, sources in zip(args[0], args[1], strict=True):
                    group = _group(args[2])
                    self._copy(output, sources[group.rank()], times=group.size())
                return args[0], work
            case "_reduce_scatter_base_":
                group = _group(args[2])
                self._copy(args[0], args[1].chunk(group.size())[group.rank()], times=group.size())
                return args[0], work
            case "alltoall_base_":
                if args[0].numel() == args[1].numel():
                    self._copy(args[0].view(-1), args[1].reshape(-1))
                else:
                    self._forget(args[0])
                return work
            case "alltoall_":
                for output, source in zip(args[0], args[1], strict=True):
                    self._copy(output, source)
                return args[0], work
            case "recv_":
                for tensor in args[0]:
                    value, sent = self._known(tensor), self._others.received(tensor)
                    if value is not None and sent is not None:
                        value.copy_(sent.view_as(value))
                    else:
                        self._forget(tensor)
                return work
            case "send" | "barrier":
                return work
        raise NotImplementedError(f"the rehearsal has no rule for the collective {name}")

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup, root: int) -> None:
        if root == group.rank():
            return
        value = self._known(tensor)
        if value is None or not self._others.broadcasts:
            self._forget(tensor)
            return
        value.copy_(self._others.broadcasts.popleft().view_as(value))

    def _copy(self, output: Tensor, source: Tensor, times: int = 1) -> None:
        value, result = self._known(source), self._known(output)
        if value is None or result is None:
            self._forget(output)
        else:
            result.copy_((value * times).view_as(result) if times > 1 else value.view_as(result))

    def _repeat(self, output: Tensor, source: Tensor) -> None:
        value, result = self._known(source), self._known(output)
        if value is None or result is None:
            self._forget(output)
        else:
            copies = result.numel() // max(1, value.numel())
            result.copy_(value.reshape(-1).repeat(copies).view_as(result))
