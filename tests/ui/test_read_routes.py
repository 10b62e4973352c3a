"""Requests of Read and Compare: what they answer, and how they refuse."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.examples import make_sample
from tests.ui.requests import KEY, Client, asked, get
from tests.ui.stored_runs import END, ids, make_run, write_config, write_samples


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one")
    make_run(folder / "other", better=0.25)
    write_config(folder / "old", folder / "model")
    write_samples(folder / "old", [make_sample(1), make_sample(2)], "{torn")
    write_config(folder / "new", folder / "model")
    return folder


def arrays(root: Path, path: str, **params: str) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Facts and arrays of an answer, read as the page reads them."""
    import json

    async def work(client: Client) -> bytes:
        answer = await client.get(path, params=params, headers=KEY)
        assert answer.status == 200
        return await answer.read()

    body = asked(root, work)
    (length,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + length])
    start = (4 + length + 7) // 8 * 8
    found = {}
    for name, each in header["arrays"].items():
        count = int(np.prod(each["shape"]))
        found[name] = np.frombuffer(body, each["dtype"], count, start + each["offset"])
    return header["facts"], found


def test_the_table_with_its_counts(root: Path) -> None:
    assert get(root, "/api/read/rows", run="one") == (200, {"rows": 16})
    status, table = get(root, "/api/read/table", run="one", filter="reward > 1")
    assert (status, table["rows"], table["matching"], table["source"]) == (200, 16, 7, "index")
    assert table["counts"]["phase"] == {"training": 6, "validation": 1}
    assert table["columns"]["rewards.exact"] == "number"
    _, page = get(root, "/api/read/page", run="one", filter="phase == 'training'", sort="-reward", count="2")
    assert [(row["step"], row["reward"]) for row in page["rows"]] == [(1, 2.5), (1, 2.5)]
    assert page["rows"][0]["logprob_gap"] == "NaN"
    _, bins = get(root, "/api/read/histogram", run="one", column="task", filter="phase == 'validation'")
    assert (bins["edges"], bins["counts"]) == ([0, 1, 2, 3, 4], [1, 1, 1, 1])


def test_a_wrong_filter_leaves_the_page_whole(root: Path) -> None:
    status, table = get(root, "/api/read/table", run="one", filter="rewrd > 1")
    assert (status, table["matching"]) == (200, 16)
    assert table["problem"] == {
        "error": "no column rewrd",
        "place": "columns 1 to 5",
        "fix": "did you mean `reward`?",
    }
    assert get(root, "/api/read/page", run="one", filter="rewrd > 1")[0] == 400


def test_a_trajectory_in_raw_arrays(root: Path) -> None:
    facts, found = arrays(root, "/api/read/trajectory", run="one", step="2", group="2", sample="0")
    assert found["tokens"].tolist() == [*ids("2+2=2"), END]
    np.testing.assert_allclose(found["logprob"][4:], [-0.04, -0.05])
    np.testing.assert_allclose(found["gap"][4:], [0.25, 0.25], rtol=1e-6)
    assert facts["texts"] == [*"2+2=2", "<end>"]
    assert [part["product"] for part in facts["rewards"]] == [2.0, 0.5]


def test_groups_tasks_and_searches(root: Path) -> None:
    _, group = get(root, "/api/read/group", run="one", step="2", group="2", sample="0")
    assert [answer["text"] for answer in group["answers"]] == ["2<end>", "no<end>?né 💡<end>"]
    _, task = get(root, "/api/read/task", run="one", task="7", stored="1", each="1")
    assert [answer["row"]["step"] for answer in task["answers"]] == [1, 1, 2, 2, 3, 3]
    assert task["trend"]["steps"] == [1, 2, 3]
    _, found = get(root, "/api/read/search", run="one", text="né")
    assert (len(found["matches"]), found["looked"], found["next"]) == (3, 8, None)


def test_a_run_of_texts_only(root: Path) -> None:
    _, table = get(root, "/api/read/table", run="old")
    assert (table["source"], table["rows"], len(table["notes"])) == ("samples", 2, 2)
    facts, found = arrays(root, "/api/read/trajectory", run="old", step="2", group="2", sample="0")
    assert facts["conversation"]["completion"] == "046"
    assert found == {}
    _, group = get(root, "/api/read/group", run="old", step="1", group="1", sample="0")
    assert group["answers"][0]["text"] == "046"
    _, matches = get(root, "/api/read/search", run="old", text="46")
    assert len(matches["matches"]) == 2


@pytest.mark.parametrize(
    ("path", "params", "status", "says"),
    [
        ("/api/read/table", {"run": "none"}, 404, "no run in"),
        ("/api/read/table", {"run": "../one"}, 403, "not a path below"),
        ("/api/read/table", {"run": "new"}, 404, "has no index of trajectories"),
        ("/api/read/page", {"run": "one", "offset": "x"}, 400, "offset = 'x' is no integer"),
        ("/api/read/page", {"run": "one", "sort": "rewrd"}, 404, "no column rewrd"),
        (
            "/api/read/trajectory",
            {"run": "one", "step": "9", "group": "0", "sample": "0"},
            404,
            "no trajectory 9/0/0",
        ),
        ("/api/read/trajectory", {"run": "one"}, 400, "step = '' is no integer"),
        ("/api/compare/curves", {"runs": "one", "metric": "x", "axis": "mood"}, 400, "axis = 'mood' is none"),
        ("/api/compare/tasks", {"runs": "one"}, 400, "two are paired"),
        ("/api/compare/metrics", {"runs": ""}, 400, "0 runs are named"),
        ("/api/compare/metrics", {"runs": ",".join(f"r{n}" for n in range(11))}, 400, "11 runs are named"),
    ],
)
def test_refusals(root: Path, path: str, params: dict[str, str], status: int, says: str) -> None:
    found, body = get(root, path, **params)
    assert found == status
    assert says in body["error"]


@pytest.mark.parametrize("path", ["/api/read/table", "/api/read/trajectory", "/api/compare/tasks"])
def test_nothing_is_answered_without_the_token(root: Path, path: str) -> None:
    assert get(root, path, headers={}, run="one")[0] in (401, 403)


def test_runs_are_compared(root: Path) -> None:
    _, configs = get(root, "/api/compare/configs", runs="one,other")
    assert configs == {"fields": [], "notes": []}  # but for run_dir
    _, paired = get(root, "/api/compare/tasks", runs="one,other", filter="phase == 'validation'")
    assert (paired["count"], paired["difference"], paired["notes"]) == (4, 0.375, [])
    _, both = get(
        root, "/api/compare/answers", runs="one,other", task="1", set="easy", filter="phase == 'validation'"
    )
    assert [[answer["text"] for answer in side] for side in both] == [["2<end>"], ["2<end>"]]
    facts, found = arrays(root, "/api/compare/curves", runs="one,other", metric="reward/mean")
    assert facts == {"missing": []}
    assert found["y1"].tolist() == [2.5, 3.5, 4.5]
    _, names = get(root, "/api/compare/metrics", runs="one,new")
    assert names["metrics"]["reward/mean"] == 1
