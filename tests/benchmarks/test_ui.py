"""The run that measures the web app is one that it reads, and every request of the benchmark is answered."""

import json
from pathlib import Path

import pytest

from nemorl.observe.run_folder import RunPaths
from nemorl.ui.tokens import Tokenizers, view_trajectory
from nemorl.ui.trajectories import Query, Tables
from tests.scripts import load_script

TRAJECTORIES, STEPS, TOKENS = 2000, 20, 500


@pytest.mark.ci
def test_the_run_is_complete_and_the_requests_are_answered(tmp_path: Path) -> None:
    ui = load_script("benchmarks/ui.py", "benchmarks_ui")
    ui.make_run(tmp_path, TRAJECTORIES, STEPS, TOKENS)
    run = tmp_path / ui.RUN
    assert len(RunPaths(run).metrics.read_text().splitlines()) == STEPS
    table = Tables().open(run)
    assert (len(table), table.page(Query("stored"), 0, 0).matching) == (TRAJECTORIES, ui.GROUP_SIZE)
    view = view_trajectory(run, table.rows([TRAJECTORIES - 1])[0], Tokenizers())
    assert view.notes == []
    assert len(view.texts or []) == len(view.arrays["trainer_logprob"]) == TOKENS
    ui.write_short_runs(tmp_path / ui.SHORT, 5)
    with ui.serving(tmp_path) as server:
        of_watch = ui.measure_watch(server, 2)
        assert len(json.loads(server.get("/api/runs/list"))) == 6
        seconds = ui.measure_requests(server, TRAJECTORIES, STEPS, 2)
        of_compose = ui.measure_compose(server, 2)
        assert server.megabytes > 0
    assert {name: len(values) for name, values in of_compose.items()} == {
        **{"first check": 1, "check after a keystroke": 2}
    }
    assert {name: len(values) for name, values in of_watch.items()} == {
        **{"first state of a run": 1, "state of a run": 2, "chart of three metrics": 2},
        **{"first list of runs": 1, "list of runs": 2},
    }
    assert {name: len(values) for name, values in seconds.items()} == {
        **{"first table": 1, "filter": 2, "sort": 2, "any page": 2, "histogram": 2, "trajectory": 2}
    }
