"""Processes of the refit benchmark: policy ranks and ranks of engines, which do a refit in two ways."""

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meter import peak, start_of_peak
from refit_overlap import SteppingSender, Way
from safetensors.torch import save_file
from torch import Tensor

from nemorl.generation.torch_engine.engine import ModelRunner
from nemorl.megatron.device import release_memory
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import PolicyRank, policy_slices
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view
from nemorl.weights import endpoints
from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitSession,
    SenderLayout,
    SendReport,
    Transport,
)

TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "gloo", "files")
if find_spec("nixl") is not None:
    TRANSPORTS += ("nixl",)
# One tensor in this number is checked in a refit between GPUs; on a CPU it is each.
CHECKED_ON_GPUS = 16
LESS_CHECKED: dict[str, Transport] = {f"gloo, 1 in {CHECKED_ON_GPUS} checked": "gloo"}
ON_ONE_GPU: tuple[Transport, ...] = ("cuda_ipc", "shared_memory")
Gathering = Sequence[tuple[str, Sequence[tuple[int, TensorSlice]]]]  # by tensor: who brings which box


class Rank:
    """One process of either side, with its weights on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transports = (*TRANSPORTS, *LESS_CHECKED) if device.type == "cpu" else ON_ONE_GPU

    def become_sender(self, shape: ModelShape, place: PolicyRank, dtype: str = "float32") -> None:
        """Hold a policy's shard, of zeros until `load`."""
        self._slices = policy_slices(shape, place)
        self._parameters = _allocate(self._slices, getattr(torch, dtype), self._device)
        self.exchanges: dict[str, Any] = {
            way: WeightSender(self._slices, lambda: self._parameters, self._device)
            for way in self._transports
        }

    def become_receiver(self, shape: ModelShape, place: PolicyRank, dtype: str) -> None:
        """Hold an engine's shard, written in place."""
        self._slices = policy_slices(shape, place)
        self._parameters = _allocate(self._slices, getattr(torch, dtype), self._device)
        self.exchanges = {
            way: WeightReceiver(self._slices, lambda: self._parameters, lambda version: None, in_place=True)
            for way in self._transports
        }

    def become_embedded_engine(self, folder: Path) -> None:
        """Be an embedded engine, which receives into a second copy of the weights and then uses it."""
        dtype = torch.float32
        model = ModelRunner(
            load_shape(folder), max_kv_tokens=64, max_positions=64, device=self._device, dtype=dtype
        )
        model.load(folder)
        self.exchanges = {
            way: WeightReceiver(model.slices(), model.staging_parameters, lambda version: model.commit())
            for way in self._transports
        }

    def load(self, folder: Path) -> None:
        """Take the weights of an HF folder."""
        HfFolder(folder).load_into(self._parameters, self._slices)

    def draw(self) -> None:
        """Random weights."""
        for values in self._parameters.values():
            values.normal_()

    def spoil_next(self) -> None:
        """Change one element of what comes next before it is checked, as a fault on the way would."""
        module: Any = endpoints
        fingerprint = module.queue_fingerprint

        def spoiled(values: Tensor, *place: Any) -> Any:
            module.queue_fingerprint = fingerprint
            values.view(-1)[0] += 1
            return fingerprint(values, *place)

        module.queue_fingerprint = spoiled

    def shard_bytes(self) -> int:
        """Bytes of this rank's slices."""
        sizes = (part.num_elements * self._parameters[part.param].element_size() for part in self._slices)
        return sum(sizes)

    def sums(self) -> list[float]:
        """The sum of each parameter, to compare the two ways."""
        return [float(values.double().sum()) for values in self._parameters.values()]

    def release(self) -> None:
        """Return memory that torch caches to the device."""
        if self._device.type != "cpu":
            release_memory("cuda")

    def clear(self) -> None:
        """Forget the weights."""
        for values in self._parameters.values():
            values.zero_()

    def join(self, rendezvous: Path, rank: int, size: int, receivers: Sequence[int]) -> None:
        """Become a member of the default group, by which rank 0 reaches all receivers."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        self._group = dist.new_group([0, *receivers])

    def gather_and_broadcast(self, gathering: Gathering, dtype: str) -> None:
        """Each HF tensor is made whole on rank 0, which sends it to every receiver."""
        rank, wire = dist.get_rank(), getattr(torch, dtype)
        sends = isinstance(self.exchanges[self._transports[0]], WeightSender)
        mine: dict[str, list[TensorSlice]] = {}
        for part in self._slices:
            mine.setdefault(part.name, []).append(part)
        for name, pieces in gathering:
            if sends and rank:
                self._send_to_rank_0(pieces, wire)
                continue
            whole = self._made_whole(pieces, wire)
            dist.broadcast(whole, 0, group=self._group)
            for part in mine.get(name, ()) if not sends else ():
                local_view(self._parameters, part).copy_(whole[part.box])

    def gather_and_save(self, gathering: Gathering, dtype: str, folder: Path) -> None:
        """Rank 0 writes an HF folder, of which every receiver reads what it needs."""
        rank, wire = dist.get_rank(), getattr(torch, dtype)
        if isinstance(self.exchanges[self._transports[0]], WeightReceiver):
            dist.barrier()
            HfFolder(folder).load_into(self._parameters, self._slices)
            return
        tensors = {}
        for name, pieces in gathering:
            if rank:
                self._send_to_rank_0(pieces, wire)
            else:
                tensors[name] = self._made_whole(pieces, wire)
        if rank == 0:
            save_file(tensors, folder / "model.safetensors")
        dist.barrier()

    def _send_to_rank_0(self, pieces: Sequence[tuple[int, TensorSlice]], wire: torch.dtype) -> None:
        for holder, piece in pieces:
            if holder == dist.get_rank():
                dist.send(local_view(self._parameters, piece).to(wire).contiguous(), 0)

    def _made_whole(self, pieces: Sequence[tuple[int, TensorSlice]], wire: torch.dtype) -> Tensor:
        """Of an HF tensor; its values are those of the policy on rank 0 only."""
        whole = torch.empty(pieces[0][1].shape, dtype=wire)
        for holder, piece in pieces if dist.get_rank() == 0 else ():
            if holder:
                arrived = torch.empty(piece.size, dtype=wire)
                dist.recv(arrived, holder)
                whole[piece.box] = arrived
            else:
                whole[piece.box] = local_view(self._parameters, piece).to(wire)
        return whole

    def exchange(self, way: str, method: str, *given: Any) -> Any:
        """This rank's part in an exchange."""
        return getattr(self.exchanges[way], method)(*given)

    def become_stepping_sender(self, model: Path, rank: int, rendezvous: str) -> None:
        """Hold a policy with its optimizer."""
        self.exchanges = {"shared_memory": SteppingSender(model, rank, rendezvous)}

    def choose(self, way: Way) -> None:
        """When the next refit takes the optimizer step."""
        self.exchanges["shared_memory"].way = way

    def step_seconds(self) -> float:
        """Of the last optimizer step."""
        return float(self.exchanges["shared_memory"].step_seconds)

    def begin_peak(self) -> None:
        """Measure memory from now on."""
        self._before = start_of_peak("cpu")

    def peak_bytes(self) -> int:
        """The most memory since `begin_peak`, beyond what there was then."""
        return peak("cpu") - self._before

    def cpu_seconds(self) -> float:
        """Of all threads of this process, since it began."""
        return time.process_time()


class Ranks:
    """Processes that are called together."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection[Any, Any]] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, device), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self.active = count  # the number of first processes that take part

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

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class Side:
    """The processes of one side in an exchange of one way (`SenderGroup` and `ReceiverGroup`)."""

    ranks: Ranks
    way: str

    async def describe(self) -> list[SenderLayout] | list[ReceiverLayout]:
        """As the exchange asks."""
        return await self._all("describe")

    async def prepare(self, parts: Sequence[Part]) -> None:
        """As the exchange asks."""
        await asyncio.to_thread(self.ranks.each, "exchange", [(self.way, "prepare", p) for p in parts])

    async def send(self, session: RefitSession) -> list[SendReport]:
        """As the exchange asks."""
        return await self._all("send", session)

    async def receive(self, session: RefitSession) -> list[ReceiveReport]:
        """As the exchange asks."""
        return await self._all("receive", session)

    async def commit(self, version: int) -> None:
        """As the exchange asks."""
        await self._all("commit", version)

    async def abandon(self) -> None:
        """As the exchange asks."""
        await self._all("abandon")

    async def _all(self, method: str, *given: Any) -> list[Any]:
        # In a thread, because both sides of a refit wait for each other.
        return await asyncio.to_thread(self.ranks.all, "exchange", self.way, method, *given)


def _serve(end: "Connection[Any, Any]", device: str) -> None:
    torch.set_num_threads(1)
    rank = Rank(torch.device(device))
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            return
        try:
            answer: tuple[Exception | None, Any] = None, getattr(rank, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised where it was called
            answer = error, None
        end.send(answer)


def _allocate(
    slices: Sequence[TensorSlice], dtype: torch.dtype, device: torch.device
) -> Mapping[str, Tensor]:
    sizes: dict[str, int] = {}
    for part in slices:
        steps = zip(part.size, part.strides, strict=True)
        last = part.offset + sum((extent - 1) * stride for extent, stride in steps)
        sizes[part.param] = max(sizes.get(part.param, 0), last + 1)
    return {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()}
