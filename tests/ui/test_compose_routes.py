"""Requests of the screen Compose: files, edits, checks, scores and what is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nemorl.ui.errors import UiError
from nemorl.ui.experiment_files import (
    Conflict,
    list_experiments,
    read_text,
    reward_template,
    save_experiment,
    save_reward,
    version_of,
)
from nemorl.ui.folders import Folders
from tests.ui.folders import make_run
from tests.ui.requests import KEY, Client, asked, get
from tests.ui.user_rewards import LINES, REWARDS, TEXT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.yaml").write_text(TEXT.replace("my_rewards:REWARD", "format_tags"), encoding="utf-8")
    (tmp_path / "other.yaml").write_text("name: no experiment\n", encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(LINES, encoding="utf-8")
    return tmp_path


def post(root: Path, *requests: tuple[str, dict[str, Any]], **options: Any) -> list[tuple[int, Any]]:
    async def work(client: Client) -> list[tuple[int, Any]]:
        answers = []
        for path, body in requests:
            answer = await client.post(f"/api/compose/{path}", json=body, headers=KEY)
            answers.append((answer.status, await answer.json()))
        return answers

    return asked(root, work, **options)


def test_a_pipe_is_no_file(tmp_path):
    """It would never end."""
    os.mkfifo(tmp_path / "pipe.yaml")
    status, body = get(tmp_path, "/api/compose/file", file="pipe.yaml")
    assert (status, body["error"]) == (415, "pipe.yaml is no regular file")
    ((status, body),) = post(tmp_path, ("score", {"text": TEXT, "lines": "pipe.yaml"}))
    assert (status, body["error"]) == (415, "pipe.yaml is no regular file")


@pytest.mark.ci
def test_check_layouts_and_scores_of_a_text(folder: Path) -> None:
    text = (folder / "x.yaml").read_text(encoding="utf-8")
    of_file = {"text": text, "file": "x.yaml"}
    leaving = {**of_file, "text": TEXT.replace("REWARD", "leaves"), "lines": "lines.jsonl"}
    (make_run(folder / "run") / "samples.jsonl").write_text(LINES, encoding="utf-8")
    (check, broken, layouts, scored, of_run, left, unknown) = post(
        folder,
        ("check", of_file),
        ("check", {"text": "a: [", "file": "x.yaml"}),
        ("layouts", {**of_file, "preset": "8x80"}),
        ("score", {**of_file, "lines": "lines.jsonl"}),
        ("score", {**of_file, "run": "run"}),
        ("score", leaving),
        ("check", {**of_file, "preset": "9x9"}),
    )
    assert check[0] == 200
    model = next(p for p in check[1]["report"]["problems"] if p["field"] == "policy.model_path")
    assert (model["line"], check[1]["command"]) == (2, "nemorl train x.yaml")
    assert check[1]["slurm"] == "nemorl slurm submit x.yaml"
    assert broken[1]["form"] is None
    assert broken[1]["broken"]["fix"].startswith("invalid YAML")
    assert (layouts[0], layouts[1]["place"]) == (422, "policy.model_path")
    assert layouts[1]["error"].startswith("there is no such folder")
    assert scored[1]["parts"][0]["values"] == [1.0, 0.0, 1.0, 1.0]
    assert of_run[1]["totals"] == scored[1]["totals"]
    assert left[0] == 422
    assert "exit code 7" in left[1]["error"]
    assert (unknown[0], unknown[1]["error"]) == (400, "unknown preset 9x9")


def test_edits_change_lines_and_are_refused_with_a_sentence(folder: Path) -> None:
    text = "defaults: x.yaml\nseed: 1  # one\n"
    of_file = {"text": text, "file": "y.yaml"}
    (set_, inherited, alias, malformed) = post(
        folder,
        ("edit", {**of_file, "edits": [{"path": ["seed"], "value": 2}]}),
        ("edit", {**of_file, "edits": [{"path": ["rewards", 1, "weight"], "value": 0.5}]}),
        ("edit", {"text": "a: &x {b: 1}\nc: *x\n", "edits": [{"path": ["a", "b"], "value": 2}]}),
        ("edit", {**of_file, "edits": [{"value": 2}]}),
    )
    assert set_[1]["text"] == "defaults: x.yaml\nseed: 2  # one\n"
    assert "  - function: format_tags\n    weight: 0.5\n" in inherited[1]["text"]
    assert alias == (422, {"error": "line 2 repeats it as *x; edit the text", "place": "a.b", "fix": ""})
    assert malformed[0] == 400


def test_saving_keeps_what_changed_on_disk(folder: Path) -> None:
    status, found = get(folder, "/api/compose/file", file="x.yaml")
    assert status == 200
    mine = {"file": "x.yaml", "text": found["text"] + "seed: 3\n", "version": found["version"]}
    (folder / "x.yaml").write_text("# theirs\n", encoding="utf-8")
    ((conflict, body),) = post(folder, ("save", mine))
    assert conflict == 409
    assert body["text"] == "# theirs\n"
    assert (folder / "x.yaml").read_text(encoding="utf-8") == "# theirs\n"
    ((saved, answer),) = post(folder, ("save", {**mine, "version": body["version"]}))
    assert (saved, answer["version"]) == (200, version_of(mine["text"].encode()))
    assert (folder / "x.yaml").read_text(encoding="utf-8") == mine["text"]


def test_a_new_file_overwrites_none(folder: Path) -> None:
    folders = Folders(folder)
    assert save_experiment(folders, "new/a.yaml", "seed: 1\n", None).text == "seed: 1\n"
    with pytest.raises(Conflict):
        save_experiment(folders, "new/a.yaml", "seed: 2\n", None)
    with pytest.raises(UiError, match="is no name of an experiment file"):
        save_experiment(folders, "a.txt", "", None)
    with pytest.raises(UiError, match="not a path below"):
        save_experiment(folders, "../a.yaml", "", None)


def test_a_recipe_comes_with_a_name_that_no_file_has(folder: Path) -> None:
    """Under its own name it would be taken for the file that is there."""
    name = {"name": "quickstart/grpo"}
    free = get(folder, "/api/compose/recipe", **name, file="grpo.yaml")[1]
    assert (free["file"], "num_steps" in free["text"]) == ("grpo.yaml", True)
    for taken in ("grpo.yaml", "grpo-2.yaml"):
        (folder / taken).write_text("# theirs\n", encoding="utf-8")
    assert get(folder, "/api/compose/recipe", **name, file="grpo.yaml")[1]["file"] == "grpo-3.yaml"
    empty = get(folder, "/api/compose/recipe", file="x.yaml")[1]
    assert empty == {"text": "", "file": "x-2.yaml"}
    ((conflict, body),) = post(folder, ("save", {"file": "grpo.yaml", "text": "seed: 1\n", "version": None}))
    assert (conflict, body["text"]) == (409, "# theirs\n")


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_unwritable_folder_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """As root writes into every folder, the refusal of the system is made up. What is there stays."""
    version, before = read_text(Folders(folder), "x.yaml").version, (folder / "x.yaml").read_bytes()

    def refused(*_: object, **__: object) -> None:
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    saved, reward = post(
        folder,
        ("save", {"file": "x.yaml", "text": "seed: 1\n", "version": version}),
        ("reward", {"file": "mine.py", "text": "def f(): pass\n", "version": None}),
    )
    for (status, body), name in ((saved, "x.yaml"), (reward, "mine.py")):
        assert (status, body["place"]) == (403, name)
        assert body["error"] == f"{name} cannot be written: {os.strerror(kind)}"
        assert body["fix"] == "choose another name, or make the folder writable"
    assert (folder / "x.yaml").read_bytes() == before
    assert not (folder / "mine.py").exists()


def test_a_folder_that_is_a_file_is_a_sentence(folder: Path) -> None:
    with pytest.raises(UiError, match=r"x\.yaml/a\.yaml cannot be written"):
        save_experiment(Folders(folder), "x.yaml/a.yaml", "seed: 1\n", None)


def test_files_of_rewards(folder: Path) -> None:
    folders = Folders(folder)
    (folder / "parts").mkdir()
    for signature in ("trl", "openrlhf", "verl"):
        text = reward_template(signature, "mine")
        compile(text, "mine.py", "exec")
        name = f"parts/of_{signature}.py"
        assert save_reward(folders, name, text, None)[1] == [f"parts.of_{signature}:mine"]
    with pytest.raises(UiError, match=r"parts/b\.py:2 is no Python"):
        save_reward(folders, "parts/b.py", "def f():\nreturn 1\n", None)
    with pytest.raises(UiError, match="'my-file' is no name of a module"):
        save_reward(folders, "my-file.py", "def f(): pass\n", None)
    with pytest.raises(UiError, match="defines no function"):
        save_reward(folders, "c.py", "a = 1\n", None)


def test_lists_and_reads_files(folder: Path) -> None:
    assert list_experiments(Folders(folder)) == ["x.yaml"]
    with pytest.raises(UiError, match=r"there is no file no\.yaml"):
        read_text(Folders(folder), "no.yaml")
    (folder / "b.yaml").write_bytes(b"\xff")
    with pytest.raises(UiError, match=r"b\.yaml is not UTF-8 text"):
        read_text(Folders(folder), "b.yaml")
    assert get(folder, "/api/compose/facts")[1]["levels"] == ["simple", "advanced", "expert"]
    assert "num_steps" in get(folder, "/api/compose/recipe", name="quickstart/grpo")[1]["text"]
    assert get(folder, "/api/compose/recipe", name="none")[0] == 422


def test_read_only_writes_nothing(folder: Path) -> None:
    answers = post(folder, ("save", {}), ("reward", {}), read_only=True)
    assert [status for status, _ in answers] == [404, 404]
