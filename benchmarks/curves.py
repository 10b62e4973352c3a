"""Learning curves of several seeds: runs of the product, and their plot."""

import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemorl.observe.metrics import StepMetrics, read_metrics

Curves = dict[int, list[float]]  # by seed, a value per step


def train_in_processes(config: Path, run_dir: Path, overrides: Sequence[str]) -> list[StepMetrics]:
    """Train in processes of its own; the metrics of its steps."""
    shutil.rmtree(run_dir, ignore_errors=True)
    cli = [sys.executable, "-m", "nemorl.cli", "train", str(config), f"run_dir={run_dir}", *overrides]
    subprocess.run([*cli, "logger.console=plain"], check=True, stdout=sys.stderr)
    return read_metrics(run_dir / "metrics.jsonl")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds, and half of the 95 % interval, of Student's t."""
    from scipy.stats import t as student

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(student.ppf(0.975, len(values) - 1)) * error


def plot(sides: Mapping[str, Curves], title: str, path: Path, what: str = "right answers") -> None:
    """Mean over seeds as a line, all between the lowest and the highest seed as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 4))
    for name, curves in sides.items():
        by_step: list[Sequence[float]] = list(zip(*curves.values(), strict=True))
        steps = range(1, len(by_step) + 1)
        (line,) = axes.plot(steps, [statistics.fmean(at) for at in by_step], label=name)
        axes.fill_between(
            steps, [min(at) for at in by_step], [max(at) for at in by_step], color=line.get_color(), alpha=0.2
        )
    axes.set(xlabel="step", ylabel=what, title=title)
    axes.legend()
    chart.tight_layout()
    chart.savefig(path, dpi=120)
