"""A worker's log is complete at every moment, and its end is found."""

import asyncio
from pathlib import Path

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.logs import MAX_START_BYTES, START_OF_LOG, WorkerProcesses, last_lines, process_of

LIMITS = {"stage": "testing", "seconds": 30.0}


def test_everything_a_worker_says_is_in_its_log_while_it_lives(policy: WorkerGroup):
    asyncio.run(policy.call("say", "hello", **LIMITS))
    for worker in policy.workers:
        assert worker.log.name == f"policy-{worker.rank}.log"
        said = worker.log.read_text()
        assert said.startswith(f"{START_OF_LOG} policy-{worker.rank} process ")
        for line in ("printed hello", "error stream hello", "native hello"):
            assert f"\n{line}\n" in said
        assert "INFO nemorl.target: logged hello\n" in said
        assert "a library's note" not in said


def test_the_last_lines_are_those_of_the_latest_start(tmp_path: Path):
    log = tmp_path / "policy-0.log"
    lines = [f"{START_OF_LOG} policy-0", "old", f"{START_OF_LOG} policy-0", *map(str, range(30))]
    log.write_text("\n".join(lines) + "\n")
    assert last_lines(log, 3) == ("27", "28", "29")
    assert last_lines(log, 50) == tuple(map(str, range(30)))


def test_the_last_lines_leave_out_the_warnings_of_python(tmp_path: Path):
    log = tmp_path / "policy-0.log"
    log.write_text(
        "loaded\n"
        "/lib/torch/x.py:12: UserWarning: a kernel is missing\n"
        "  warnings.warn(\n"
        "/lib/y.py:3: DeprecationWarning: old\n"
        "Traceback (most recent call last):\n"
        '  File "a.py", line 3\n'
        "2026-01-01 WARNING nemorl.policy: the norm is nan\n"
    )
    assert last_lines(log) == (
        "loaded",
        "Traceback (most recent call last):",
        '  File "a.py", line 3',
        "2026-01-01 WARNING nemorl.policy: the norm is nan",
    )


def test_a_log_on_another_machine_is_not_an_error(tmp_path: Path):
    assert last_lines(tmp_path / "absent.log") == (
        f"({tmp_path}/absent.log cannot be read on this machine: No such file or directory)",
    )


def test_processes_are_those_of_the_whole_log_as_it_grows(tmp_path: Path):
    """Starts in several writes, in lines longer than what is read again, and in a log that was replaced."""
    log, processes = tmp_path / "policy-0.log", WorkerProcesses()
    assert processes.of(log) is None
    line = f"{START_OF_LOG} policy-0 process 17 on host 2026-01-01T00:00:00+00:00\n"
    filler = "x" * (2 * MAX_START_BYTES) + "\n"
    writes = [line[:9], line[9:40], line[40:], filler, "short\n", line.replace("17", "18"), filler]
    for text in writes:
        with log.open("a", encoding="utf-8") as file:
            file.write(text)
        assert processes.of(log) == process_of(log)
        assert processes.of(log) == process_of(log)
    assert processes.of(log) == (18, "host")
    log.write_text(line, encoding="utf-8")
    assert processes.of(log) == (17, "host")
    log.unlink()
    assert processes.of(log) is None
