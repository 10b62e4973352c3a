"""A run that draws tasks from a mixture, by a curriculum and by pass rates, and its resume."""

from pathlib import Path

import pytest

from .runs import assert_same_run, finish, lines, start, tiny_model, write_experiment

DATA = {
    "chat": False,
    "train": {
        "name": "mixture",
        "sources": {
            "few": {"dataset": {"name": "arithmetic", "digits": 1, "size": 8}, "weight": 1},
            "made": {
                "dataset": {"name": "generator", "function": "tests.run.rows:sums", "size": 40, "window": 10},
                "weight": 3,
            },
        },
    },
    "sampling": {
        "pass_rate": {"max": 0.9, "max_skips": 2},
        "replay": {"share": 0.4, "max_pass_rate": 0.5},
    },
    "validation": None,
}


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_resumed_run_draws_the_tasks_of_the_run_that_would_have_been(
    tmp_path: Path, staleness: int
) -> None:
    model = tiny_model(tmp_path / "model")
    algorithm = {"max_staleness": staleness, "validation": {}, "num_steps": 6}
    # Without the policy's second process: the test is of the data.
    changes = {"data": DATA, "algorithm": algorithm, "policy": {"layout": {}}}
    config = write_experiment(tmp_path, model, "parts", **changes)
    status, output = finish(start("train", config, "algorithm.num_steps=4"))
    assert status == 0, output
    status, output = finish(start("train", config, "--resume"))
    assert status == 0, output
    parts = lines(tmp_path / "parts")
    assert [step.step for step in parts] == [1, 2, 3, 4, 5, 6]
    for step in parts:
        assert step.values["source/few/share"] + step.values["source/made/share"] == 1
        assert {"source/made/reward", "source/made/pass_rate", "sampling/skipped"} <= step.values.keys()
    if staleness == 0:
        status, output = finish(start("train", write_experiment(tmp_path, model, "whole", **changes)))
        assert status == 0, output
        assert_same_run(parts, lines(tmp_path / "whole"))
