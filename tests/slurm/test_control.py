import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nemorl.slurm import SlurmError, launcher
from nemorl.slurm.control import ControlClient, ControlServer, NodeLost, Shutdown
from nemorl.slurm.node import Hardware, NodeInfo, Ports
from nemorl.slurm.start import Plan, Rendezvous

HOST, TOKEN = "127.0.0.1", "secret"
Act = Callable[[ControlServer, int], Awaitable[None]]


def with_server(act: Act, *nodes: str) -> None:
    """Run `act` with the server of a head that waits for these nodes."""

    async def run() -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        async with ControlServer(HOST, port, TOKEN, nodes) as server:
            await act(server, port)

    asyncio.run(run())


async def connect(port: int, node: str, token: str = TOKEN) -> ControlClient:
    return await ControlClient.connect(HOST, port, token, node, "n1", seconds=5)


def test_all_nodes_receive_the_start_of_ray_and_the_end() -> None:
    ends: list[Shutdown] = []

    async def act(server: ControlServer, port: int) -> None:
        clients = [await connect(port, node) for node in ("n2", "n3")]
        await server.wait_for_nodes(5)
        waiting = [asyncio.ensure_future(client.wait_for_shutdown()) for client in clients]
        server.announce_ray()
        assert await server.find_lost(5) == []
        assert all(client.ray_runs for client in clients)
        server.urgent = True
        await server.shut_down()
        ends.extend(await asyncio.gather(*waiting))
        for client in clients:
            client.close()

    with_server(act, "n2", "n3")
    assert ends == [Shutdown("the run ended", failed=False, urgent=True)] * 2


def test_a_broken_connection_names_the_node() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.wait_for_nodes(5)
        client.close()
        lost = await asyncio.wait_for(server.lost.get(), 5)
        assert (lost.node, lost.reported, "connection closed" in lost.reason) == ("n2", False, True)
        assert await server.find_lost(5) == [lost]

    with_server(act, "n2")


def test_a_node_reports_its_failure() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.wait_for_nodes(5)
        await client.report_failure("Ray ended there")
        assert await asyncio.wait_for(server.lost.get(), 5) == NodeLost(
            "n2", "Ray ended there", reported=True
        )
        client.close()

    with_server(act, "n2")


def test_a_node_that_hangs_does_not_answer() -> None:
    async def act(server: ControlServer, port: int) -> None:
        client = await connect(port, "n2")
        await server.wait_for_nodes(5)
        assert await server.find_lost(0.1) == [NodeLost("n2", "it does not answer", reported=False)]
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
        shutdown = await (await connect(port, "n2")).wait_for_shutdown()
        assert shutdown.failed
        assert "the head, n1, is gone" in shutdown.reason
        server.close()

    asyncio.run(run())


def test_a_client_without_the_token_is_rejected() -> None:
    async def act(server: ControlServer, port: int) -> None:
        stranger = await connect(port, "n2", token="guess")
        with pytest.raises(SlurmError, match=r"n2 did not connect to 127.0.0.1:\d+ on the head"):
            await server.wait_for_nodes(0.3)
        assert (await stranger.wait_for_shutdown()).failed
        stranger.close()

    with_server(act, "n2")


def test_a_head_that_cannot_be_reached_is_named_with_the_fix() -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        SlurmError, match=f"n2 cannot reach the head, n1, at 127.0.0.1:{port}.*NEMORL_INTERFACE"
    ):
        asyncio.run(ControlClient.connect(HOST, port, TOKEN, "n2", "n1", seconds=0))


def following(folder: Path, port: int) -> "asyncio.Future[int]":
    """The launcher of n2, while Ray's head does not listen."""
    rendezvous = Rendezvous(folder, "12.0", ("n1", "n2"))
    ports = {"n1": Ports(port - 1, port + 98), "n2": Ports(port + 99, port + 198)}
    rendezvous.publish(Plan(HOST, ports, {"n1": "a", "n2": "a"}))
    rendezvous.token_file.write_text(TOKEN)
    info = NodeInfo("n2", "a", HOST, "lo", Hardware(2, 10**9, 10**8, 0, ""), (20000,), 100)
    return asyncio.ensure_future(launcher.follow("n1", rendezvous, info, 100))


def test_a_node_that_waits_for_ray_on_the_head_receives_the_end(tmp_path: Path) -> None:
    async def act(server: ControlServer, port: int) -> None:
        node = following(tmp_path, port)
        await server.wait_for_nodes(5)
        await server.shut_down()
        assert await asyncio.wait_for(node, 5) == 0

    with_server(act, "n2")


def test_a_node_that_cannot_reach_ray_on_the_head_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "START_SECONDS", 0)

    async def act(server: ControlServer, port: int) -> None:
        node = following(tmp_path, port)
        lost = await asyncio.wait_for(server.lost.get(), 5)
        assert (lost.node, lost.reported) == ("n2", True)
        assert f"n2 cannot reach Ray's head at {HOST}:{port - 1}" in lost.reason
        with pytest.raises(SlurmError, match="n2 cannot reach"):
            await node

    with_server(act, "n2")
