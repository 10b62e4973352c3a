"""A run that draws tasks from a mixture of streams and others, by pass rates, and its resume."""

from pathlib import Path
from typing import Any

import pytest

from tests.required import require_module

from .runs import assert_same_run, finish, lines, start, tiny_model, write_experiment

pyarrow = require_module("pyarrow")
parquet = require_module("pyarrow.parquet")
datasets = require_module("datasets")

SOURCES = ("few", "made", "parquet", "saved")


def data_of(folder: Path) -> dict[str, Any]:
    """Streams are of a generator, a Parquet file and a Hugging Face dataset."""
    columns = {"prompt": [f"{n}+2=" for n in range(40)], "answer": [f"{n + 2:02d}" for n in range(40)]}
    parquet.write_table(pyarrow.table(columns), folder / "rows.parquet", row_group_size=7)
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    stream = {"size": 40, "window": 10}
    return {
        "chat": False,
        "train": {
            "name": "mixture",
            "sources": {
                name: {"dataset": dataset, "weight": weight}
                for name, weight, dataset in (
                    ("few", 1, {"name": "arithmetic", "digits": 1, "size": 8}),
                    ("made", 2, {"name": "generator", "function": "tests.run.rows:sums", **stream}),
                    ("parquet", 2, {"name": "tasks", "path": str(folder / "rows.parquet"), "stream": stream}),
                    (
                        "saved",
                        2,
                        {
                            "name": "tasks",
                            "path": str(folder / "saved"),
                            "split": "train",
                            "stream": stream,
                        },
                    ),
                )
            },
        },
        "sampling": {
            "pass_rate": {"max": 0.9, "max_skips": 2},
            "replay": {"share": 0.4, "max_pass_rate": 0.5},
        },
        "validation": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_draws_the_tasks_of_the_run_that_would_have_been(
    tmp_path: Path, staleness: int
) -> None:
    model = tiny_model(tmp_path / "model")
    algorithm = {"max_staleness": staleness, "validation": {}, "num_steps": 6}
    # Without the policy's second process: the test is of the data.
    changes = {"data": data_of(tmp_path), "algorithm": algorithm, "policy": {"layout": {}}}
    config = write_experiment(tmp_path, model, "parts", **changes)
    status, output = finish(start("train", config, "algorithm.num_steps=4"))
    assert status == 0, output
    status, output = finish(start("train", config, "--resume"))
    assert status == 0, output
    parts = lines(tmp_path / "parts")
    assert [step.step for step in parts] == [1, 2, 3, 4, 5, 6]
    seen: set[str] = set()
    for step in parts:
        shares = {name: step.values.get(f"source/{name}/share", 0) for name in SOURCES}
        assert sum(shares.values()) == pytest.approx(1)
        seen |= {name for name, share in shares.items() if share}
        assert "sampling/skipped" in step.values
    assert seen == {*SOURCES}
    if staleness == 0:
        status, output = finish(start("train", write_experiment(tmp_path, model, "whole", **changes)))
        assert status == 0, output
        assert_same_run(parts, lines(tmp_path / "whole"))
