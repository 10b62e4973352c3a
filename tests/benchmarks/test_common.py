"""Timing in turns, and what a result file holds."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.common import Timing, _processor, describe_machine, publish, table_of, time_in_turns

TWO_CORES_FOUR_THREADS = "\n\n".join(
    f"processor\t: {n}\nmodel name\t: Example CPU @ 2.00GHz\nphysical id\t: 0\ncore id\t\t: {n % 2}"
    for n in range(4)
)


def test_alternatives_take_turns_and_the_first_round_is_not_counted():
    order: list[str] = []
    slow = time_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), time.sleep(0.02))}, rounds=3
    )
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(slow["a"].seconds) == len(slow["b"].seconds) == 3
    assert min(slow["b"].seconds) >= 0.02


def test_ratios_are_those_of_each_round():
    # The machine became slower from round to round; the ratio of the medians would be 4/3.
    ours, theirs = Timing("ours", (1.0, 3.0, 4.0)), Timing("theirs", (2.0, 6.0, 4.0))
    assert theirs.ratio_to(ours) == 2.0
    assert theirs.median / ours.median == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="shorter"):
        theirs.ratio_to(Timing("one round", (1.0,)))


def test_physical_cores_are_counted_once():
    assert _processor(TWO_CORES_FOUR_THREADS) == ("Example CPU @ 2.00GHz", 2)


def test_a_result_names_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"stage": "training", "seconds": 1.23456}, {"stage": "refit", "seconds": 0.5}]
    path = publish("example", {"rows": rows}, table_of("stages", rows), out=tmp_path / "bench")
    written = json.loads(path.read_text())
    assert written["benchmark"] == "example"
    assert written["rows"] == rows
    assert written["machine"]["cpu"] == describe_machine().cpu
    assert written["machine"]["versions"]["torch"]
    printed = capsys.readouterr().out
    assert "training" in printed
    assert "1.235" in printed
