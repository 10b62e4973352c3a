"""The command `nemorl ui`: what it opens, what it refuses, and how it ends."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from nemorl.cli import main
from nemorl.ui.app import serving
from nemorl.ui.folders import Folders
from tests.ui.folders import make_run


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "nemorl.cli", "ui", "--no-browser", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("word", "view"),
    [
        ("runs/one", r"watch\?run=one"),
        ("experiment.yaml", r"compose\?file=experiment\.yaml"),
        ("runs", ""),
        (".", ""),
    ],
)
def test_it_prints_the_address_of_what_it_was_given(tmp_path, word, view):
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "experiment.yaml").write_text("algorithm: {name: grpo}\n", encoding="utf-8")
    process = started(tmp_path, word)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/{view}#[\w-]{{43}}", line)
    finally:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")


def test_it_ends_at_once_with_an_open_page(tmp_path, monkeypatch):
    """A page that watches a run has an answer that never ends, for which a server would wait as it ends."""
    monkeypatch.setattr("nemorl.serve.app.SHUTDOWN_SECONDS", 600.0)
    make_run(tmp_path / "one", live={})

    async def watch_and_end() -> float:
        async with ClientSession() as session, AsyncExitStack() as server:
            started = serving(Folders(tmp_path), 0, read_only=False)
            url, token = await server.enter_async_context(started)
            headers = {"Authorization": f"Bearer {token}"}
            page = await session.get(f"{url}/api/watch/follow?run=one", headers=headers)
            assert (await page.content.readline()).startswith(b"data: ")
            began = time.monotonic()
            await server.aclose()
            return time.monotonic() - began

    assert asyncio.run(watch_and_end()) < 60


def test_a_port_in_use_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["ui", "--no-browser", "--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert f"cannot listen on port {port}" in message
    assert "choose another --port" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist; name a run folder, a config, or a folder of these"),
        (["--port", "65536"], "--port 65536: expected at most 65535"),
        (["--port", "x"], "expected an integer of at least 0"),
    ],
)
def test_what_it_cannot_open_is_refused(tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(["ui", "--no-browser", *words])
    except SystemExit as refused:  # of the parser
        status = refused.code
    assert status == 2
    assert expected in " ".join(capsys.readouterr().err.split())
