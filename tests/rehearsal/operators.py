"""Short programs on the pretended device, for a process of their own; lines are looked up by comments."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from nemorl.rehearsal.execution import Event, Execution


@dataclass
class Outcome:
    values: dict[str, Any]
    waits: list[tuple[Event, int]]
    wrong_devices: list[tuple[Event, int]]
    uploads: list[tuple[Event, int]]


def _outcome(execution: Execution, **values: Any) -> Outcome:
    events = (execution.synchronizations, execution.wrong_devices, execution.uploads)
    return Outcome(values, *(list(counted.items()) for counted in events))


def known_values() -> Outcome:
    with Execution() as execution, execution.phase("values"):
        counts = torch.tensor([3, 5], device="cuda")
        counts[1] = 7
        places = torch.arange(6, device="cuda").view(2, 3)[1]
        scores = torch.randn(8, 4, device="cuda")
        chosen = scores.topk(2, dim=1).indices
        by_expert = torch.zeros(8, 4, dtype=torch.int32, device="cuda").scatter(1, chosen, 1).sum(0)
        counts += scores.sum().long() * 0  # no value, so none is left
        return _outcome(
            execution,
            places=places.tolist(),
            by_expert=by_expert.tolist(),
            unknown=counts.tolist(),
            real=torch.arange(3).add(1).tolist(),
            on=(scores @ scores.t()).device.type,
        )


def waits() -> Outcome:
    with Execution() as execution, execution.phase("waits"):
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        mask = torch.tensor([True, False, True, False]).to("cuda")
        (x * 2).sum().backward()
        x.detach().sum().item()  # item
        x.detach().cpu()  # copy
        x.detach()[mask]  # index
        mask.nonzero()  # nonzero
        torch.cuda.synchronize()  # all
        y = torch.zeros(4, 4, device="cuda")
        y[mask] = 0.0  # no wait on a GPU
        y.copy_(torch.zeros(4, 4).pin_memory(), non_blocking=True)
        torch.empty(4, 4, pin_memory=True).copy_(y, non_blocking=True)
        assert x.grad is not None
        return _outcome(execution, gradient=x.grad.device.type)


def wrong_devices() -> Outcome:
    with Execution() as execution, execution.phase("devices"):
        x = torch.randn(3, device="cuda")
        y = x + torch.ones(3)  # wrong
        z = x * torch.tensor(2.0)  # a number
        return _outcome(execution, on={y.device.type, z.device.type})


def memory() -> dict[str, Any]:
    megabyte = 2**20
    with Execution() as execution:
        with execution.phase("two"):
            a = torch.zeros(megabyte, dtype=torch.uint8, device="cuda")
            b = torch.zeros(2 * megabyte, dtype=torch.uint8, device="cuda")
            view = a.view(2, -1)[1]
            execution.memory.label("weights", [a])
            del b
        with execution.phase("one"):
            del a
            c = torch.zeros(megabyte, dtype=torch.uint8, device="cuda")
        held = execution.memory.total
        del view
        after_view = execution.memory.total
        c.untyped_storage().resize_(0)
        copies = [torch.empty(size * megabyte, dtype=torch.uint8, pin_memory=True) for size in (4, 5)]
        peaks = execution.memory.peaks
        return {
            "copies_on_host": [not isinstance(copy, FakeTensor) for copy in copies],
            "two": (peaks["two"].num_bytes / megabyte, peaks["two"].location),
            "one": (peaks["one"].num_bytes / megabyte, peaks["one"].parts),
            "held": held / megabyte,
            "after_view": after_view / megabyte,
            "resized": execution.memory.total / megabyte,
        }


def collectives() -> dict[str, Any]:
    with Execution() as execution:
        dist.init_process_group("nccl", rank=3, world_size=1024)
        group = dist.new_group(list(range(8)))
        ones = torch.ones(2, dtype=torch.int64, device="cuda")
        dist.all_reduce(ones)
        most = torch.tensor([5], device="cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        gathered = [torch.empty(2, dtype=torch.int64, device="cuda") for _ in range(8)]
        dist.all_gather(gathered, ones, group=group)
        named: list[Any] = [None] * 8
        dist.all_gather_object(named, {"a": 1}, group=group)
        execution.others.broadcasts.append(torch.tensor([42]))
        sent = torch.tensor([0], device="cuda")
        dist.broadcast(sent, src=0)
        return {
            "sum": ones.tolist(),
            "max": most.tolist(),
            "gathered": {tuple(part.tolist()) for part in gathered},
            "objects": named[7],
            "broadcast": sent.tolist(),
            "rank": dist.get_rank(),
        }
