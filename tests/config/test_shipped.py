"""The experiments that come with nemorl: their names, what is said about them, and copies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.config import shipped
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = {
    "base/model": "# Only others build on it.\npolicy: {model_path: Qwen/Qwen3-8B}\n",
    "base/nodes": "cluster: {num_nodes: 2, gpus_per_node: 8}\nrun_dir: runs/base\n",
    "data": "# With rows.\ndefaults: after.yaml\ndata:\n  train: {name: mixture, sources: {a: {dataset: "
    "{name: tasks, path: openai/gsm8k, split: train}}, b: {dataset: {name: jsonl, path: data/own.jsonl}}}}\n",
    "big/grpo": "# Dr. GRPO of a big model, e.g. with 8B. It takes\n# two nodes.\n"
    "defaults:\n  - ../base/model.yaml\n  - '../base/nodes.yaml'   # where it runs\n"
    "algorithm: {name: dr_grpo}\ngeneration: {backend: vllm}\ncheckpointing: {save_hf: true}\n"
    "run_dir: runs/big\n",
    "after": "# Continues with `big`.\ndefaults: big/grpo.yaml\npolicy: {model_path: runs/big/hf}\n"
    "cluster: {num_nodes: 1, gpus_per_node: 1}\n",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Made-up shipped files, in a folder of their own."""
    for name, text in FILES.items():
        path = tmp_path / "shipped" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    cached = (shipped.names, shipped._own, shipped._producers)
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for function in cached:
        function.cache_clear()


def test_names_are_paths_without_the_suffix(files: Path) -> None:
    assert shipped.names() == ("after", "base/model", "base/nodes", "big/grpo", "data")


def test_a_path_that_exists_comes_before_a_name(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    path = Path("big/grpo")
    assert shipped.locate(path) == files / "shipped" / "big" / "grpo.yaml"
    path.mkdir(parents=True)
    assert shipped.locate(path) == path
    assert shipped.locate(Path("bigger")) == Path("bigger")


def test_what_a_file_and_its_parents_say_about_it(files: Path) -> None:
    after, big, data = shipped.recipes()
    assert (big.name, big.algorithm, big.model) == ("big/grpo", "dr_grpo", "Qwen/Qwen3-8B")
    assert big.description == "Dr. GRPO of a big model, e.g. with 8B"
    assert big.devices == "2 x 8 GPUs"
    assert big.needs == {"vllm": "pip install 'nemorl[vllm]'"}
    assert (after.devices, after.algorithm) == ("1 GPU", "dr_grpo")
    assert after.needs == {**big.needs, "runs/big/hf": "nemorl train big/grpo"}
    rows = {"openai/gsm8k": "pip install 'nemorl[data]'", "data/own.jsonl": "write this file (docs/data.md)"}
    assert data.needs == after.needs | rows


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("", ["after", "big/grpo", "data"]), ("qwen", ["big/grpo"]), ("big/*", ["big/grpo"]), ("base", [])],
)
def test_patterns(files: Path, pattern: str, found: list[str]) -> None:
    assert [recipe.name for recipe in shipped.recipes(pattern)] == found


def test_a_copy_names_copies_of_its_parents(files: Path) -> None:
    texts = shipped.copies("after", Path("mine/own.yaml"))
    assert list(texts) == [Path(f"mine/{n}.yaml") for n in ("big/grpo", "base/model", "base/nodes", "own")]
    assert texts[Path("mine/own.yaml")] == FILES["after"]  # it is at the root already
    assert texts[Path("mine/big/grpo.yaml")] == FILES["big/grpo"]

    text = shipped.copies("big/grpo", Path("own.yaml"))[Path("own.yaml")]
    assert "- base/model.yaml\n  - base/nodes.yaml   # where it runs\n" in text


@pytest.mark.parametrize("name", [name for name in shipped.names() if shipped.describe(name)])
def test_a_copy_is_the_same_experiment(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def loaded(path: Path) -> object:
        try:
            return load_experiment(path)
        except ConfigError as error:  # a package that is not installed
            return [(problem.field, problem.value, problem.fix) for problem in error.problems]

    for path, text in shipped.copies(name, Path("copy/mine.yaml")).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert loaded(Path("copy/mine.yaml")) == loaded(Path(name))


def test_every_local_model_has_a_command() -> None:
    models = {recipe.model for recipe in shipped.recipes()}
    local = {model for model in models if model.startswith(("models/", "runs/"))}
    assert {model for model in local if shipped.command_for(model) is None} == set()


def test_programs_of_experiments_are_copied() -> None:
    program = Path("examples/second_try_program.py")
    texts = shipped.copies("grpo_program", Path("folder/mine.yaml"))
    assert texts[program] == (ROOT / program).read_text(encoding="utf-8")
    assert shipped.command_for(str(program)) == "nemorl recipes copy grpo_program"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("quickstart/gpro", "`quickstart/grpo`"),
        ("dapo", "`algorithms/dapo`"),
        ("configs/quickstart/sft.yaml", "`quickstart/sft`"),
    ],
)
def test_the_nearest_name_comes_first(given: str, meant: str) -> None:
    assert shipped.nearest(given).startswith(f"did you mean {meant}")
    assert shipped.nearest(given).endswith(
        "`nemorl recipes list` shows the experiments that come with nemorl"
    )


def test_nothing_is_meant_where_no_name_is_near() -> None:
    assert not shipped.nearest("zzz").startswith("did you mean")
