"""Points of a sweep, from words and from a file, with those of random search compared by their bounds."""

import math
from pathlib import Path

import pytest

from nemorl.config.sweep import (
    MAX_NAME_LENGTH,
    SweepPoint,
    is_sweep_file,
    parse_axes,
    read_sweep,
    sweep_points,
    varied_fields,
)
from nemorl.errors import ConfigError, UsageError


def grid(words: list[str]) -> list[SweepPoint]:
    return sweep_points(parse_axes(words))


def test_all_combinations_the_last_field_changing_first() -> None:
    tasks = grid(["policy.optimizer.lr=1e-4,3e-4", "seed=1, 2"])

    assert [task.overrides for task in tasks] == [
        ["policy.optimizer.lr=1e-4", "seed=1"],
        ["policy.optimizer.lr=1e-4", "seed=2"],
        ["policy.optimizer.lr=3e-4", "seed=1"],
        ["policy.optimizer.lr=3e-4", "seed=2"],
    ]
    assert [task.index for task in tasks] == [0, 1, 2, 3]


def test_values_may_have_commas_of_their_own() -> None:
    tasks = grid(['policy.optimizer={name: adam, lr: 1e-4},{name: sgd},"a,b"'])

    assert [task.overrides for task in tasks] == [
        ["policy.optimizer={name: adam, lr: 1e-4}"],
        ["policy.optimizer={name: sgd}"],
        ['policy.optimizer="a,b"'],
    ]


def test_every_task_has_a_folder_of_its_own() -> None:
    tasks = grid(["policy.optimizer.lr=1e-4,3e-4", "algorithm.name=grpo"])

    assert [str(task.run_dir(Path("runs/s"))) for task in tasks] == [
        "runs/s/00_lr=1e-4_name=grpo",
        "runs/s/01_lr=3e-4_name=grpo",
    ]
    assert "/" not in grid(["a={b: c/d e},1"])[0].run_dir(Path("s")).name


@pytest.mark.parametrize("text", ["seed", "seed=", "=1,2", "seed=[1,2"])
def test_an_invalid_list_of_values_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected|not a list"):
        grid([text])


def test_the_run_folder_is_not_swept() -> None:
    """Its values would be replaced by the folders of the tasks."""
    with pytest.raises(UsageError, match="run_dir: each run gets a folder of its own"):
        grid(["seed=1,2", "run_dir=a,b"])


def test_a_field_is_swept_once() -> None:
    with pytest.raises(UsageError, match="seed: given twice"):
        grid(["seed=1", "seed=2"])


def test_a_sweep_varies_something() -> None:
    with pytest.raises(UsageError, match="needs a field with several values"):
        grid(["seed=1"])


def test_random_points_lie_in_their_ranges_and_differ() -> None:
    axes = parse_axes(["a=log(1e-6,1e-4)", "b=uniform(-1,1)", "c=int(1,3)", "d=x,y", "e=7"])
    points = sweep_points(axes, random=200, seed=3)
    assert len({point.values for point in points}) == 200
    columns = list(zip(*([value for _, value in point.values] for point in points), strict=True))
    logs = [math.log10(float(value)) for value in columns[0]]
    assert min(logs) >= -6
    assert max(logs) <= -4
    assert 60 < sum(value < -5 for value in logs) < 140  # half of them, as the logarithm is uniform
    assert all(-1 <= float(value) <= 1 for value in columns[1])
    assert [set(columns[n]) for n in (2, 3, 4)] == [{"1", "2", "3"}, {"x", "y"}, {"7"}]


def test_more_random_points_begin_with_the_same() -> None:
    axes = parse_axes(["a=log(1e-6,1e-4)", "b=1,2"])
    assert sweep_points(axes, random=9, seed=1)[:4] == sweep_points(axes, random=4, seed=1)
    assert sweep_points(axes, random=4, seed=2) != sweep_points(axes, random=4, seed=1)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("a=log(0,1)", "begins above 0"),
        ("a=log(2,1)", "must be below"),
        ("a=int(1.5,3)", "must be integers"),
        ("a=uniform(x,3)", "expected two numbers"),
        ("a=lgo(1e-6,1e-4)", "lgo is no range"),
        ("a=1,2,1", "a value is there twice"),
    ],
)
def test_invalid_ranges(word: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_axes([word])


def test_a_range_has_no_grid_and_a_small_grid_no_more_random_points() -> None:
    with pytest.raises(UsageError, match=r"a: a range has no grid; set .*--random N"):
        grid(["a=log(1,2)"])
    with pytest.raises(UsageError, match="--random 5: only 4 different points"):
        sweep_points(parse_axes(["a=1,2", "b=1,2"]), random=5)
    with pytest.raises(UsageError, match=r"only 4 different points were found; lower it, or widen"):
        sweep_points(parse_axes(["a=int(1,2)", "b=1,2"]), random=5)


def test_a_sweep_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "experiment: grpo.yaml\nrandom: 5\nmetric: reward/mean\nmax_concurrent: 2\nparameters:\n"
        "  policy.optimizer.lr: log(1e-6, 1e-4)\n  env.name: [math, dapo]\n  seed: 7\n",
        encoding="utf-8",
    )
    sweep = read_sweep(path)
    assert sweep.experiment == tmp_path / "grpo.yaml"
    assert (sweep.metric, sweep.max_concurrent, len(sweep.points)) == ("reward/mean", 2, 5)
    assert {dict(point.values)["seed"] for point in sweep.points} == {"7"}
    assert varied_fields(sweep.points) == ["policy.optimizer.lr", "env.name"]
    # Words replace fields of the file.
    replaced = read_sweep(path, ["policy.optimizer.lr=1e-5,1e-6"], random=2)
    assert {dict(point.values)["policy.optimizer.lr"] for point in replaced.points} <= {"1e-5", "1e-6"}
    assert is_sweep_file(path)
    assert not is_sweep_file(tmp_path / "absent.yaml")


def test_values_of_a_file_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text('experiment: e.yaml\nparameters:\n  a: [1e-6, "1", true, null, {b: c}, word]\n')
    values = [point.overrides[0] for point in read_sweep(path).points]
    assert values == ["a=1e-06", 'a="1"', "a=true", "a=null", 'a={"b": "c"}', "a=word"]


def test_an_unknown_field_of_a_sweep_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("experiment: e.yaml\nparameters: {a: [1, 2]}\nruns: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown field of a sweep; it has experiment, parameters, random"):
        read_sweep(path)


def test_folders_of_many_or_long_values_have_short_names() -> None:
    short = SweepPoint(3, (("policy.optimizer.lr", "1e-4"), ("algorithm.loss.name", "clip")))
    assert short.name == "03_lr=1e-4_name=clip"
    prompt = "You are a helpful assistant that answers briefly, and only in numbers."
    values = (("data.system_prompt", prompt), ("data.train", "{name: arithmetic, digits: 2, size: 1000}"))
    point = SweepPoint(0, (*values, ("policy.optimizer.lr", "1e-4")))
    assert point.name == "00_system_prompt=You-are-a-helpfu_train=name-arithmetic-_lr=1e-4"
    assert len(point.name) <= len("00_") + MAX_NAME_LENGTH
    longer = SweepPoint(10, (*values, *((f"a.field_{number}", "1") for number in range(40))))
    assert len(longer.name) <= len("10_") + MAX_NAME_LENGTH
