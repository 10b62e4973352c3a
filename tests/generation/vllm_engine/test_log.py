"""What is reported of an engine that has ended."""

import os
from pathlib import Path

import pytest

from nemorl.generation.vllm_engine.host import first_error, last_words

LOG = """
(Worker pid=7) ERROR 11-21 18:47:40 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=7) ERROR 11-21 18:47:40 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=7) ERROR 11-21 18:47:40 [multiproc_executor.py:953]     raise ValueError(text)
(Worker pid=7) ERROR 11-21 18:47:40 [multiproc_executor.py:953] ValueError: no room for the cache
(EngineCore pid=3) ERROR 11-21 18:47:49 [core.py:1510] Exception: failed. See stack trace for root cause.
RuntimeError: Engine core initialization failed.
""".strip().splitlines()


def test_the_first_error_is_the_cause() -> None:
    assert first_error(tuple(LOG)) == "ValueError: no room for the cache"
    assert first_error(tuple(LOG[4:])) == "RuntimeError: Engine core initialization failed."
    assert first_error(tuple(LOG[:3])) is None


def test_a_log_ends_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(LOG) + "\n")
    with log.open() as file:
        monkeypatch.setattr("nemorl.generation.vllm_engine.host._OUTPUT", file.fileno())
        told = last_words(2)
    assert told == (
        f": ValueError: no room for the cache. The last lines of its log:\n  | {LOG[-2]}\n  | {LOG[-1]}"
    )


def test_an_output_that_is_no_file_is_pointed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("nemorl.generation.vllm_engine.host._OUTPUT", writing)
    assert last_words() == "; its output says more"
    os.close(reading)
    os.close(writing)
