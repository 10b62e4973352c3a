"""A generated key of a run's endpoint is in its file, and no key is in a log; the endpoint is a stand-in."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemorl.serve.app import Listening
from nemorl.session import session

URL = "http://127.0.0.1:8000/v1"


@dataclass
class Endpoint:
    """Listens with this key."""

    api_key: str
    generated: bool

    async def listen(self, seconds: float) -> Listening:
        assert seconds == 7.0
        return Listening(URL, self.api_key, self.generated)


def open_endpoint(run_dir: Path, endpoint: Endpoint) -> None:
    cluster = SimpleNamespace(deadlines=SimpleNamespace(start=7.0))
    experiment = SimpleNamespace(run_dir=run_dir, cluster=cluster)
    asyncio.run(session.open_endpoint(endpoint, experiment))  # type: ignore[arg-type]


def test_a_made_key_is_for_its_owner_and_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "endpoint_key"
    left = tmp_path / "endpoint_key.tmp"  # of a crash
    for key in ("made-first", "made-again"):
        left.touch(mode=0o644)
        with caplog.at_level(logging.DEBUG):
            open_endpoint(tmp_path, Endpoint(key, generated=True))
        assert file.read_text() == key + "\n"
        assert file.stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.iterdir()) == [file]
    assert f"the engines answer at {URL}; the key is in {file}" in caplog.text
    assert "made-" not in caplog.text


def test_a_key_of_the_environment_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        open_endpoint(tmp_path, Endpoint("from-outside", generated=False))
    assert f"the engines answer at {URL}" in caplog.text
    assert "from-outside" not in caplog.text
    assert list(tmp_path.iterdir()) == []
