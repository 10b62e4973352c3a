"""Operators on the pretended device: known values, waits of the host, mixed devices, memory, collectives."""

import inspect
from collections import Counter
from pathlib import Path

from nemorl.rehearsal.execution import Event
from tests.rehearsal import operators
from tests.rehearsal.processes import alone


def line_of(comment: str) -> str:
    """`file:line` of the line of `operators` that ends with a comment."""
    lines = inspect.getsource(operators).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"{Path(operators.__file__).name}:{number} "


def at(events: list[tuple[Event, int]], comment: str) -> list[str]:
    return [event.what for event, _ in events if line_of(comment) in event.location]


def test_indices_and_counts_keep_their_values() -> None:
    outcome = alone(operators.known_values)

    assert outcome.values["places"] == [3, 4, 5]
    assert outcome.values["by_expert"] == [4, 4, 4, 4]  # 8 tokens of 2 experts, over 4
    assert outcome.values["unknown"] == [1, 1]
    assert outcome.values["real"] == [1, 2, 3]
    assert outcome.values["on"] == "pretended"
    assert not outcome.wrong_devices


def test_waits_are_found_by_their_line() -> None:
    outcome = alone(operators.waits)

    assert outcome.values["gradient"] == "pretended"
    assert at(outcome.waits, "item") == ["item"]
    assert at(outcome.waits, "copy") == ["copy to the host"]
    assert at(outcome.waits, "index") == ["index by a mask"]
    assert at(outcome.waits, "nonzero") == ["nonzero"]
    assert at(outcome.waits, "all") == ["synchronize"]
    assert len(outcome.waits) == 5
    assert Counter(event.what for event, _ in outcome.uploads) == {"copy to the device": 1}  # of the mask


def test_tensors_of_two_devices_are_found_by_their_line() -> None:
    outcome = alone(operators.wrong_devices)

    ((event, count),) = outcome.wrong_devices
    assert line_of("wrong") in event.location
    assert event.what == "add of (3,) on pretended, (3,) on cpu"
    assert count == 1
    assert outcome.values["on"] == {"pretended"}


def test_memory_counts_storages_while_they_live() -> None:
    sizes = alone(operators.memory)

    assert sizes["two"][0] == 3
    assert "operators.py" in sizes["two"][1]
    assert sizes["one"] == (2, {"weights": 2**20, "activations": 2**20})
    assert (sizes["held"], sizes["after_view"], sizes["resized"]) == (2, 1, 0)
    assert sizes["copies_on_host"] == [True, False]  # with data, and offloaded state without any


def test_other_ranks_have_what_this_one_has() -> None:
    values = alone(operators.collectives)

    assert values == {
        "sum": [1024, 1024],
        "max": [5],
        "gathered": {(1024, 1024)},
        "objects": {"a": 1},
        "broadcast": [42],
        "rank": 3,
    }
