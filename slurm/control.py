"""Connections between the launchers: the head announces the end, and notices which node is lost.

One connection from every node to the head, with JSON lines. It breaks when a node or its launcher vanishes. A
node that connects proves that it can read the token in the run folder, which is not transmitted.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from . import SlurmError
from .node import retry

CONNECT_SECONDS = 120.0
PONG_SECONDS = 20.0
CLOSE_SECONDS = 5.0
MAX_LINE_BYTES = 2**16
_BLOCKED = "a firewall blocks it, or the nodes do not share the network interface"
_INTERFACE = "NEMORL_INTERFACE to an interface that every node has, such as ib0."
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclass(frozen=True)
class Shutdown:
    reason: str
    failed: bool  # the run did not end well: logs are worth keeping
    urgent: bool = False  # SIGKILL is near


class NodeLost(NamedTuple):
    node: str
    reason: str
    reported: bool  # by the node itself; else its connection broke

    def __str__(self) -> str:
        return f"node {self.node} is lost: {self.reason}"


class ControlServer:
    def __init__(self, host: str, port: int, token: str, nodes: Sequence[str]) -> None:
        self._host, self._port, self._token = host, port, token
        self.nodes = tuple(nodes)
        self.lost: asyncio.Queue[NodeLost] = asyncio.Queue()
        self.failed = self.urgent = False  # sent to the other nodes at the end
        self._gone: dict[str, NodeLost] = {}
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._pongs: dict[str, asyncio.Event] = {}
        self._all_connected = asyncio.Event()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=MAX_LINE_BYTES, reuse_address=True
        )
        if not self.nodes:
            self._all_connected.set()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shut_down()

    async def shut_down(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._server.close()
        for writer in self._writers.values():
            with suppress(OSError):
                _send(writer, {"end": True, "failed": self.failed, "urgent": self.urgent})
                await writer.drain()
            writer.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    async def wait_for_nodes(self, seconds: float = CONNECT_SECONDS) -> None:
        """Wait until all nodes are connected. Raises `SlurmError` naming the missing ones."""
        try:
            await asyncio.wait_for(self._all_connected.wait(), seconds)
        except TimeoutError:
            missing = ", ".join(node for node in self.nodes if node not in self._writers)
            address = f"{self._host}:{self._port} on the head"
            problem = f"{missing} did not connect to {address} within {seconds:g} s"
            fix = f"{_BLOCKED}. Open the ports between the nodes, or set {_INTERFACE}"
            raise SlurmError(f"{problem}, though the run folder is shared: {fix}") from None

    def announce_ray(self) -> None:
        for writer in self._writers.values():
            _send(writer, {"begin": True})

    async def find_lost(self, seconds: float = PONG_SECONDS) -> list[NodeLost]:
        """Ping all nodes; return those that are gone or do not answer."""
        self._pongs = {node: asyncio.Event() for node in self._writers if node not in self._gone}
        for node in self._pongs:
            with suppress(OSError):
                _send(self._writers[node], {"ping": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for event in self._pongs.values():
                    await event.wait()
        silent = [node for node, event in self._pongs.items() if not event.is_set()]
        return [*self._gone.values(), *(NodeLost(n, "it does not answer", reported=False) for n in silent)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        _keep_alive(writer)
        nonce, message = secrets.token_hex(16), None
        with suppress(OSError, TimeoutError):
            _send(writer, {"nonce": nonce})
            message = await asyncio.wait_for(_receive(reader), CONNECT_SECONDS)
        node, proof = (str((message or {}).get(name)) for name in ("node", "proof"))
        expected = node in self.nodes and node not in self._writers
        if not expected or not hmac.compare_digest(proof.encode(), _proof(self._token, nonce, node).encode()):
            writer.close()
            return
        self._writers[node] = writer
        if len(self._writers) == len(self.nodes):
            self._all_connected.set()
        lost = NodeLost(node, "its launcher ended or the node is down (connection closed)", reported=False)
        while (message := await _receive(reader)) is not None:
            if "pong" in message and node in self._pongs:
                self._pongs[node].set()
            if "failed" in message:
                lost = NodeLost(node, str(message["failed"]), reported=True)
                break
        if not self._closing:
            self._gone[node] = lost
            self.lost.put_nowait(lost)
            if node in self._pongs:
                self._pongs[node].set()


class ControlClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._reader, self._writer, self._head = reader, writer, head
        self.ray_runs = False  # on all nodes

    @classmethod
    async def connect(
        cls, host: str, port: int, token: str, node: str, head: str, seconds: float = CONNECT_SECONDS
    ) -> Self:
        """Connect to the launcher on the node `head`. Raises `SlurmError`."""

        async def attempt() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            return reader, writer, str((await _receive(reader) or {}).get("nonce"))

        address = f"the head, {head}, at {host}:{port}"
        problem = f"{node} cannot reach {address} ({{error}}): {_BLOCKED}. Set {_INTERFACE}"
        reader, writer, nonce = await retry(attempt, seconds, problem)
        _keep_alive(writer)
        _send(writer, {"node": node, "proof": _proof(token, nonce, node)})
        return cls(reader, writer, head)

    async def wait_for_shutdown(self) -> Shutdown:
        """Answer the head until it announces the end, or vanishes."""
        while (message := await _receive(self._reader)) is not None:
            self.ray_runs = self.ray_runs or "begin" in message
            if "ping" in message:
                _send(self._writer, {"pong": True})
            if "end" in message:
                return Shutdown("the run ended", bool(message.get("failed")), bool(message.get("urgent")))
        reason = f"the head, {self._head}, is gone: its launcher ended or the node is down"
        return Shutdown(reason, failed=True)

    async def report_failure(self, reason: str) -> None:
        with suppress(OSError):
            _send(self._writer, {"failed": reason})
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


def _proof(token: str, nonce: str, node: str) -> str:
    return hmac.new(token.encode(), f"{nonce} {node}".encode(), "sha256").hexdigest()


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end of the connection, or for an invalid line."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
