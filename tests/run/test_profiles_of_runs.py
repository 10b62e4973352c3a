"""`policy.profile`: traces of the steps and ranks that it names."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.run.runs import assert_same_run, finish, lines, start, write_experiment

LAYOUT = {"tensor_parallel_size": 2}


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file) as trace:
        return json.load(trace)["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_run_writes_traces_of_named_steps_and_ranks(folder: Path, model: Path) -> None:
    runs = {}
    for name, profile in (("plain", None), ("profiled", {"step_numbers": [2], "ranks": [1], "memory": True})):
        path = write_experiment(folder, model, name, policy={"layout": LAYOUT, "profile": profile})
        status, output = finish(start("train", path))
        assert status == 0, output
        runs[name] = path.with_suffix("")
    assert_same_run(lines(runs["profiled"]), lines(runs["plain"]))
    assert not (runs["plain"] / "profiles").exists()

    (trace,) = (runs["profiled"] / "profiles").iterdir()
    assert trace.name == "step_00000002-policy-rank1.json.gz"
    found = events(trace)
    names = {event["name"] for event in found}
    assert {"nemorl: forward and backward", "nemorl: optimizer step"} <= names
    assert "[memory]" in names
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in found if e["name"].startswith("nemorl: ")}
    began, ended = spans["nemorl: forward and backward"]
    products = [event for event in found if event["name"] == "aten::mm"]
    assert any(began <= event["ts"] <= ended for event in products)
