"""Each recipe is what its name says, divides evenly and fits its hardware, by the plan."""

from pathlib import Path

import pytest

from nemorl.config.policy import AutoRecompute
from nemorl.models.registry import FAMILIES
from nemorl.plan import problems
from nemorl.plan.problems import plan_run
from tests.scripts import load_script

from .recipes import FILES, layout_in_name, recipe

of_each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
_LONGEST_COMMENT = 110  # characters, which `nemorl recipes list` shows in a line


@of_each
def test_its_name_agrees_with_what_it_sets(file: Path) -> None:
    one = recipe(file)
    experiment, named = one.experiment, one.named
    model = experiment.policy.model_path.name.lower().replace("-", "")

    assert named["algorithm"] == experiment.algorithm.name
    assert str(named["model"]).replace("-", "") in model
    cluster = experiment.cluster
    assert (named["nodes"], named["gpus"]) == (str(cluster.num_nodes), str(cluster.gpus_per_node))
    assert named["layout"] == layout_in_name(experiment.policy.layout)
    staleness = getattr(experiment.algorithm, "max_staleness", 0)
    assert named["staleness"] == (str(staleness) if staleness else None)
    assert (named["lora"] is not None) == (experiment.policy.lora is not None)
    in_env = {"single_turn": "text", "math": None}.get(experiment.env.name, experiment.env.name)
    assert named["task"] == (in_env if experiment.algorithm.online else None)
    assert cluster.gpus_per_node <= (4 if one.hardware.name == "gb200" else 8)
    assert str(experiment.run_dir) == f"runs/recipes/{file.stem}"


@of_each
def test_it_begins_with_a_sentence_that_names_its_devices(file: Path) -> None:
    first, second = file.read_text(encoding="utf-8").splitlines()[:2]
    one = recipe(file)
    number, device = one.devices, one.hardware.name.upper()
    words = {1: "one", 8: "eight"}

    assert first.startswith("# ")
    assert first.endswith(f"on {words.get(number, f'{number:,}')} {device}{'s' if number > 1 else ''}.")
    assert len(first) <= _LONGEST_COMMENT
    assert second.startswith("defaults: ")


@of_each
def test_it_uses_all_of_its_devices(file: Path) -> None:
    cluster = recipe(file).experiment.cluster

    assert recipe(file).devices == cluster.num_nodes * cluster.gpus_per_node


@of_each
def test_its_layouts_and_batches_divide_evenly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights and tokenizers of further models, which are not here, are missing."""
    one = recipe(file)
    monkeypatch.setattr(problems, "file_problems", lambda *_, **__: iter(()))

    found = plan_run(one.experiment, one.machine).problems

    missing = {p.field for p in found if p.field.endswith(".model_path") and p.field != "policy.model_path"}
    assert [problem for problem in found if problem.field not in missing] == []


@of_each
def test_it_fits_into_the_memory_of_its_devices(file: Path) -> None:
    assert recipe(file).memory_problems() == []


@of_each
def test_what_it_recomputes_does_not_depend_on_where_it_is_checked(file: Path) -> None:
    assert not isinstance(recipe(file).experiment.policy.recompute, AutoRecompute)


def test_they_span_families_sizes_devices_and_algorithms() -> None:
    recipes = [recipe(file) for file in FILES]
    families = {one.shape.family for one in recipes}
    hardware = {one.hardware.name for one in recipes}
    algorithms = {one.experiment.algorithm.name for one in recipes}
    tasks = {one.named["task"] for one in recipes}

    assert families == {family.name for family in FAMILIES}
    assert {one.devices for one in recipes} >= {1, 8, 32, 128, 256, 1024}
    assert hardware == {"h100", "h200", "b200", "gb200"}
    assert algorithms >= {"sft", "dpo", "reward_model", "grpo", "dapo", "gspo", "ppo"}
    assert "on_policy_distillation" in algorithms
    assert tasks == {None, "tools", "code", "terminal", "text"}
    assert {getattr(one.experiment.algorithm, "max_staleness", 0) for one in recipes} == {0, 1, 2, 4}


def test_the_page_is_up_to_date() -> None:
    tool = load_script("tools/recipes_page.py")
    page = tool.PAGE.read_text(encoding="utf-8")

    assert tool.written(page) == page, "recipes or plans have changed: run python tools/recipes_page.py"


def test_parts_are_not_recipes() -> None:
    """Recipes are the files of the folder itself; what they build on is in `_base`."""
    parts = {str(path) for file in FILES for path in _defaults(file)}

    assert parts == {f"_base/{file.name}" for file in FILES[0].parent.glob("_base/*.yaml")} - _BELOW


_BELOW = {"_base/gpus.yaml"}  # named by other parts only


def _defaults(file: Path) -> list[str]:
    line = next(line for line in file.read_text(encoding="utf-8").splitlines() if line[:9] == "defaults:")
    return [name.strip() for name in line.removeprefix("defaults:").strip(" []").split(",")]
