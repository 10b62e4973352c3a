"""Rows from real files of every kind, streams, generators and mixtures."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.config.data import DataConfig, GeneratorDataset, TasksDataset
from nemorl.data.datasets import DatasetError, MixedTasks, StreamedTasks, difficulties, load_tasks, row_errors
from nemorl.data.rows import count_rows, read_rows
from tests.hub import serving
from tests.required import require_module

pyarrow = require_module("pyarrow")
parquet = require_module("pyarrow.parquet")
datasets = require_module("datasets")

HERE = "tests.data.test_rows"
calls: list[int] = []  # of `sums`


def sums(first: int = 0) -> Iterator[dict[str, object]]:
    calls.append(first)
    for number in itertools.count(first):
        yield {"prompt": f"{number}+1=", "answer": number + 1, "level": number % 4}


def ten_sums() -> Iterator[dict[str, object]]:
    return itertools.islice(sums(), 10)


def wrong() -> Iterator[object]:
    yield {"prompt": "1+1=", "answer": "2"}
    yield "1+2="


def columns(start: int, stop: int) -> dict[str, list[object]]:
    numbers = range(start, stop)
    return {"question": [f"{n}+1=" for n in numbers], "answer": [str(n + 1) for n in numbers]}


def write_parquet(path: Path, start: int, stop: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns(start, stop)), path, row_group_size=7)
    return path


def tasks_of(**options: object) -> list[str | None]:
    dataset = TasksDataset.model_validate({"name": "tasks", "prompt_key": "question"} | options)
    return [task.answer for task in load_tasks(dataset, DataConfig(train=dataset))]


ANSWERS = [str(n + 1) for n in range(30)]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, dict[str, object]]:
    """The same thirty tasks in every kind of place."""
    folder, split = tmp_path / "folder", {"split": "train"}
    write_parquet(folder / "b.parquet", 10, 30)
    rows = [
        dict(zip(("question", "answer"), row, strict=True))
        for row in zip(*columns(0, 10).values(), strict=True)
    ]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    loadable = write_parquet(tmp_path / "loadable" / "train.parquet", 0, 30)
    saved = datasets.Dataset.from_dict(columns(0, 30))
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "splits"))
    return {
        "parquet": {"path": loadable},
        "folder of files": {"path": folder},
        "hugging face": {"path": loadable.parent} | split,
        "save_to_disk": {"path": tmp_path / "saved"} | split,
        "save_to_disk of splits": {"path": tmp_path / "splits"} | split,
    }


def test_every_kind_of_place_gives_the_same_tasks(places: dict[str, dict[str, object]]) -> None:
    for name, place in places.items():
        assert tasks_of(**place) == ANSWERS, name
    limited = places["hugging face"] | {"split": "train[5:8]"}
    assert tasks_of(**limited) == ANSWERS[5:8]


def test_a_stream_of_every_kind_gives_the_task_of_an_index_in_any_order(
    places: dict[str, dict[str, object]],
) -> None:
    indexes = [0, 29, 3, 4, 14, 15, 2, 28]
    for name, place in places.items():
        options = {"name": "tasks", "prompt_key": "question", "stream": {"size": 30, "window": 4}}
        dataset = TasksDataset.model_validate(options | place)
        streamed = load_tasks(dataset, DataConfig(train=dataset))
        assert isinstance(streamed, StreamedTasks)
        assert [streamed[index].answer for index in indexes] == [ANSWERS[index] for index in indexes], name
        assert [streamed[index].index for index in indexes] == indexes


def test_rows_are_counted_up_to_a_limit(places: dict[str, dict[str, object]], tmp_path: Path) -> None:
    for name, place in places.items():
        dataset = TasksDataset.model_validate({"name": "tasks", "stream": {"size": 40}} | place)
        assert count_rows(dataset, 40, 60.0) == 30, name
        assert count_rows(dataset, 13, 60.0) == 13, name
    endless = GeneratorDataset(name="generator", function=f"{HERE}:sums", size=10**9)
    assert count_rows(endless, 100, 60.0) == 100
    assert count_rows(endless, 10**9, 0.0) is None
    assert count_rows(TasksDataset(name="tasks", path="on/hub", split="train"), 1, 60.0) is None
    (tmp_path / "tasks" / "a").mkdir(parents=True)
    (tmp_path / "tasks" / "a" / "instruction.md").write_text("Do it.")
    assert count_rows(TasksDataset(name="tasks", path=tmp_path / "tasks"), 9, 60.0) == 1


def test_skipped_rows_keep_their_place_in_messages(places: dict[str, dict[str, object]]) -> None:
    folder = places["folder of files"]["path"]
    dataset = TasksDataset(name="tasks", path=folder)
    assert [place for place, _ in read_rows(dataset, skip=9)][:2] == [
        f"{folder}/a.jsonl, line 19",  # every second line is empty
        f"{folder}/b.parquet, row 1",
    ]


def test_a_stream_reads_only_forward_and_again_only_what_lies_behind() -> None:
    options = {"name": "generator", "function": f"{HERE}:sums", "size": 1000, "window": 10}
    dataset = GeneratorDataset.model_validate(options | {"arguments": {"first": 5}})
    calls.clear()
    streamed = load_tasks(dataset, DataConfig(train=dataset))
    assert [streamed[index].answer for index in range(100)] == [str(n + 6) for n in range(100)]
    assert calls == [5]
    assert streamed[70].answer == "76"  # one of the last windows
    assert calls == [5]
    assert streamed[3].answer == "9"
    assert calls == [5, 5]


def test_a_generator_without_a_size_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = GeneratorDataset(name="generator", function=f"{HERE}:ten_sums")
    tasks = load_tasks(dataset, DataConfig(train=dataset))
    assert [task.answer for task in tasks] == [str(n + 1) for n in range(10)]
    monkeypatch.setattr("nemorl.data.rows._MAX_ROWS", 100)
    endless = GeneratorDataset(name="generator", function=f"{HERE}:sums")
    with pytest.raises(DatasetError, match="sums yields more than 100 rows; set size"):
        load_tasks(endless, DataConfig(train=endless))


def test_a_stream_that_ends_early_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "few.parquet", 0, 9)
    with pytest.raises(
        DatasetError, match=r"few.parquet has 9 rows, and stream.size is 20; set it to 9 or less"
    ):
        tasks_of(path=path, stream={"size": 20, "window": 5})


def test_columns_have_further_names(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "tasks.parquet", 0, 2)
    renamed = {"columns": {"prompt": "question", "solution": "answer"}, "answer_key": "solution"}
    dataset = TasksDataset.model_validate({"name": "tasks", "path": path} | renamed)
    task = load_tasks(dataset, DataConfig(train=dataset))[1]
    assert (task.messages[0].content, task.answer, task.columns["solution"]) == ("1+1=", "2", "2")
    with pytest.raises(
        DatasetError, match=r"row 1: column `x` is missing; there are \['answer', 'question'\]"
    ):
        tasks_of(path=path, columns={"y": "x"})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{HERE}:wrong", "wrong, row 2: expected a dict with the columns of a task, not str"),
        (f"{HERE}:sum", "has no sum; did you mean `sums`?"),
        ("nowhere_at_all:rows", "cannot import nowhere_at_all"),
        ("builtins:len", "builtins:len raised TypeError"),
    ],
)
def test_a_wrong_generator_is_named(function: str, message: str) -> None:
    dataset = GeneratorDataset(name="generator", function=function, size=2)
    (error,) = row_errors(dataset, DataConfig(train=dataset))
    assert message in error


def test_a_folder_without_rows_and_a_broken_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DatasetError, match=r"holds no \.jsonl, \.parquet and \.arrow files: name a file, or set `split`"
    ):
        tasks_of(path=tmp_path / "empty")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"cannot read the dataset .*broken\.parquet"):
        tasks_of(path=tmp_path / "broken.parquet")
    with pytest.raises(DatasetError, match=r"cannot read the dataset .*empty \(train\)"):
        tasks_of(path=tmp_path / "empty", split="train")


def mixture(tmp_path: Path) -> DataConfig:
    file = write_parquet(tmp_path / "tasks.parquet", 0, 6)
    sources = {
        "file": {"dataset": {"name": "tasks", "path": file, "prompt_key": "question"}, "max_tasks": 4},
        "made": {"dataset": {"name": "generator", "function": f"{HERE}:sums", "size": 5}},
    }
    return DataConfig.model_validate({"train": {"name": "mixture", "sources": sources}})


def test_tasks_of_a_mixture_are_numbered_over_its_sources(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    mixed = load_tasks(data.train, data)
    assert isinstance(mixed, MixedTasks)
    assert mixed.sizes == (4, 5)
    assert [task.index for task in mixed] == list(range(9))
    assert [task.columns["source"] for task in mixed] == ["file"] * 4 + ["made"] * 5
    assert [task.answer for task in mixed] == ["1", "2", "3", "4", "1", "2", "3", "4", "5"]


def test_a_curriculum_requires_numbers_and_tasks_in_every_stage(tmp_path: Path) -> None:
    train = {"name": "tasks", "path": tmp_path / "tasks.jsonl"}
    rows = [{"prompt": "a", "answer": "b", "level": level} for level in (1, 2.5, 3)]
    train["path"].write_text("\n".join(map(json.dumps, rows)))

    def curriculum(key: str, *stages: dict[str, object]) -> DataConfig:
        return DataConfig.model_validate(
            {"train": train, "sampling": {"curriculum": {"key": key, "stages": stages}}}
        )

    for data, message in (
        (curriculum("level", {"steps": 1, "max": 2}), None),
        (curriculum("answer", {"steps": 1, "max": 2}), "task 0 has no number in column `answer`"),
        (curriculum("level", {"steps": 1}, {"steps": 1, "min": 4}), "stage 1 admits no task: .* from 1 to 3"),
    ):
        assert data.sampling.curriculum is not None
        tasks = load_tasks(data.train, data)
        if message is None:
            assert difficulties(tasks, data.sampling.curriculum) == [1, 2.5, 3]
        else:
            with pytest.raises(DatasetError, match=message):
                difficulties(tasks, data.sampling.curriculum)


UNREACHABLE = """
import logging
from nemorl.config.data import DataConfig, TasksDataset
from nemorl.data.datasets import load_tasks, row_errors
logging.basicConfig(level=logging.WARNING)
dataset = TasksDataset(name="tasks", path="org/sums", split="train", prompt_key="question")
print(len(load_tasks(dataset, DataConfig(train=dataset))))
absent = dataset.model_copy(update={"path": dataset.path.parent / "absent"})
print(row_errors(absent, DataConfig(train=absent)))
"""
STREAMED = """
from nemorl.config.data import DataConfig, StreamConfig, TasksDataset
from nemorl.data.datasets import load_tasks
for stream in (None, StreamConfig(size=30, window=8)):
    dataset = TasksDataset(name="tasks", path="org/sums", split="train", prompt_key="question", stream=stream)
    tasks = load_tasks(dataset, DataConfig(train=dataset))
    print(len(tasks), tasks[25].answer, tasks[3].answer)
of_b = {"path": dataset.path.parent / "parts", "files": "b/*.parquet", "stream": None}
some = dataset.model_copy(update=of_b)
print(*(task.answer for task in load_tasks(some, DataConfig(train=some))))
"""


def test_a_dataset_of_the_hub_is_downloaded_or_streamed(tmp_path: Path) -> None:
    write_parquet(tmp_path / "datasets" / "org" / "sums" / "train.parquet", 0, 30)
    for name, start in (("a", 0), ("b", 10)):
        write_parquet(tmp_path / "datasets" / "org" / "parts" / name / "rows.parquet", start, start + 2)
    with serving(tmp_path) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", STREAMED]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.stdout.split("\n")[:3] == ["30 26 4", "30 26 4", "11 12"], ended.stderr
    assert any(request.startswith("GET /lfs/datasets/org/sums/train.parquet") for request in hub.requests)
    # Without the hub, what is in the cache is read, and of others only our error is seen, without retries.
    began = time.monotonic()
    command = [sys.executable, "-c", UNREACHABLE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert time.monotonic() - began < 60
    assert ended.stdout.startswith("30\n"), ended.stderr
    assert "cannot read the dataset org/absent (train): ConnectError: " in ended.stdout
    assert "hf download --repo-type dataset org/absent" in ended.stdout
    assert "thrown while requesting" not in ended.stderr
    assert "Retrying" not in ended.stderr


def test_a_dataset_that_cannot_be_downloaded_comes_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TasksDataset(name="tasks", path="org/absent", split="train")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (error,) = row_errors(dataset, DataConfig(train=dataset))
    assert "There is no folder org/absent" in error
    assert "hf download --repo-type dataset org/absent" in error
