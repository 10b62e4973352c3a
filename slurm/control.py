"""The line between the launchers: how the head tells all nodes of the end, and hears which node is lost.

One connection from every node to the head, JSON lines. A node that vanishes, with its launcher or as a
whole, breaks it, at once or when the keep-alive probes stay unanswered. Who connects proves that it can read
the secret in the run folder; the secret itself does not go over the line.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from .errors import SlurmError

CONNECT_SECONDS = 120.0
PONG_SECONDS = 20.0
CLOSE_SECONDS = 5.0
LONGEST_LINE = 2**16
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclass(frozen=True)
class Over:
    """Why a node has nothing more to do."""

    why: str
    failed: bool  # whether the run did not end well, so that logs are worth keeping
    hurried: bool = False  # whether SIGKILL is near


class Lost(NamedTuple):
    """A node that takes no part any more."""

    node: str
    why: str
    said: bool  # by the node itself; else it is only known to be gone


class ControlServer:
    """The head's end. `lost` gets each node that is."""

    def __init__(self, host: str, port: int, token: str, nodes: Sequence[str]) -> None:
        """`nodes` are the others."""
        self._host, self._port, self._token = host, port, token
        self.nodes = tuple(nodes)
        self.lost: asyncio.Queue[Lost] = asyncio.Queue()
        self.gone: dict[str, str] = {}
        self.failed = self.hurried = False  # what the others are told at the end
        self._lines: dict[str, asyncio.StreamWriter] = {}
        self._pongs: dict[str, asyncio.Event] = {}
        self._joined = asyncio.Event()
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen. Raises `OSError`."""
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=LONGEST_LINE, reuse_address=True
        )
        if not self.nodes:
            self._joined.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        await self.end()

    async def end(self) -> None:
        """Tell everybody that it is over, once."""
        if self._ending:
            return
        self._ending = True
        self._server.close()
        for line in self._lines.values():
            with suppress(OSError):
                _send(line, {"end": True, "failed": self.failed, "hurried": self.hurried})
                await line.drain()
            line.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)

    async def everybody(self, seconds: float = CONNECT_SECONDS) -> None:
        """Wait for all nodes. Raises `SlurmError` that names who did not come."""
        try:
            await asyncio.wait_for(self._joined.wait(), seconds)
        except TimeoutError:
            absent = [node for node in self.nodes if node not in self._lines]
            raise SlurmError(
                f"{', '.join(absent)} did not connect to {self._host}:{self._port} on the head within "
                f"{seconds:g} s, though the run folder is shared. A firewall between the nodes, or an "
                "interface that they do not share: set NEMORL_INTERFACE to one that every node has, such as "
                "ib0, and let the nodes reach each other's ports."
            ) from None

    def begin(self) -> None:
        """Tell everybody that Ray runs on all nodes."""
        for line in self._lines.values():
            _send(line, {"begin": True})

    async def silent(self, seconds: float = PONG_SECONDS) -> dict[str, str]:
        """Ask all nodes for a sign of life: those that gave none, or are gone, and what became of them."""
        asked = {node: asyncio.Event() for node in self._lines if node not in self.gone}
        self._pongs = asked
        for node in asked:
            with suppress(OSError):
                _send(self._lines[node], {"ping": True})
        answers = [asyncio.ensure_future(event.wait()) for event in asked.values()]
        if answers:
            _, late = await asyncio.wait(answers, timeout=seconds)
            for waiting in late:
                waiting.cancel()
        silent = {n: "does not answer" for n, e in asked.items() if not e.is_set() and n not in self.gone}
        return {**self.gone, **silent}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        _keep_alive(writer)
        node = await self._recognised(reader, writer)
        if node is None:
            writer.close()
            return
        self._lines[node] = writer
        if len(self._lines) == len(self.nodes):
            self._joined.set()
        why, said = "its launcher ended or the node is down: its connection to the head broke", False
        while (message := await _received(reader)) is not None:
            if "pong" in message and node in self._pongs:
                self._pongs[node].set()
            if "failed" in message:
                why, said = str(message["failed"]), True
                break
        if not self._ending:
            self.gone[node] = why
            self.lost.put_nowait(Lost(node, why, said))
            if node in self._pongs:
                self._pongs[node].set()

    async def _recognised(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        nonce = secrets.token_hex(16)
        with suppress(OSError, TimeoutError):
            _send(writer, {"nonce": nonce})
            message = await asyncio.wait_for(_received(reader), CONNECT_SECONDS)
            node, proof = str((message or {}).get("node")), str((message or {}).get("proof"))
            known = node in self.nodes and node not in self._lines
            if known and hmac.compare_digest(proof.encode(), _proof(self._token, nonce, node).encode()):
                return node
        return None


class ControlClient:
    """The other nodes' end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        """Use `connect`."""
        self._reader, self._writer, self._head = reader, writer, head
        self.begun = False  # whether Ray runs on all nodes

    @classmethod
    async def connect(
        cls, host: str, port: int, token: str, node: str, head: str, seconds: float = CONNECT_SECONDS
    ) -> Self:
        """Reach the launcher on the node `head`. Raises `SlurmError`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            try:
                async with asyncio.timeout(max(0.1, min(10.0, end - loop.time()))):
                    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
                    nonce = str((await _received(reader) or {}).get("nonce"))
                break
            except (OSError, TimeoutError) as error:
                if loop.time() > end:
                    raise SlurmError(
                        f"{node} cannot reach the head, {head}, at {host}:{port} ({error or 'no answer'}): a "
                        "firewall between them, or an interface that they do not share. Set NEMORL_INTERFACE "
                        "to one that every node has, such as ib0."
                    ) from None
                await asyncio.sleep(0.5)
        _keep_alive(writer)
        _send(writer, {"node": node, "proof": _proof(token, nonce, node)})
        return cls(reader, writer, head)

    async def until_end(self) -> Over:
        """Answer the head until it says that the run is over, or vanishes; which of both it was."""
        while (message := await _received(self._reader)) is not None:
            self.begun = self.begun or "begin" in message
            if "ping" in message:
                _send(self._writer, {"pong": True})
            if "end" in message:
                return Over("the run is over", bool(message.get("failed")), bool(message.get("hurried")))
        return Over(f"the head, {self._head}, is gone: its launcher ended or the node is down", failed=True)

    async def fail(self, why: str) -> None:
        """Tell the head that this node is of no more use."""
        with suppress(OSError):
            _send(self._writer, {"failed": why})
            await self._writer.drain()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


def _proof(token: str, nonce: str, node: str) -> str:
    return hmac.new(token.encode(), f"{nonce} {node}".encode(), "sha256").hexdigest()


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _received(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None where the line has ended or says what is none."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    line: socket.socket = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
