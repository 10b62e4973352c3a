"""Answers of runs that stored whole groups, or samples alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.earlier_answers import answers_of_file, answers_of_run
from nemorl.rollout.stored import RolloutFiles, StoredGroup
from tests.config.experiments import GRPO
from tests.ui.stored_runs import group_of, make_run, sampled


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The newest group of each step has the answers `1` to `3` and `no…`; a task is a line of tasks.jsonl."""
    run = make_run(tmp_path / "run", steps=3)
    tasks = [{"question": f"{n}+{n}=", "answer": str(n + n), "level": n} for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(t)}\n" for t in tasks), encoding="utf-8")
    return run


def write_config(run: Path) -> None:
    """That of a GRPO whose tasks are in tasks.jsonl, next to the run."""
    config: dict[str, Any] = yaml.safe_load(GRPO)
    train = {"name": "tasks", "path": str(run.parent / "tasks.jsonl")}
    train |= {"prompt_key": "question"}
    config["data"] = {"train": train, "chat": False}
    config["policy"]["model_path"] = str(run.parent / "model")
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_the_newest_groups_are_whole(run: Path) -> None:
    found = answers_of_run(run, limit=4)
    assert found.source == "whole groups of steps 2 to 3"
    assert [
        (one.group, one.completion.removesuffix("<end>"), one.recorded["exact"]) for one in found.answers
    ] == [
        *(("2/2", "2", 1.0), ("2/2", "no<end>?né 💡", 0.0)),
        *(("3/4", "3", 1.0), ("3/4", "no<end>?né 💡", 0.0)),
    ]
    assert not any(one.is_part for one in found.answers)
    assert answers_of_run(run, limit=3).source == "whole groups of step 3"
    assert len(answers_of_run(run, limit=1).answers) == 2  # a group is not cut


def test_answers_have_what_their_task_has(run: Path) -> None:
    write_config(run)
    (first, _) = answers_of_run(run, limit=2).answers
    assert (first.prompt, first.answer, first.columns["level"]) == ("7+7=", "14", 7)
    (run.parent / "tasks.jsonl").unlink()
    (first, _) = answers_of_run(run, limit=2).answers
    assert (first.prompt, first.answer, first.columns) == ("2+2=", None, {})


def test_failed_samples_are_left_out_and_counted(run: Path) -> None:
    files = RolloutFiles(RunPaths(run).trajectories)
    members = [sampled("2+2=", [text], {"exact": 1.0}, 9, 7) for text in ("4", "5", "6")]
    members[1] = replace(members[1], error="TimeoutError: no answer")
    group: StoredGroup = group_of(4, 9, 7, members)
    files.write(4, [group])
    found = answers_of_run(run, limit=2)
    assert [one.completion for one in found.answers] == ["4<end>", "6<end>"]
    assert found.problems == ["1 failed sample left out"]


def test_without_groups_or_their_tokenizer_there_are_samples(run: Path) -> None:
    line = {"step": 1, "task": 7, "prompt": "1+1=", "completion": "2", "rewards": {"exact": 1.0}}
    (run / "samples.jsonl").write_text(f"{json.dumps(line)}\n", encoding="utf-8")
    (run.parent / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    found = answers_of_run(run)
    assert (found.source, [one.is_part for one in found.answers]) == ("samples.jsonl", [True])
    (run / "samples.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        answers_of_run(run)


def test_lines_count_from_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl.rollout.earlier_answers.MAX_BYTES", 2**20)
    line = json.dumps({"prompt": "1+1=", "completion": "x" * 1000})
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{line}\n" * 1100, encoding="utf-8")
    found = answers_of_file(path, limit=2000)
    assert found.problems == ["only the last 1 MB of answers.jsonl were read; lines count from there"]
    assert 1000 < len(found.answers) < 1100
