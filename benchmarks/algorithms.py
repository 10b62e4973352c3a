"""Does every algorithm learn: does its own figure move the right way on the tiny arithmetic model?

Trains each experiment of configs/algorithms and configs/offline, which begin where the first half of
`make quickstart` ends (made here where it is missing), and compares the figure that the algorithm is about
before its first step and after its last one. Held-out figures are of 400 tasks; those of sampled answers have
a standard error of at most 0.025 on either side.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from common import publish, table_of
from rich.console import Console

from nemorl.config.load import load_experiment
from nemorl.observe.metrics import StepMetrics, read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
START = Path("runs/quickstart/sft/hf")

# The figure that an algorithm is about, and whether it should rise; the first that a run has counts.
FIGURES = (
    ("validation/accuracy", True),
    ("validation/kl", False),
    ("distillation/kl", False),
    ("pairs/accuracy", True),
    ("reward/mean", True),
)


@dataclass(frozen=True)
class Learnt:
    """What one run showed."""

    algorithm: str
    figure: str
    before: float
    after: float
    better: bool
    steps: int
    seconds_of_a_step: float  # median


def experiments(names: list[str]) -> Iterator[Path]:
    """The files to run: all, or those of the given algorithms."""
    files = [*sorted((CONFIGS / "algorithms").glob("*.yaml")), *sorted((CONFIGS / "offline").glob("*.yaml"))]
    files.insert(0, CONFIGS / "quickstart" / "grpo.yaml")
    unknown = set(names) - {algorithm_of(file) for file in files}
    if unknown:
        raise SystemExit(f"no experiment of {', '.join(sorted(unknown))} in {CONFIGS}")
    return (file for file in files if not names or algorithm_of(file) in names)


def algorithm_of(file: Path) -> str:
    """How the table calls it."""
    return "grpo" if file.parent.name == "quickstart" else file.stem


def run(file: Path, steps: int) -> Learnt:
    """Train it in a process of its own, unless an earlier call has, and read what it wrote."""
    name = algorithm_of(file)
    run_dir = Path("runs/bench_algorithms") / name
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and (lines := read_metrics(metrics)) and lines[-1].step == steps:
        return _learnt(name, lines)
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        f"run_dir={run_dir}",
        f"algorithm.num_steps={steps}",
        "algorithm.validation.at_start=true",
        "algorithm.validation.at_end=true",
        "algorithm.validation.period=null",
        f"checkpointing={{period: {steps}, save_hf: false}}",
        "logger.console=plain",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "nemorl.cli", "train", str(file), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
    return _learnt(name, read_metrics(metrics))


def _learnt(name: str, lines: list[StepMetrics]) -> Learnt:
    seconds = median(line.values["time/step"] for line in lines if "time/step" in line.values)
    for figure, rises in FIGURES:
        seen = [line.values[figure] for line in lines if figure in line.values]
        if len(seen) > 1:
            better = seen[-1] > seen[0] if rises else seen[-1] < seen[0]
            return Learnt(name, figure, seen[0], seen[-1], better, lines[-1].step, seconds)
    raise SystemExit(f"{name} wrote none of {', '.join(figure for figure, _ in FIGURES)} twice")


def main() -> None:
    """Train, compare, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=[], help="only these")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    os.chdir(ROOT)
    if not START.exists():
        cli = [sys.executable, "-m", "nemorl.cli"]
        subprocess.run([*cli, "models", "create", "arithmetic", "models/arithmetic"], check=True)
        subprocess.run([*cli, "train", "configs/quickstart/sft.yaml"], check=True)
    files = list(experiments(options.algorithms))
    progress, found = Console(stderr=True), []
    for file in files:
        load_experiment(file)  # what cannot run is told before the first one has run
    for number, file in enumerate(files, 1):
        found.append(run(file, options.steps))
        progress.print(f"{number} of {len(files)}: {found[-1]}")
    rows = [
        {
            "algorithm": one.algorithm,
            "figure": one.figure.removeprefix("validation/"),
            "before": one.before,
            "after": one.after,
            "moved": "right" if one.better else "WRONG",
            "s a step": one.seconds_of_a_step,
        }
        for one in found
    ]
    title = f"{options.steps} steps on sums of two digits"
    publish("algorithms", {"learnt": [asdict(one) for one in found]}, table_of(title, rows))


if __name__ == "__main__":
    main()
