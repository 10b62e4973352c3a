"""Both sides of an exchange in threads and in processes, behind the protocols that the driver calls."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nemorl.cluster.errors import DeadlineExceeded
from nemorl.config.policy import LayoutConfig
from nemorl.errors import NemorlError, RunError
from nemorl.models.layout import PolicyRank, hf_tensors, policy_rank, policy_slices
from nemorl.models.shape import ModelShape, Rope
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view
from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.files import FileSender, StoredPiece, StoredVersion
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitSession,
    SenderLayout,
    SendReport,
)
from nemorl.weights.process_group import GroupReceiver, GroupSender
from nemorl.weights.shared_memory import SocketReceiver, SocketSender
from tests.weights.layouts import whole

SHAPE = ModelShape(
    family="qwen2",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    vocab_size=101,
    tied_embeddings=True,
    rope=Rope(1e4),
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_ids=(1,),
    torch_dtype="float32",
)
NIXL_STAND_IN = Path(__file__).parent / "nixl_stand_in"
NO_OTHERS: Mapping[str, torch.dtype] = MappingProxyType({})
TP2 = LayoutConfig(tensor_parallel_size=2)
_BOTH = LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
TP2_PP2 = [policy_rank(_BOTH, rank) for rank in range(4)]


def model(seed: int) -> dict[str, Tensor]:
    """The HF tensors of a version, float32."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_tensors(SHAPE).items()}


def box(part: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))


def allocate(slices: Sequence[TensorSlice], dtype: torch.dtype) -> dict[str, Tensor]:
    sizes: dict[str, int] = {}
    for part in slices:
        sizes[part.param] = max(sizes.get(part.param, 0), part.offset + part.num_elements)
    return {param: torch.zeros(size, dtype=dtype) for param, size in sizes.items()}


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class PolicySide:
    """One policy rank that trains by taking another seed."""

    def __init__(self, layout: PolicyRank) -> None:
        self._slices = policy_slices(SHAPE, layout)
        self._parameters = allocate(self._slices, torch.float32)
        self.exchange = WeightSender(self._slices, lambda: self._parameters)

    def train(self, seed: int) -> None:
        tensors = model(seed)
        for part in self._slices:
            local_view(self._parameters, part).copy_(tensors[part.name][box(part)])

    def step(self, size: float) -> None:
        """Move every weight by `size`, up or down; copies too."""
        directions = model(seed=99)
        for part in self._slices:
            local_view(self._parameters, part).add_(directions[part.name][box(part)].sign(), alpha=size)

    def die_at_bucket(self, number: int, by: signal.Signals = signal.SIGKILL) -> None:
        """From now on, be killed, or stopped, instead of sending this bucket."""
        for channel in (SocketSender, GroupSender, FileSender):
            _die_instead(channel, number, by)

    def held(self) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Every slice and its values."""
        return ((part, local_view(self._parameters, part)) for part in self._slices)


class EngineSide:
    """One generation rank that holds whole tensors: in use and, unless it is written in place, staged."""

    def __init__(
        self, dtype: torch.dtype, *, in_place: bool = False, dtypes: Mapping[str, torch.dtype] = NO_OTHERS
    ) -> None:
        slices = [whole(name, shape) for name, shape in hf_tensors(SHAPE).items()]
        self.weights = {
            name: torch.zeros(shape, dtype=dtypes.get(name, dtype))
            for name, shape in hf_tensors(SHAPE).items()
        }
        self._in_place = in_place
        self._staging = self.weights if in_place else _copy(self.weights)
        self.version = 0
        self.exchange = WeightReceiver(slices, lambda: self._staging, self._use, in_place=in_place)

    def _use(self, version: int) -> None:
        if not self._in_place:
            self.weights = _copy(self._staging)
        self.version = version

    def die_at_bucket(self, number: int, by: signal.Signals = signal.SIGKILL) -> None:
        """From now on, be killed when this many buckets have come, before their sender learns of that.

        Or be stopped; of files, when this many pieces have been read.
        """

        def end() -> None:
            os.kill(os.getpid(), by)

        for channel in (SocketReceiver, GroupReceiver):
            before_taken(channel, number, end)
        _before_read(number, end)

    def state(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.version, self.weights

    def corruption(self) -> str | None:
        return self.exchange.corruption


@dataclass
class Threads:
    """Every rank in a thread of this process. With a deadline, a call that exceeds it fails as a group's."""

    ranks: Sequence[Any]
    deadline_seconds: float | None = None
    calls: list[str] = field(default_factory=list)

    async def describe(self) -> list[Any]:
        return await self._all("describe", [()] * len(self.ranks))

    async def prepare(self, parts: Sequence[Part]) -> None:
        await self._all("prepare", [(part,) for part in parts])

    async def send(self, session: RefitSession) -> list[SendReport]:
        return await self._all("send", [(session,)] * len(self.ranks))

    async def receive(self, session: RefitSession) -> list[ReceiveReport]:
        return await self._all("receive", [(session,)] * len(self.ranks))

    async def commit(self, version: int) -> None:
        await self._all("commit", [(version,)] * len(self.ranks))

    async def abandon(self) -> None:
        await self._all("abandon", [()] * len(self.ranks))

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await asyncio.to_thread(self._all_in_threads, method, arguments)

    def _all_in_threads(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.calls.append(method)
        pool = ThreadPoolExecutor(len(self.ranks))
        calls = [
            pool.submit(getattr(rank.exchange, method), *given)
            for rank, given in zip(self.ranks, arguments, strict=True)
        ]
        pool.shutdown(wait=False)  # like a cluster, fail with the first rank, while others still work
        try:
            for call in as_completed(calls, self.deadline_seconds):
                call.result()
        except TimeoutError:
            assert self.deadline_seconds is not None
            late = tuple(rank for rank, call in enumerate(calls) if not call.done())
            where = ("does not respond",) * len(late)
            raise DeadlineExceeded("ranks", late, method, self.deadline_seconds, where) from None
        return [call.result() for call in calls]


class Remote:
    """A rank in a process of its own; `exchange` and everything else is called over a pipe."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.weights.ranks"])
        self._pipe, theirs = context.Pipe()
        self._in_call = threading.Lock()  # a call that the driver gave up on is answered before the next
        self.process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.exchange = self

    def call(self, target: str, *arguments: Any) -> Any:
        try:
            with self._in_call:
                self._pipe.send((target, arguments))
                error, result = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise WorkerGone(f"process {self.process.pid} ended during {target}") from None
        if error is not None:
            raise error
        return result

    def describe(self) -> ReceiverLayout | SenderLayout:
        return self.call("exchange.describe")  # type: ignore[no-any-return]

    def prepare(self, part: Part) -> None:
        self.call("exchange.prepare", part)

    def send(self, session: RefitSession) -> SendReport:
        return self.call("exchange.send", session)  # type: ignore[no-any-return]

    def receive(self, session: RefitSession) -> ReceiveReport:
        return self.call("exchange.receive", session)  # type: ignore[no-any-return]

    def commit(self, version: int) -> None:
        self.call("exchange.commit", version)

    def abandon(self) -> None:
        self.call("exchange.abandon")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def with_nixl_stand_in(make: Callable[[], Any]) -> Any:
    """A rank whose process imports the stand-in for NIXL."""
    sys.path.insert(0, str(NIXL_STAND_IN))
    return make()


def before_taken(channel: Any, number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Have each receiver act when it has emptied that bucket, before it says so; what undoes it."""
    taken, counts = channel.taken, Counter[Any]()

    def acting(self: Any) -> None:
        counts[self] += 1
        if counts[self] == number + 1:
            act()
        taken(self)

    channel.taken = acting

    def undo() -> None:
        channel.taken = taken

    return undo


def _before_read(number: int, act: Callable[[], None]) -> None:
    """Have the receiver act when it has read that number of pieces from files, before the next one."""
    pieces, count = StoredVersion.pieces, itertools.count()

    def acting(self: StoredVersion, *given: Any) -> Iterator[StoredPiece]:
        for piece in pieces(self, *given):
            if next(count) == number:
                act()
            yield piece

    StoredVersion.pieces = acting  # type: ignore[method-assign]


def _die_instead(channel: Any, number: int, by: signal.Signals) -> None:
    publish = channel.publish

    def dying(self: Any, bucket: int, num_bytes: int) -> None:
        if bucket == number:
            os.kill(os.getpid(), by)
        publish(self, bucket, num_bytes)

    channel.publish = dying


class WorkerGone(RunError):
    """What a cluster says of a dead worker."""


def _serve(make: Callable[[], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    rank = make()
    while True:
        target, arguments = pipe.recv()
        method: Any = rank
        for name in target.split("."):
            method = getattr(method, name)
        try:
            answer = (None, method(*arguments))
        except (NemorlError, OSError, RuntimeError, ValueError) as error:  # as a cluster does
            answer = (error, None)
        pipe.send(answer)
