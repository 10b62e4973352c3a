"""Servers of other projects, each started with an interpreter that has its package.

The interpreter is that of the tests, if the package is installed there, or the one that the variable
`NEMORL_<PACKAGE>_PYTHON` names, since such packages may need other versions or another Python.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.required import missing

START_SECONDS = 240.0


def python_with(package: str) -> str:
    variable = f"NEMORL_{package.upper()}_PYTHON"
    if python := os.environ.get(variable):
        return python
    if find_spec(package) is None:
        missing(package, f"{package} is not installed here, and {variable} names no interpreter that has it")
    return sys.executable


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], folder: Path, health: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process group of its own, once it answers at the URL `health`."""
    log = folder / f"server_{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(variables or {})},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(health):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    """A server with a protocol of its own, at tcp://, answers if it takes a connection."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "tcp":
            socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=5).close()
            return True
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status < 500)
    except OSError:
        return False
