import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nemorl.slurm import follower
from nemorl.slurm.control import ControlClient, ControlServer, Lost, Over
from nemorl.slurm.errors import SlurmError
from nemorl.slurm.hardware import Hardware
from nemorl.slurm.ports import Ports
from nemorl.slurm.rendezvous import Card, Meeting, Plan

HOST, TOKEN = "127.0.0.1", "secret"
Act = Callable[[ControlServer, int], Awaitable[None]]


def with_server(act: Act, *nodes: str) -> None:
    """Do something with a head that waits for these nodes."""

    async def run() -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        async with ControlServer(HOST, port, TOKEN, nodes) as server:
            await act(server, port)

    asyncio.run(run())


async def connect(port: int, node: str, token: str = TOKEN) -> ControlClient:
    return await ControlClient.connect(HOST, port, token, node, "n1", seconds=5)


def test_everybody_hears_of_the_beginning_and_the_end() -> None:
    ends: list[Over] = []

    async def act(server: ControlServer, port: int) -> None:
        clients = [await connect(port, node) for node in ("n2", "n3")]
        await server.everybody(5)
        waiting = [asyncio.ensure_future(client.until_end()) for client in clients]
        server.begin()
        assert await server.silent(5) == {}
        assert all(client.begun for client in clients)
        server.hurried = True
        await server.end()
        ends.extend(await asyncio.gather(*waiting))
        for client in clients:
            client.close()

    with_server(act, "n2", "n3")
    assert ends == [Over("the run is over", failed=False, hurried=True)] * 2


def test_a_broken_line_names_the_node() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.everybody(5)
        client.close()
        lost = await asyncio.wait_for(server.lost.get(), 5)
        assert (lost.node, lost.said, "its connection to the head broke" in lost.why) == ("n2", False, True)
        assert (await server.silent(5)).keys() == {"n2"}

    with_server(act, "n2")


def test_a_node_says_why_it_is_of_no_more_use() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.everybody(5)
        await client.fail("Ray ended there")
        assert await asyncio.wait_for(server.lost.get(), 5) == Lost("n2", "Ray ended there", said=True)
        client.close()

    with_server(act, "n2")


def test_a_node_that_hangs_is_silent() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.everybody(5)
        assert await server.silent(0.1) == {"n2": "does not answer"}
        client.close()

    with_server(act, "n2")


def test_a_head_that_vanishes_is_named() -> None:
    async def run() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"nonce": "x"}\n')
            await reader.readline()
            writer.close()

        server = await asyncio.start_server(hang_up, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        over = await (await connect(port, "n2")).until_end()
        assert over.failed
        assert "the head, n1, is gone" in over.why
        server.close()

    asyncio.run(run())


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    async def act(server: ControlServer, port: int) -> None:
        stranger = await connect(port, "n2", token="guess")
        with pytest.raises(SlurmError, match=r"n2 did not connect to 127.0.0.1:\d+ on the head"):
            await server.everybody(0.3)
        assert (await stranger.until_end()).failed
        stranger.close()

    with_server(act, "n2")


def test_a_head_out_of_reach_is_named_with_the_mend() -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        SlurmError, match=f"n2 cannot reach the head, n1, at 127.0.0.1:{port}.*NEMORL_INTERFACE"
    ):
        asyncio.run(ControlClient.connect(HOST, port, TOKEN, "n2", "n1", seconds=0))


def following(folder: Path, port: int) -> "asyncio.Future[int]":
    """The part of n2, for which Ray's head does not listen."""
    meeting = Meeting(folder, "12.0", ("n1", "n2"))
    ports = {"n1": Ports(port - 1, port + 98), "n2": Ports(port + 99, port + 198)}
    meeting.publish(Plan(HOST, ports, {"n1": "a", "n2": "a"}))
    meeting.token_file.write_text(TOKEN)
    card = Card("n2", "a", HOST, "lo", Hardware(2, 10**9, 10**8, 0, ""), (20000,), 100)
    return asyncio.ensure_future(follower.follow("n1", meeting, card, 100))


def test_a_node_that_waits_for_ray_on_the_head_hears_of_the_end(tmp_path: Path) -> None:
    async def act(server: ControlServer, port: int) -> None:
        node = following(tmp_path, port)
        await server.everybody(5)
        await server.end()
        assert await asyncio.wait_for(node, 5) == 0

    with_server(act, "n2")


def test_a_node_that_cannot_reach_ray_on_the_head_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "TOGETHER_SECONDS", 0)

    async def act(server: ControlServer, port: int) -> None:
        node = following(tmp_path, port)
        lost = await asyncio.wait_for(server.lost.get(), 5)
        assert (lost.node, lost.said) == ("n2", True)
        assert f"n2 cannot reach Ray's head at {HOST}:{port - 1}" in lost.why
        with pytest.raises(SlurmError, match="n2 cannot reach"):
            await node

    with_server(act, "n2")
