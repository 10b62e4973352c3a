"""Public recipes of NeMo-RL, verl and OpenRLHF: each becomes a valid experiment, or is refused with why."""

import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from nemorl.config.auxiliary import teachers_held
from nemorl.config.experiment import Experiment
from nemorl.importing.document import PROJECTS, checked, to_text
from nemorl.models.registry import shape_from_config
from nemorl.plan.problems import policy_layout_problems
from tests.importing.models import CONFIGS
from tests.importing.recipes import FILES, recipes
from tests.scripts import load_script

# The beginnings of the reasons why a recipe is not imported, and how many recipes each has.
REFUSED = {
    "nemo-rl": {},
    "verl": {},
    "openrlhf": {},
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/moving_in_page.py")


@pytest.fixture(scope="module")
def experiments(tool: ModuleType) -> dict[tuple[str, str], Experiment]:
    """All imported recipes, checked as `nemorl check` checks fields."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for project in FILES:
            for name in recipes(project):
                imported, _, _ = tool.outcome(project, name)
                if imported is not None:
                    text = to_text(imported, PROJECTS[project], name)
                    found[project, name] = checked(text, Path(folder), Path(name))
    return found


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.written(page) == page, "rules or recipes have changed: run python tools/moving_in_page.py"


@pytest.mark.parametrize("project", FILES)
def test_no_key_is_unknown_and_reasons_are_known(tool: ModuleType, project: str) -> None:
    refused: dict[str, int] = {}
    for name in recipes(project):
        imported, why, _ = tool.outcome(project, name)
        if imported is None:
            (reason,) = [one for one in REFUSED[project] if why.startswith(one)]
            refused[reason] = refused.get(reason, 0) + 1
        else:
            assert not [row.key for row in imported.rows if row.outcome == "unknown"], name
            assert all(row.note for row in imported.rows if row.outcome in ("none", "changed")), name
    assert refused == REFUSED[project]


def test_imported_recipes_pass_the_checks(experiments: dict[tuple[str, str], Experiment]) -> None:
    """`checked` raises otherwise."""
    counts = {project: sum(of == project for of, _ in experiments) for project in FILES}
    assert counts == {"nemo-rl": 258, "verl": 74, "openrlhf": 11}


def test_filters_of_sampling_are_kept(experiments: dict[tuple[str, str], Experiment]) -> None:
    found = {
        name: experiment.generation.sampling.model_dump(exclude_defaults=True)
        for (project, name), experiment in experiments.items()
        if project == "nemo-rl" and experiment.generation.sampling.filters
    }
    assert found["grpo_sliding_puzzle.yaml"] == {"top_k": 10000, "top_p": 0.999}
    tuned = "recipes/llm/grpo-llama3.2-1b-instruct-1n8g-megatron-temp0.8-topp0.9-topk50.yaml"
    assert found[tuned] == {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    assert len(found) == 9


def test_devices_are_all_in_use(experiments: dict[tuple[str, str], Experiment]) -> None:
    for (_, name), experiment in experiments.items():
        gpus = experiment.cluster.num_nodes * experiment.cluster.gpus_per_node
        used, generation = experiment.policy.layout.world_size, experiment.generation
        if experiment.algorithm.generates and generation.has_engines and not generation.shares_devices:
            used += generation.replicas * generation.ranks_per_replica
        for teacher in teachers_held(experiment.teachers).values():
            own = teacher.worker_config(experiment.policy).layout.world_size
            used += own if teacher.devices == "own" else 0
        assert used <= gpus, name
        assert used > gpus // 2, name


def test_the_plan_accepts_published_layouts(experiments: dict[tuple[str, str], Experiment]) -> None:
    seen = set()
    for (_, name), experiment in experiments.items():
        model = str(experiment.policy.model_path)
        if model not in CONFIGS:
            continue
        seen.add(model)
        shape = shape_from_config(CONFIGS[model], model, experiment.policy.head)
        problems = [str(problem) for problem in policy_layout_problems(experiment, shape)]
        assert not problems, f"{name}: {problems}"
    assert seen == CONFIGS.keys()
