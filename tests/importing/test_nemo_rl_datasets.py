"""Lists of datasets in NeMo-RL's `data.train` and `data.validation`."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.data import MixtureDataset, TasksDataset
from nemorl.config.experiment import Experiment
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from nemorl.importing.rules import CannotImport, Imported, Options
from nemorl.rollout.order import order_of
from tests.importing.contexts import GRPO, OPTIONS, SFT

_TRAIN = [
    {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.05, "seed": 42},
    {"dataset_name": "DeepScaler"},
]
_VALIDATION = [{"dataset_name": "AIME2024", "repeat": 16}, {"dataset_name": "DAPOMathAIME2024"}]


def imported(
    values: dict[str, Any], base: dict[str, Any] = GRPO, options: Options | None = OPTIONS
) -> Imported:
    without = {key: value for key, value in base.items() if not key.startswith("data.")}
    return import_values(PROJECTS["nemo-rl"], without | values, options)


def experiment(values: dict[str, Any], folder: Path, base: dict[str, Any] = GRPO) -> Experiment:
    return checked(to_text(imported(values, base), PROJECTS["nemo-rl"], "test"), folder)


def remark(values: dict[str, Any], key: str) -> tuple[str, bool]:
    (row,) = [row for row in imported(values).rows if row.key == key]
    assert row.outcome == "changed"
    return row.note, row.changes_result


def test_a_list_is_a_mixture_with_the_shares_of_its_rows(tmp_path: Path) -> None:
    """NeMo-RL concatenates the list: a row has the same chance, whichever dataset it is of."""
    data = experiment({"data.train": _TRAIN}, tmp_path).data
    assert isinstance(data.train, MixtureDataset)
    assert data.train.temperature == 1
    paths = {}
    for name, source in data.train.sources.items():
        assert source.weight is None, "the number of its rows is its share"
        assert isinstance(source.dataset, TasksDataset)
        paths[name] = (str(source.dataset.path), source.dataset.split)
    assert paths == {
        "openmathinstruct_2": ("nvidia/OpenMathInstruct-2", "train_1M[:95%]"),
        "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "train"),
    }


def test_an_epoch_has_the_rows_of_all_datasets() -> None:
    epochs = {"grpo.max_num_epochs": 1, "grpo.max_num_steps": 1_000_000, "data.train": _TRAIN}
    found = imported(epochs, options=None)
    assert found.tree["algorithm"]["num_steps"] == (950_000 + 40_315) // 16
    with pytest.raises(CannotImport, match="--rows"):
        imported(
            epochs | {"data.train": [*_TRAIN, {"data_path": "a.jsonl"}], "grpo.max_num_steps": -1},
            options=None,
        )


def test_files_have_the_names_of_their_stems(tmp_path: Path) -> None:
    names = ("sums", "rows/sums", "rows/more-sums", "3d")
    train = [{"data_path": f"{name}.jsonl"} for name in names]
    data = experiment({"data.train": train}, tmp_path).data
    assert list(data.sources) == ["sums", "source_1", "more_sums", "source_3"]


def test_validation_measures_each_dataset(tmp_path: Path) -> None:
    values = {"data.train": _TRAIN, "data.validation": _VALIDATION, "grpo.val_period": 5}
    found = experiment(values, tmp_path)
    assert isinstance(found.data.validation, TasksDataset)
    assert str(found.data.validation.path) == "HuggingFaceH4/aime_2024"
    assert list(found.data.validation_sets) == ["dapomathaime2024"]
    note, changes = remark(values, "data.validation")
    assert "all rows are sampled once" in note
    assert changes
    assert found.algorithm.validation.num_generations_per_prompt == 1
    same = [one | {"repeat": 4} for one in _VALIDATION]
    repeated = experiment(values | {"data.validation": same}, tmp_path).algorithm.validation
    assert repeated.num_generations_per_prompt == 4


def test_each_part_that_is_held_out_is_measured(tmp_path: Path) -> None:
    """Where the config names no other data."""
    train = [_TRAIN[0], {"dataset_name": "DeepScaler", "split_validation_size": 100}]
    data = experiment({"data.train": train, "grpo.val_period": 5}, tmp_path).data
    assert isinstance(data.validation, TasksDataset)
    assert data.validation.split == "train_1M[95%:]"
    (other,) = data.validation_sets.values()
    assert isinstance(other, TasksDataset)
    assert other.split == "train[-100:]"


def test_examples_are_mixed_too_and_measured_by_one_dataset(tmp_path: Path) -> None:
    values = {"data.train": _TRAIN, "data.validation": _VALIDATION, "sft.val_period": 5}
    data = experiment(values, tmp_path, SFT).data
    assert list(data.sources) == ["openmathinstruct_2", "deepscaler"]
    assert not data.validation_sets
    (row,) = [row for row in imported(values, SFT).rows if row.key == "data.validation"]
    assert row.note.startswith("the first of several datasets")


def test_what_a_mixture_changes_is_remarked_on() -> None:
    plain = [{"dataset_name": "DeepScaler"}, {"data_path": "more.jsonl"}]
    note, changes = remark({"data.train": plain}, "data.train")
    assert "there they vary by chance" in note
    assert not changes
    note, changes = remark({"data.train": plain, "data.shuffle": False}, "data.train")
    assert "there one follows the other" in note
    assert changes
    others = [plain[0] | {"env_name": "math"}, plain[1] | {"env_name": "dapo"}]
    note, changes = remark({"data.train": others}, "data.train")
    assert "the environment of all is math" in note
    assert changes


def test_a_list_of_one_is_that_dataset(tmp_path: Path) -> None:
    found = imported({"data.train": _TRAIN[1:]})
    assert found.tree["data"]["train"]["path"] == "agentica-org/DeepScaleR-Preview-Dataset"
    assert {row.outcome for row in found.rows if row.key == "data.train"} == {"mapped"}


_LOADERS = {
    "data.use_multiple_dataloader": True,
    "data.custom_dataloader": "examples.custom_dataloader.custom_dataloader.example_custom_dataloader",
    "data.num_prompts_per_dataloader": 8,  # of the 16 of GRPO's steps
}


def batches_of_loaders(rows: list[int], steps: int, size: int) -> list[list[int]]:
    """The datasets of the prompts of each step, as NeMo-RL's example draws a batch of each loader."""
    loaders = [itertools.cycle([number] * (count // size * size)) for number, count in enumerate(rows)]
    return [[next(one) for one in loaders for _ in range(size)] for _ in range(steps)]


def test_loaders_are_sources_with_equal_shares_of_each_step(tmp_path: Path) -> None:
    """However many rows they have. A resumed run begins in the middle, with the same tasks."""
    data = experiment({"data.train": _TRAIN} | _LOADERS, tmp_path).data
    assert {name: source.weight for name, source in data.sources.items()} == {
        "openmathinstruct_2": 1,
        "deepscaler": 1,
    }
    rows = [640, 48]
    order, resumed = (order_of(data, rows, seed=3, groups_per_step=16) for _ in range(2))
    steps = [[order.task_index(16 * step + place) for place in range(16)] for step in range(200)]
    for step, expected in zip(steps, batches_of_loaders(rows, 200, 8), strict=True):
        assert sorted(int(task >= rows[0]) for task in step) == sorted(expected)
    # Each loader shuffles its rows and begins again at its end.
    small = [task for step in steps for task in step if task >= rows[0]]
    assert all(sorted(small[at : at + 48]) == list(range(640, 688)) for at in range(0, 33 * 48, 48))
    assert [resumed.task_index(16 * 150 + place) for place in range(16)] == steps[150]


def test_steps_end_a_run_with_loaders(tmp_path: Path) -> None:
    """NeMo-RL ignores the epochs, as its loaders have no end."""
    given = {"data.train": _TRAIN, "grpo.max_num_epochs": 1, "grpo.max_num_steps": 1_000_000} | _LOADERS
    found = imported(given, options=None)
    assert found.tree["algorithm"]["num_steps"] == 1_000_000
    rows = {row.key: row for row in found.rows}
    assert (rows["grpo.max_num_epochs"].outcome, rows["grpo.max_num_epochs"].changes_result) == (
        "none",
        False,
    )
    plain = [{"dataset_name": "DeepScaler"}, {"data_path": "more.jsonl"}]
    note, changes = remark({"data.train": plain} | _LOADERS, "data.train")
    assert "the last ones of a dataset that fill no batch are left out" in note
    assert not changes


@pytest.mark.parametrize(
    ("changed", "base", "problem"),
    [
        (
            {"data.num_prompts_per_dataloader": 4},
            GRPO,
            "data.num_prompts_per_dataloader = 4: 2 datasets of it are no step of 16 prompts",
        ),
        ({}, SFT, "data.use_multiple_dataloader = true: NeMo-RL has several loaders in GRPO alone"),
    ],
)
def test_loaders_that_nemo_rl_refuses_are_refused(
    changed: dict[str, Any], base: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CannotImport, match=problem):
        imported({"data.train": _TRAIN} | _LOADERS | changed, base)


def test_what_a_function_of_ones_own_draws_is_lost() -> None:
    given = {"data.train": _TRAIN} | _LOADERS | {"data.custom_dataloader": "my_loaders.hard_ones"}
    found = imported(given)
    (row,) = [row for row in found.rows if row.key == "data.custom_dataloader"]
    assert (row.outcome, row.changes_result) == ("none", True)
    assert "set weights of data.train.sources" in row.note
    sources = found.tree["data"]["train"]["sources"]
    assert not any("weight" in source for source in sources.values())
