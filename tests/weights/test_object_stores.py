"""Weights in S3 and GCS through s3fs and gcsfs, whose services are servers on loopback (`make libraries`)."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.environments.servers import free_port, python_with, running
from tests.weights.test_files import check_versions


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter that has them; its packages are imported here after those of the tests."""
    python = python_with("moto")
    folder = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    output = subprocess.run(folder, check=True, capture_output=True, text=True, timeout=60).stdout
    monkeypatch.setattr(sys, "path", [*sys.path, output.strip()])
    return python


@pytest.fixture
def s3(packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in an empty bucket of moto's server."""
    address = f"http://127.0.0.1:{free_port()}"
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    server = [packages, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    with running(server, tmp_path, f"{address}/moto-api/data.json"):
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/runs/7"


@pytest.fixture
def gs(packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in an empty bucket of gcp-storage-emulator."""
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    emulator = str(Path(packages).parent / "gcp-storage-emulator")
    server = [
        emulator,
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
        "--default-bucket=bucket",
    ]
    with running(server, tmp_path, f"tcp://127.0.0.1:{port}"):
        yield "gs://bucket/runs/7"


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_versions_are_written_read_as_chains_and_removed(store: str, request: pytest.FixtureRequest) -> None:
    check_versions(request.getfixturevalue(store))
