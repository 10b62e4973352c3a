"""The division of the tests among processes, of which one may crash."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CRASHES_ONCE = """
import os, pathlib
def test_before(): pass
def test_crash():
    mark = pathlib.Path({mark!r})
    if not mark.exists():
        mark.touch()
        os._exit(1)
"""
SLOW = "import time\n" + "".join(f"def test_{n}(): time.sleep(0.3)\n" for n in range(4))


def test_a_worker_that_takes_the_place_of_another_gets_its_last_test(tmp_path: Path) -> None:
    """It would wait for ever for a second one, with the run."""
    (tmp_path / "test_a.py").write_text(CRASHES_ONCE.format(mark=str(tmp_path / "crashed")))
    (tmp_path / "test_b.py").write_text(SLOW)
    options = ["-p", "tests.conftest", "-c", os.devnull, "--numprocesses", "2", "--reruns", "1"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "1 failed, 6 passed" in done.stdout, done.stdout + done.stderr
