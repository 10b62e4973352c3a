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
            first = await scoring.call(scorers.pid)
            hung = await scoring.call(scorers.hang)
            second = await scoring.call(scorers.pid)
            died = await scoring.call(scorers.die)
            lengths = await asyncio.gather(*(scoring.call(scorers.length, "x" * n) for n in range(5)))
            with pytest.raises(KeyError, match="no such entry"):
                await scoring.call(scorers.refuse)
        finally:
            await scoring.close()
        return first, hung, second, died, lengths

    first, hung, second, died, lengths = asyncio.run(main())
    assert (hung, died, lengths) == (None, None, [0, 1, 2, 3, 4])
    assert first != second != os.getpid()
    assert not psutil.pid_exists(int(first))
    assert not psutil.pid_exists(int(second))
    assert "hang took more than 4 s and counts as 0" in caplog.text
    assert "die ended its process (exit code 3) and is called again" in caplog.text
    assert "die ended its process (exit code 3) and counts as 0" in caplog.text


def test_a_call_whose_child_is_killed_is_repeated_and_others_are_not(tmp_path):
    """One is killed as by the kernel for lack of memory, while others wait for their turn."""

    async def main():
        scoring = ScoringProcess("json", seconds=60)
        try:
            killed = scoring.step("length", scorers.length_after_a_kill, "four", str(tmp_path / "killed"))
            others = (scoring.step("length", scorers.length, "x" * n) for n in range(3))
            return await asyncio.gather(killed, *others)
        finally:
            await scoring.close()

    steps = asyncio.run(main())
    assert [step.rewards for step in steps] == [{"length": n} for n in (4.0, 0.0, 1.0, 2.0)]
    assert [step.num_retries for step in steps] == [1, 0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_is_killed_or_stopped_without_a_call_is_replaced(number):
    async def main():
        scoring = ScoringProcess("json", seconds=60)
        try:
            first = await scoring.call(scorers.pid)
            os.kill(int(first), number)
            while (second := await answer(scoring)) is None:
                pass
        finally:
            await scoring.close()
        return int(first), int(second)

    async def answer(scoring):
        """The child's process, or None after a deadline that a new one may miss too on a busy machine."""
        try:
            return await asyncio.wait_for(scoring.call(scorers.pid), 5.0)
        except TimeoutError:
            return None

    first, second = asyncio.run(main())
    assert first != second
    end = time.monotonic() + 60
    while psutil.pid_exists(first) and psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the old process is left"
        time.sleep(0.05)


def test_the_limit_is_processor_time(caplog):
    async def main():
        scoring = ScoringProcess("json", seconds=0.5)
        try:
            return await scoring.call(scorers.spin), await scoring.call(scorers.length, "four")
        finally:
            await scoring.close()

    assert asyncio.run(main()) == (None, 4.0)
    assert "spin took more than 0.5 s of processor time and counts as 0" in caplog.text


def test_a_cancelled_call_ends_its_process():
    async def main():
        scoring = ScoringProcess("json", seconds=60)
        try:
            first = await scoring.call(scorers.pid)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scoring.call(scorers.hang), 0.2)
            assert await scoring.call(scorers.pid) != first
        finally:
            await scoring.close()

    asyncio.run(main())


def test_the_child_goes_when_its_parent_is_killed():
    code = (
        "import asyncio, os, signal\n"
        "from nemorl.environments.scoring_process import ScoringProcess\n"
        "from tests.environments import scorers\n"
        "async def main():\n"
        "    print(int(await ScoringProcess('json', 60).call(scorers.pid)), flush=True)\n"
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
