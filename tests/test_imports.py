"""Imports point one way, and what is light stays light.

cli -> run -> algorithms -> session -> rollout, rewards, weights, generation, megatron, cluster
    -> models, data -> config
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# algorithms/ and environments/ are at the root and import as parts of nemorl.
TREES = {
    "nemorl": ROOT / "nemorl",
    "nemorl.algorithms": ROOT / "algorithms",
    "nemorl.environments": ROOT / "environments",
    "nemorl.slurm": ROOT / "slurm",
}

# Each part may import these, and itself; `trajectories` imports numpy only.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "device": set(),
    "config": {"errors"},
    "trajectories": {"errors"},
    "models": {"config", "device", "errors"},
    "data": {"config", "errors", "models", "trajectories"},
    "environments": {"config", "errors", "trajectories"},
    "importing": {"config", "errors"},
    "observe": {"config", "errors"},
    "plan": {"config", "errors", "models", "data", "observe"},
    "cluster": {"config", "errors"},
    "generation": {
        *("config", "device", "errors", "models", "trajectories", "weights", "megatron", "cluster", "plan"),
    },
    "weights": {"config", "device", "errors", "models"},
    "megatron": {"config", "device", "errors", "models", "data", "weights", "plan"},
    "rewards": {"config", "errors", "environments", "generation", "trajectories"},
    "rollout": {
        *("config", "errors", "data", "cluster", "generation", "observe", "rewards", "serve", "trajectories"),
    },
    "slurm": {"config", "errors", "cluster", "observe", "plan"},
    "serve": {"config", "errors", "data", "generation", "trajectories"},
}
LIBRARY = set(ALLOWED)
ALLOWED["session"] = LIBRARY
ALLOWED["algorithms"] = LIBRARY | {"session"}
ALLOWED["run"] = LIBRARY | {"session", "algorithms"}
ALLOWED["simulate"] = LIBRARY | {"session", "algorithms"}
ALLOWED["rehearsal"] = LIBRARY | {"algorithms"}
ALLOWED["ui"] = LIBRARY | {"session", "algorithms", "run"}
ALLOWED["commands"] = LIBRARY | {"session", "algorithms", "run", "simulate", "rehearsal", "ui"}
ALLOWED["cli"] = {"commands", "errors"}

TORCH = {"torch", "megatron", "ray", "transformers"}
NOT_REACHED: dict[str, set[str]] = {
    "nemorl.errors": TORCH | {"numpy", "pydantic"},
    "nemorl.cli": TORCH | {"numpy", "plotly"},
    "nemorl.config": TORCH | {"numpy"},
    "nemorl.plan": TORCH | {"numpy"},
    # What `plan` loads by the section's `plan_module`.
    **{
        f"nemorl.generation.{engine}_engine.plan": TORCH | {"numpy", "vllm", "tensorrt_llm"}
        for engine in ("torch", "vllm", "trtllm")
    },
    "nemorl.trajectories": TORCH,
    "nemorl.models.slices": TORCH | {"numpy"},
    "nemorl.models.registry": TORCH | {"numpy"},
    "nemorl.models.layout": TORCH | {"numpy"},
    "nemorl.megatron": {"ray"},
}


@cache
def modules() -> dict[str, Path]:
    """All modules of nemorl by name."""
    found: dict[str, Path] = {}
    for package, folder in TREES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


def statements(tree: ast.AST, *, at_import_only: bool) -> Iterator[ast.AST]:
    """All statements; or those that run at import, without what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        delayed = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not (at_import_only and delayed):
            yield node
            yield from statements(node, at_import_only=at_import_only)


@cache
def imports(module: str, at_import_only: bool) -> frozenset[str]:
    """What a module imports: modules of nemorl by their whole name, others as they are written."""
    file = modules()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in statements(tree, at_import_only=at_import_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` and `from module import name` have the same form.
            found |= {
                name if (name := f"{source}.{alias.name}") in modules() else source for alias in node.names
            }
    return frozenset(found)


def part_of(module: str) -> str:
    """The part of nemorl to which a module belongs; empty for nemorl itself."""
    return ".".join(module.split(".")[1:2])


def third_parties(module: str) -> set[str]:
    """Top-level names of everything that importing a module imports, through nemorl's own modules."""
    waiting, seen, outside = [module], set(), set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        parents = [current.rsplit(".", cut)[0] for cut in range(1, current.count(".") + 1)]
        for name in (*parents, *imports(current, at_import_only=True)):
            if name in modules():
                waiting.append(name)
            else:
                outside.add(name.partition(".")[0])
    return outside


def test_every_part_has_its_rule() -> None:
    assert {part_of(module) for module in modules()} - {""} == set(ALLOWED)


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if part_of(module) == part
        for name in sorted(imports(module, at_import_only=False))
        if name.startswith("nemorl.") and part_of(name) not in ALLOWED[part] | {part}
    ]

    assert not wrong


@pytest.mark.parametrize("light", NOT_REACHED)
def test_what_is_light_stays_light(light: str) -> None:
    below = [module for module in modules() if module == light or module.startswith(f"{light}.")]

    heavy = {module: third_parties(module) & NOT_REACHED[light] for module in below}

    assert below
    assert not {module: names for module, names in heavy.items() if names}


def test_the_rules_themselves_have_no_cycle() -> None:
    assert set(TopologicalSorter(ALLOWED).static_order()) == set(ALLOWED)


def test_pyproject_names_every_package() -> None:
    """An installation from a fresh clone takes the packages that pyproject.toml names, and no others."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in (*TREES.items(), ("nemorl.examples", ROOT / "examples"))
        for file in folder.rglob("__init__.py")
    }
    assert sorted(setup["packages"]) == sorted({*found, "nemorl.configs"})  # which has data only
