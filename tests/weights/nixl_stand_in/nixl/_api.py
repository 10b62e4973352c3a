"""Agents that read each other's memory by `process_vm_readv`, without the help of the process that owns it.

As with the real ones, a read moves nothing before it is posted and may be in progress afterwards; its
notification arrives once the bytes are there; reads outside of registered memory, of agents that were not
added and of processes that have ended raise errors of classes without a common base. Notifications are
datagrams of Unix sockets. Signatures are compared with the real ones in tests/signatures.
"""

import ctypes
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
DEFAULT_COMM_PORT = 8888
_MAX_NOTIFICATION = 65536
_IN_PROGRESS_POLLS = 2  # of the state of a read, before it is done


class nixlNotFoundError(Exception): ...


class nixlBackendError(Exception): ...


class nixlRemoteDisconnectError(Exception): ...


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Descriptors(list[tuple[int, int, int]]):
    """Address, bytes and device of each region."""


class nixl_agent_config:
    def __init__(
        self,
        enable_prog_thread=True,
        enable_listen_thread=False,
        listen_port=DEFAULT_COMM_PORT,
        capture_telemetry=False,
        num_threads=0,
        backends=["UCX"],  # noqa: B006 - the real default
        sync_mode=None,
    ):
        self.backends = backends


class Read:
    def __init__(self, ours: Descriptors, theirs: Descriptors, agent: str, notification: bytes) -> None:
        self.ours, self.theirs, self.agent, self.notification = ours, theirs, agent, notification
        self.polls = 0
        self.posted = self.done = False


class nixl_agent:
    def __init__(self, agent_name, nixl_conf=None, instantiate_all=False):
        if nixl_conf is None or nixl_conf.backends != ["UCX"]:
            raise nixlBackendError("the stand-in has no other back end")
        # Where the kernel restricts such reads to children (Yama), allow them to all processes of this user.
        _LIBC.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        self.name = agent_name
        self._registered: list[tuple[int, int, int]] = []
        self._remote: dict[str, dict[str, Any]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # an abstract name that the kernel chooses
        self._socket.setblocking(False)

    def register_memory(self, reg_list, mem_type=None, backends=[]):  # noqa: B006
        regions = self.get_xfer_descs(reg_list, mem_type)
        self._registered += regions
        return regions

    def deregister_memory(self, dereg_list, backends=[]):  # noqa: B006
        for region in dereg_list:
            self._registered.remove(region)

    def get_agent_metadata(self):
        address = self._socket.getsockname().hex()
        start = _start_of(os.getpid())
        own = {"name": self.name, "pid": os.getpid(), "start": start, "address": address}
        return json.dumps(own | {"regions": self._registered}).encode()

    def add_remote_agent(self, metadata):
        remote = json.loads(metadata)
        self._remote[remote["name"]] = remote
        return remote["name"].encode()

    def make_connection(self, remote_agent, backends=[]):  # noqa: B006
        self._alive(remote_agent)

    def get_xfer_descs(self, descs, mem_type=None):
        if isinstance(descs, torch.Tensor):
            assert descs.is_contiguous()
            assert descs.device.type == "cpu"
            return Descriptors([(descs.data_ptr(), descs.nbytes, 0)])
        assert mem_type == "DRAM"
        assert all(len(region) == 3 for region in descs)
        return Descriptors(descs)

    def initialize_xfer(
        self,
        operation,
        local_descs,
        remote_descs,
        remote_agent,
        notif_msg=b"",
        backends=[],  # noqa: B006
    ):
        assert operation == "READ"
        remote = self._find(remote_agent)
        for regions, registered in (
            (local_descs, self._registered),
            (remote_descs, remote["regions"]),
        ):
            for address, size, device in regions:
                if not any(
                    a <= address and address + size <= a + n and d == device for a, n, d in registered
                ):
                    raise nixlNotFoundError(f"{size} bytes at {address} are not registered")
        return Read(local_descs, remote_descs, remote_agent, notif_msg)

    def transfer(self, handle, notif_msg=b""):
        assert not handle.posted
        handle.posted = True
        return "PROC"

    def check_xfer_state(self, handle):
        assert handle.posted
        handle.polls += 1
        if handle.polls < _IN_PROGRESS_POLLS:
            return "PROC"
        if not handle.done:
            remote = self._alive(handle.agent)
            for (to, size, _), (source, same_size, _) in zip(handle.ours, handle.theirs, strict=True):
                assert size == same_size
                into, of = _Vector(to, size), _Vector(source, size)
                read = _LIBC.process_vm_readv(
                    remote["pid"], ctypes.byref(into), 1, ctypes.byref(of), 1, ctypes.c_ulong(0)
                )
                if read != size:
                    raise nixlRemoteDisconnectError(os.strerror(ctypes.get_errno()))
            handle.done = True
            self.send_notif(handle.agent, handle.notification)
        return "DONE"

    def release_xfer_handle(self, handle):
        if handle.posted and not handle.done:
            raise nixlBackendError("a read in progress cannot be released")

    def send_notif(self, remote_agent_name, notif_msg, backend=None):
        remote = self._find(remote_agent_name)
        message = self.name.encode() + b"\0" + notif_msg
        try:
            self._socket.sendto(message, bytes.fromhex(remote["address"]))
        except OSError as error:
            raise nixlRemoteDisconnectError(str(error)) from error

    def get_new_notifs(self, backends=[]):  # noqa: B006
        found: dict[str, list[bytes]] = {}
        while True:
            try:
                message = self._socket.recv(_MAX_NOTIFICATION)
            except BlockingIOError:
                return found
            agent, _, notification = message.partition(b"\0")
            found.setdefault(agent.decode(), []).append(notification)

    def _find(self, agent: str) -> dict[str, Any]:
        if agent not in self._remote:
            raise nixlNotFoundError(f"agent {agent} was not added")
        return self._remote[agent]

    def _alive(self, agent: str) -> dict[str, Any]:
        remote = self._find(agent)
        if _start_of(remote["pid"]) != remote["start"]:
            raise nixlRemoteDisconnectError(f"the process of {agent} has ended")
        return remote


def _start_of(pid: int) -> str:
    """When a process started, by which it differs from a later one with its number; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
