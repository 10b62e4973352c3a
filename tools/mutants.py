"""Measure which small errors in pure modules the tests notice: `python tools/mutants.py [MODULE ...]`.

mutmut changes one operator, number, comparison, keyword or branch of a function at a time and runs the tests
that reach it. The table counts the mutants of each module; the list after it has those that no test noticed.
`tools/equivalent_mutants.yaml` lists the ones that change nothing a caller can observe, with the reasons.
So does `zip(..., strict=True)` made false where no test notices it: it asserts that the code around it made
lists of equal length. Exits with 1 if fewer than 90% of the other mutants were noticed.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.yaml"
REQUIRED_SHARE = 0.9
# Modules without processes, devices or files, with the tests of each.
MODULES: dict[str, Sequence[str]] = {
    "algorithms.advantages": ["algorithms/test_advantages.py"],
    "algorithms.filters": ["algorithms/test_filters.py"],
    "algorithms.objective": [
        "algorithms/test_correction.py",
        "algorithms/test_entropy.py",
        "algorithms/test_kl.py",
        "algorithms/test_losses.py",
        "algorithms/test_policy_losses.py",
    ],
    "algorithms.token_advantages": ["algorithms/test_token_advantages.py"],
    "data.shards": ["data/test_micro_batches.py", "data/test_shards.py", "data/test_columns.py"],
    "generation.router": ["generation/test_router.py"],
    "models.layout": [
        "models/test_layout_rules.py",
        "models/test_policy_layout.py",
        "plan/test_parameters.py",
    ],
    "models.layout_rules": ["models/test_layout_rules.py", "models/test_moe_rules.py"],
    "plan.layouts": ["plan/test_layouts.py"],
    "plan.memory": ["plan/test_memory.py", "plan/test_parameters.py"],
    "rollout.collector": ["rollout/test_answers.py", "rollout/test_collector.py", "rollout/test_order.py"],
    "rollout.turn_loop": ["rollout/test_turn_loop.py"],
    "weights.plan": ["weights/test_transfer_plan.py"],
}
CONFIG = """
[tool.mutmut]
source_paths = ["src/"]
only_mutate = {modules}
pytest_add_cli_args = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-m", "not slow"]
pytest_add_cli_args_test_selection = {tests}
also_copy = ["configs"]
[tool.pytest.ini_options]
pythonpath = ["."]
markers = ["slow"]
"""


@dataclass(frozen=True)
class Mutant:
    """One change of one function, and whether a test failed with it."""

    module: str
    function: str
    change: str  # the changed lines, `- before` and `+ after`
    noticed: bool
    asserts_only: bool  # only `strict` of a zip is changed

    @property
    def key(self) -> str:
        return f"{self.module}.{self.function}: {self.change}"


def make_tree(modules: Sequence[str]) -> None:
    """Lay the packages out as they are imported: mutmut derives the names of modules from paths."""
    source = WORK / "src" / "nemorl"
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "nemorl", source)
    for package in ("algorithms", "environments", "slurm"):
        shutil.copytree(ROOT / package, source / package)
    for folder in ("tests", "configs"):
        shutil.copytree(ROOT / folder, WORK / folder)
    paths = [f"src/nemorl/{module.replace('.', '/')}.py" for module in modules]
    tests = sorted({f"tests/{test}" for module in modules for test in MODULES[module]})
    missing = [path for path in (*paths, *tests) if not (WORK / path).exists()]
    if missing:
        sys.exit(f"tools/mutants.py lists files that do not exist: {', '.join(missing)}")
    (WORK / "pyproject.toml").write_text(CONFIG.format(modules=paths, tests=tests), encoding="utf-8")


def run_mutants(processes: int) -> None:
    """Run mutmut in the copied tree, without its changes of strings and call arguments.

    Those mostly change the text of messages and defaults that no caller depends on.
    """
    # A child of a process that has computed in several threads waits for them forever.
    os.environ["OMP_NUM_THREADS"] = "1"
    from mutmut.__main__ import cli
    from mutmut.mutation import mutators

    kept = {
        mutators.operator_number,
        mutators.operator_name,
        mutators.operator_keywords,
        mutators.operator_swap_op,
        mutators.operator_remove_unary_ops,
        mutators.operator_match,
        mutators.operator_if_exp,
    }
    mutators.mutation_operators[:] = [one for one in mutators.mutation_operators if one[1] in kept]
    cli(["run", "--max-children", str(processes)], standalone_mode=False)


def results() -> Iterator[Mutant]:
    """Yield every mutant of the last run."""
    from mutmut.__main__ import walk_mutatable_files
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        for name, status in data.exit_code_by_key.items():
            module, _, mangled = name.removeprefix("nemorl.").rpartition(".")
            noticed = status not in (0, 5, 33, None)  # survived, or not reached by any test
            before, after = ("", "") if noticed else changed_lines(get_diff_for_mutant(name, path=path))
            # Methods are `xǁClassǁmethod`.
            function = mangled.split("__mutmut_")[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            asserts_only = before != "" and before.replace("strict=True", "strict=False") == after
            yield Mutant(module, function, f"- {before} + {after}", noticed, asserts_only)


def changed_lines(diff: str) -> tuple[str, str]:
    """Return the removed and the added lines of a diff, each in one line."""
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    removed, added = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in ("-", "+")
    )
    return removed, added


def report(mutants: Sequence[Mutant], equivalent: set[str]) -> float:
    """Print the table and the mutants that no test noticed; return the share of noticed ones."""
    counted = [one for one in mutants if one.noticed or not (one.asserts_only or one.key in equivalent)]
    sys.stdout.write(f"\n{'module':<34}{'mutants':>9}{'noticed':>9}{'share':>8}\n")
    for module in sorted({one.module for one in counted}):
        of_module = [one for one in counted if one.module == module]
        noticed = sum(one.noticed for one in of_module)
        sys.stdout.write(f"{module:<34}{len(of_module):>9}{noticed:>9}{noticed / len(of_module):>8.0%}\n")
    for one in counted:
        if not one.noticed:
            sys.stdout.write(f"not noticed: {one.key}\n")
    share = sum(one.noticed for one in counted) / max(len(counted), 1)
    sys.stdout.write(
        f"{len(counted)} mutants, {share:.1%} noticed, {len(mutants) - len(counted)} equivalent\n"
    )
    measured = tuple(f"{module}." for module in {one.module for one in mutants})
    survived = {one.key for one in mutants if not one.noticed}
    for key in sorted(equivalent - survived):
        if key.startswith(measured):
            sys.stdout.write(f"listed as equivalent, and noticed or gone: {key}\n")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("modules", nargs="*", help="such as models.layout_rules; all by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    modules = arguments.modules or list(MODULES)
    if unknown := [module for module in modules if module not in MODULES]:
        parser.error(f"unknown modules: {', '.join(unknown)}; choose from {', '.join(MODULES)}")
    make_tree(modules)
    os.chdir(WORK)
    run_mutants(arguments.processes)
    listed = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) if EQUIVALENT.exists() else None
    share = report(list(results()), {row["mutant"] for row in listed or []})
    sys.exit(0 if share >= REQUIRED_SHARE else 1)


if __name__ == "__main__":
    main()
