import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nemorl.environments import scoring_process
from nemorl.environments.scoring_process import ScoringProcess
from tests.environments import scorers


def test_a_child_that_does_not_end_is_left_behind(monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(scoring_process, "_CLOSE_SECONDS", 0.05)

    async def main():
        scoring = ScoringProcess("json", seconds=0.5)
        scoring._pool.join = lambda: released.wait(30)
        await scoring.close()
        released.set()

    asyncio.run(main())
    assert "the scoring process has not ended in 0.05 s" in caplog.text


def test_a_scorer_that_hangs_or_dies_counts_as_nothing_and_the_next_is_scored(caplog):
    async def main():
        scoring = ScoringProcess("json", seconds=60, wall_seconds=4)
        try:
            first = await scoring.score(scorers.pid)
            hung = await scoring.score(scorers.hang)
            second = await scoring.score(scorers.pid)
            died = await scoring.score(scorers.die)
            lengths = await asyncio.gather(*(scoring.score(scorers.length, "x" * n) for n in range(5)))
            with pytest.raises(KeyError, match="no such entry"):
                await scoring.score(scorers.refuse)
        finally:
            await scoring.close()
        return first, hung, second, died, lengths

    first, hung, second, died, lengths = asyncio.run(main())
    assert (hung, died, lengths) == (0.0, 0.0, [0, 1, 2, 3, 4])
    assert first != second != os.getpid()
    assert not psutil.pid_exists(int(first))
    assert not psutil.pid_exists(int(second))
    assert "hang took more than 4 s and counts as 0" in caplog.text
    assert "die ended its process (exit code 3)" in caplog.text


def test_the_limit_is_processor_time(caplog):
    async def main():
        scoring = ScoringProcess("json", seconds=0.5)
        try:
            return await scoring.score(scorers.spin), await scoring.score(scorers.length, "four")
        finally:
            await scoring.close()

    assert asyncio.run(main()) == (0.0, 4.0)
    assert "spin took more than 0.5 s of processor time and counts as 0" in caplog.text


def test_a_cancelled_call_ends_its_process():
    async def main():
        scoring = ScoringProcess("json", seconds=60)
        try:
            first = await scoring.score(scorers.pid)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scoring.score(scorers.hang), 0.2)
            assert await scoring.score(scorers.pid) != first
        finally:
            await scoring.close()

    asyncio.run(main())


def test_the_child_goes_when_its_parent_is_killed():
    code = (
        "import asyncio, os, signal\n"
        "from nemorl.environments.scoring_process import ScoringProcess\n"
        "from tests.environments import scorers\n"
        "async def main():\n"
        "    print(int(await ScoringProcess('json', 60).score(scorers.pid)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=False, stdout=subprocess.PIPE, timeout=60
    )
    assert parent.returncode == -signal.SIGKILL
    child = int(parent.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the scoring process outlived its parent"
        time.sleep(0.05)
