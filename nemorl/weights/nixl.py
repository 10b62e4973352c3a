"""NIXL: one-sided reads of another process's registered memory, over UCX (InfiniBand, RoCE, NVLink, TCP).

    sender    fill a slot, notify: number, bytes |  ...                   | the slot is free
    receiver                                     | READ into its own slot | (the READ notifies the sender)

Each member has an agent, and registers its two slots once. Its record in the driver's store is where they lie
and the agent's metadata, which are opaque bytes. Slots and connections last until the group is left, because
registering memory pins it, which takes longer than a small update.

It was run between processes of one machine, through memory of hosts; InfiniBand and GPUs were not.
"""

import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nemorl.device import current_gpu, wait_for_queue

from .messages import Part, RefitFailed, RefitSession, Slots

BACKEND = "UCX"
_POLL_SECONDS = 0.0001  # between two looks at notifications, or at the state of a read
_RECORD = struct.Struct("<QQQ?")  # address, bytes and device of the slots, and whether they are a GPU's
# Of a bucket: READY or TAKEN, the member that notifies, the bucket's number between the two members, where it
# begins in the slots and its bytes.
_NOTIFICATION = struct.Struct("<cqqQQ")
_READY, _TAKEN = b"R", b"T"
_Key = tuple[bytes, int, int]  # kind, member, number


class GroupAborted(RuntimeError):
    """A wait of a group was ended from outside."""


@dataclass(frozen=True)
class _Peer:
    agent: str
    address: int
    num_bytes: int
    device: int
    memory: str  # "DRAM" or "VRAM"

    def region(self, offset: int, num_bytes: int) -> tuple[int, int, int]:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise RefitFailed(f"agent {self.agent} offers memory that it has not registered")
        return self.address + offset, num_bytes, self.device


class NixlGroup:
    """A member's agent, its slots, and the agents of the members that it exchanges buckets with."""

    def __init__(self, session: RefitSession, rank: int, part: Part, store: TCPStore) -> None:
        """Raises RefitFailed if the package is missing or its back end does not start."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            fix = "`pip install 'nemorl[nixl]'`, or set generation.transport to auto"
            raise RefitFailed(f"the package nixl cannot be imported ({error}): {fix}") from error
        self.store, self._session, self._rank = store, session, rank
        on_gpu = torch.accelerator.is_available()
        self.device = current_gpu() if on_gpu else torch.device("cpu")
        self._aborted = False
        self._peers: dict[int, _Peer] = {}
        self._sent: dict[int, int] = defaultdict(int)  # buckets, by the member that they went to
        self._received: dict[int, int] = defaultdict(int)
        self._notified: dict[_Key, tuple[int, int]] = {}  # offset and bytes
        self._reads: set[Any] = set()  # handles that are not released
        self._slots = Slots.allocate(part, self.device)
        memory = self._slots.memory
        # A progress thread would keep a core busy from the first update to the last.
        config = nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        try:
            self._agent = nixl_agent(self._agent_name(rank), config)
            self._registered = self._agent.register_memory(memory)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            what = f"NIXL with {BACKEND} does not start with {memory.numel()} bytes of {self._memory(on_gpu)}"
            raise RefitFailed(f"{what}: {type(error).__name__}: {error}") from error
        device = self.device.index if on_gpu else 0
        record = _RECORD.pack(memory.data_ptr(), memory.numel(), device, on_gpu)
        store.set(self._record_key(rank), record + metadata)

    def slots(self, part: Part) -> Slots:
        return self._slots

    def has_joined(self, session: RefitSession, member: int) -> bool:
        return bool(self.store.check([self._record_key(member)]))

    def connect(self, member: int, *, first: bool) -> None:
        if member in self._peers:
            return
        found = self.store.get(self._record_key(member))
        address, num_bytes, device, on_gpu = _RECORD.unpack_from(found)
        agent = self._agent_name(member)
        with _as_runtime_error():
            self._agent.add_remote_agent(found[_RECORD.size :])
            self._agent.make_connection(agent)
        self._peers[member] = _Peer(agent, address, num_bytes, device, self._memory(on_gpu))

    def send_bucket(self, content: Tensor, member: int) -> Callable[[], None]:
        """Offer the beginning of a slot; the call returned waits until the member has read it."""
        wait_for_queue(self.device)  # writes to the slot
        taken = _TAKEN, member, self._sent[member]
        self._sent[member] += 1
        offset = content.data_ptr() - self._slots.memory.data_ptr()
        message = _NOTIFICATION.pack(_READY, self._rank, taken[2], offset, content.numel())
        with _as_runtime_error():
            self._agent.send_notif(self._peers[member].agent, message)

        def wait() -> None:
            self._wait(taken)
            del self._notified[taken]

        return wait

    def receive_size(self, member: int) -> int:
        """Bytes of the member's next bucket, once it is ready."""
        return self._wait((_READY, member, self._received[member]))[1]

    def receive_content(self, content: Tensor, member: int) -> None:
        """Read the bucket of `receive_size` into a slot of this member."""
        wait_for_queue(self.device)  # reads of what was in the slot
        peer, number = self._peers[member], self._received[member]
        self._received[member] += 1
        region = peer.region(*self._notified.pop((_READY, member, number)))
        taken = _NOTIFICATION.pack(_TAKEN, self._rank, number, 0, 0)
        with _as_runtime_error():
            ours = self._agent.get_xfer_descs(content)
            theirs = self._agent.get_xfer_descs([region], peer.memory)
            read = self._agent.initialize_xfer("READ", ours, theirs, peer.agent, taken)
            self._reads.add(read)
            state = self._agent.transfer(read)
            while state == "PROC":
                self._pause()
                state = self._agent.check_xfer_state(read)
            self._reads.discard(read)
            self._agent.release_xfer_handle(read)
        if state != "DONE":
            raise RuntimeError(f"NIXL: a read of {peer.agent} ended with {state}")

    def abort(self) -> None:
        """End the waits of all threads."""
        self._aborted = True

    def leave(self) -> None:
        """Free the agent, then its memory: a read that cannot be canceled would still write there."""
        with suppress(Exception):  # of an agent whose peers may be gone
            for read in self._reads:
                self._agent.release_xfer_handle(read)
            self._agent.deregister_memory(self._registered)
        self._reads.clear()
        del self._agent

    @staticmethod
    def _memory(on_gpu: bool) -> str:
        return "VRAM" if on_gpu else "DRAM"

    def _wait(self, key: _Key) -> tuple[int, int]:
        while key not in self._notified:
            with _as_runtime_error():
                notifications = self._agent.get_new_notifs()
            if not notifications:
                self._pause()
            for messages in notifications.values():
                for message in messages:
                    kind, member, number, offset, num_bytes = _NOTIFICATION.unpack(message)
                    self._notified[kind, member, number] = offset, num_bytes
        return self._notified[key]

    def _pause(self) -> None:
        if self._aborted:
            raise GroupAborted("the group was aborted")
        time.sleep(_POLL_SECONDS)

    def _agent_name(self, member: int) -> str:
        return f"nemorl {self._session.place} {self._session.rendezvous} {member}"

    def _record_key(self, member: int) -> str:
        return f"nixl/{self._session.rendezvous}/{member}"


@contextmanager
def _as_runtime_error() -> Iterator[None]:
    """NIXL raises a class for each of its statuses, which have no common base."""
    try:
        yield
    except GroupAborted:
        raise
    except Exception as error:
        raise RuntimeError(f"NIXL: {type(error).__name__}: {error}") from error
