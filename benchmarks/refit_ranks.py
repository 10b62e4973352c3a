"""Processes of the refit benchmark: policy ranks and ranks of engines, which do a refit in two ways."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import PolicyRank, policy_slices
from nemorl.models.local_view import local_view
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, SenderLayout, SendReport
from nemorl.weights.session import RefitSession

Gathering = Sequence[tuple[str, Sequence[tuple[int, TensorSlice]]]]  # by tensor: who brings which box


class Rank:
    """One process of either side."""

    def become_sender(self, shape: ModelShape, place: PolicyRank) -> None:
        """Hold a policy's shard in float32, of zeros until `load`."""
        self._slices = policy_slices(shape, place)
        self._parameters = _allocate(self._slices, torch.float32)
        self.exchange: Any = WeightSender(self._slices, lambda: self._parameters)

    def become_receiver(self, shape: ModelShape, place: PolicyRank, dtype: str) -> None:
        """Hold an engine's shard, written in place."""
        self._slices = policy_slices(shape, place)
        self._parameters = _allocate(self._slices, getattr(torch, dtype))
        self.exchange = WeightReceiver(
            self._slices, lambda: self._parameters, lambda version: None, in_place=True
        )

    def load(self, folder: Path) -> None:
        """Take the weights of an HF folder."""
        HfFolder(folder).load_into(self._parameters, self._slices)

    def sums(self) -> list[float]:
        """The sum of each parameter, to compare the two ways."""
        return [float(values.double().sum()) for values in self._parameters.values()]

    def clear(self) -> None:
        """Forget the weights."""
        for values in self._parameters.values():
            values.zero_()

    def join(self, meeting: Path, rank: int, size: int, receivers: Sequence[int]) -> None:
        """Become a member of the default group, by which rank 0 reaches all receivers."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        self._group = dist.new_group([0, *receivers])

    def gather_and_broadcast(self, gathering: Gathering, dtype: str) -> None:
        """Each HF tensor is made whole on rank 0, which sends it to every receiver."""
        rank, wire = dist.get_rank(), getattr(torch, dtype)
        sends = isinstance(self.exchange, WeightSender)
        mine: dict[str, list[TensorSlice]] = {}
        for part in self._slices:
            mine.setdefault(part.name, []).append(part)
        for name, pieces in gathering:
            if sends and rank:
                for holder, piece in pieces:
                    if holder == rank:
                        dist.send(local_view(self._parameters, piece).to(wire).contiguous(), 0)
                continue
            whole = torch.empty(pieces[0][1].shape, dtype=wire)
            for holder, piece in pieces if rank == 0 else ():
                if holder:
                    arrived = torch.empty(piece.size, dtype=wire)
                    dist.recv(arrived, holder)
                    whole[piece.box] = arrived
                else:
                    whole[piece.box] = local_view(self._parameters, piece).to(wire)
            dist.broadcast(whole, 0, group=self._group)
            for part in mine.get(name, ()) if not sends else ():
                local_view(self._parameters, part).copy_(whole[part.box])

    def begin_peak(self) -> None:
        """Measure memory from now on."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _kilobytes("VmRSS")

    def peak_bytes(self) -> int:
        """The most memory since `begin_peak`, beyond what there was then."""
        return 1024 * max(0, _kilobytes("VmHWM") - self._before)


class Ranks:
    """Processes that are called together; as senders or receivers of a `WeightExchange`."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection[Any, Any]] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self.active = count  # the first so many take part

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on the first ranks, each with its own arguments."""
        ends = self._ends[: len(arguments)]
        for end, given in zip(ends, arguments, strict=True):
            end.send((method, given))
        answers = [end.recv() for end in ends]
        for error, _ in answers:
            if error is not None:
                raise error
        return [result for _, result in answers]

    def all(self, method: str, *given: Any) -> list[Any]:
        """Call a method on all that take part."""
        return self.each(method, [given] * self.active)

    def describe(self) -> list[SenderLayout] | list[ReceiverLayout]:
        """As the exchange asks."""
        return self.all("exchange.describe")

    def prepare(self, parts: Sequence[Part]) -> None:
        """As the exchange asks."""
        self.each("exchange.prepare", [(part,) for part in parts])

    def send(self, session: RefitSession) -> list[SendReport]:
        """As the exchange asks."""
        return self.all("exchange.send", session)

    def receive(self, session: RefitSession) -> list[ReceiveReport]:
        """As the exchange asks."""
        return self.all("exchange.receive", session)

    def commit(self, version: int) -> None:
        """As the exchange asks."""
        self.all("exchange.commit", version)

    def abandon(self) -> None:
        """As the exchange asks."""
        self.all("exchange.abandon")

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(end: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)
    rank = Rank()
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            return
        target: Callable[..., Any] = rank  # type: ignore[assignment]
        for name in method.split("."):
            target = getattr(target, name)
        try:
            answer = None, target(*arguments)
        except Exception as error:  # noqa: BLE001 - raised where it was called
            answer = error, None
        end.send(answer)


def _allocate(slices: Sequence[TensorSlice], dtype: torch.dtype) -> Mapping[str, Tensor]:
    sizes: dict[str, int] = {}
    for part in slices:
        steps = zip(part.size, part.strides, strict=True)
        last = part.offset + sum((extent - 1) * stride for extent, stride in steps)
        sizes[part.param] = max(sizes.get(part.param, 0), last + 1)
    return {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")
