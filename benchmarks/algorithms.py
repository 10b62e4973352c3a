"""Does every algorithm learn: does its metric move the right way on the tiny arithmetic model?

Trains an experiment for each algorithm, from where the first half of `make quickstart` ends; SFT begins with
random weights, and the second half's model teaches distillation, also to one of other tokens with random
weights. (All are made here where they are missing.)
The metric of an algorithm is compared before its first step and after its last one. Held-out
metrics are of 400 tasks; standard errors are those of the intervals that a run writes (docs/evaluation.md),
else of a share of as many tasks. The tasks are the same before and after, which the errors make no use of.
Completed runs are not repeated: remove runs/bench_algorithms to start over. To repeat a few rows of a
table:

    python benchmarks/algorithms.py --algorithms gdpo simpo --keep docs/results/algorithms.json
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from common import publish, table_of
from rich.console import Console

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.distillation import PickedBase
from nemorl.config.auxiliary import teachers_held
from nemorl.config.data import ArithmeticDataset
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.observe.metrics import StepMetrics, read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
FOLDERS = ("quickstart", "algorithms", "offline", "distillation")
QUICKSTART = ("sft", "grpo")  # whose models are begun with, or teach
RUNS = Path("runs/bench_algorithms")
QUANTILE = 1.96  # of the intervals: 95 %
CLEAR = 2.0  # standard errors; a change of fewer is noise

# What an algorithm is about, where it is more than the share of held-out tasks that a sample passes.
ACCURACY = "validation/accuracy"
OF_PAIRS = (ACCURACY, "validation/rewards/accuracy")
OF_TURNS = ("validation/reward/chained_sums_turn", "validation/reward/chained_sums")
OWN = {
    "pass_at_k": ("validation/pass@4",),
    "gdpo": OF_TURNS,
    "mt_grpo": OF_TURNS,
    **dict.fromkeys(("turn_gae", "bi_level_gae", "starpo_s"), ("validation/reward",)),
    "sft": (ACCURACY, "validation/loss"),
    "on_policy_distillation": (ACCURACY, "distillation/reverse_kl"),
    "gkd": (ACCURACY, "distillation/jsd"),
    "distillation": (ACCURACY, "distillation/forward_kl"),
    "aligned": (ACCURACY, "distillation/projected_kl"),
    "aligned_common": (ACCURACY, "distillation/common_kl"),
    **dict.fromkeys(
        ("dpo", "cdpo", "robust_dpo", "ipo", "hinge", "cpo", "orpo", "apo_zero", "apo_down"), OF_PAIRS
    ),
    # Without a reference nearly all pairs are separated from the start, so the loss has to show it.
    **dict.fromkeys(("slic", "simpo"), (*OF_PAIRS, "validation/loss")),
    "kto": OF_PAIRS,
}
FALLING = ("loss", "kl", "jsd")  # endings of the names of metrics that should fall
LONGER = {"gdpo": 4}  # times the steps of the others


@dataclass(frozen=True)
class Learned:
    """One metric of one run."""

    algorithm: str
    metric: str
    before: float
    after: float
    standard_errors: tuple[float, float] | None  # of before and after; None of what is no share of tasks
    steps: int
    seconds_of_a_step: float  # median
    seconds: float  # all steps and validations
    commit: str | None
    teacher: float | None = None  # the same metric of the teacher

    @property
    def moved(self) -> Literal["right", "wrong", "within noise"]:
        """Which way, where it did more than chance can."""
        change = self.change_in_standard_errors
        if change is not None and abs(change) < CLEAR:
            return "within noise"
        rose = self.after > self.before
        return "right" if rose != self.metric.endswith(FALLING) else "wrong"

    @property
    def change_in_standard_errors(self) -> float | None:
        """How far beyond chance, as if the two sides had different tasks; None of what has no error."""
        if self.standard_errors is None or not any(self.standard_errors):
            return None
        return (self.after - self.before) / math.hypot(*self.standard_errors)


def experiments(names: Sequence[str]) -> dict[str, Path]:
    """The files to run by what the table calls them: all, or those of the given names."""
    files = [file for folder in FOLDERS for file in sorted((CONFIGS / folder).glob("*.yaml"))]
    found = {file.stem: file for file in files}
    unknown = set(names) - found.keys()
    if unknown:
        raise SystemExit(f"no experiment of {', '.join(sorted(unknown))} in {CONFIGS}")
    return {name: file for name, file in found.items() if not names or name in names}


def run(name: str, file: Path, steps: int) -> list[Learned]:
    """Train it in a process of its own, unless an earlier call has, and read what it wrote.

    What samples to learn from its rewards takes `steps`, others the number of their file. Raises RuntimeError
    when the run fails or does not write its metrics.
    """
    experiment = load_experiment(file)
    algorithm = experiment.algorithm
    if isinstance(algorithm, OnlineConfig | PickedBase):
        steps *= LONGER.get(name, 1)
    else:
        steps = algorithm.num_steps
    run_dir = RUNS / name
    metrics = run_dir / "metrics.jsonl"
    if not (metrics.exists() and (lines := read_metrics(metrics)) and lines[-1].step == steps):
        shutil.rmtree(run_dir, ignore_errors=True)
        _train(name, file, run_dir, steps)
    trained = _trained(name, experiment, read_metrics(metrics), _commit_of(run_dir))
    teachers = teachers_held(experiment.teachers)
    if not teachers:
        return list(trained)
    (teacher,) = teachers.values()
    accuracy = _accuracy_of(teacher.model_path, file)
    return [replace(one, teacher=accuracy) if ACCURACY.endswith(one.metric) else one for one in trained]


def _train(name: str, file: Path, run_dir: Path, steps: int) -> None:
    overrides = [
        f"run_dir={run_dir}",
        f"algorithm.num_steps={steps}",
        "policy.layout.tensor_parallel_size=1",  # no metric depends on the layout
        "algorithm.validation.at_start=true",
        "algorithm.validation.at_end=true",
        "algorithm.validation.period=null",
        f"checkpointing={{period: {steps}, save_hf: false}}",
        "logger.console=plain",
    ]
    _nemorl(name, "train", str(file), *overrides)


def _accuracy_of(model: Path, file: Path) -> float:
    """Of a model that learns nothing here, on the held-out tasks of an experiment."""
    run_dir = RUNS / "teachers" / "-".join(model.parts)
    metrics = run_dir / "eval" / "metrics.json"
    if not metrics.exists():
        layout = "policy.layout.tensor_parallel_size=1"
        _nemorl(str(model), "eval", str(file), f"run_dir={run_dir}", f"policy.model_path={model}", layout)
    return float(json.loads(metrics.read_text(encoding="utf-8"))["metrics"][ACCURACY])


def _nemorl(what: str, *arguments: str) -> None:
    """The command, in one thread. Raises RuntimeError with the end of its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "nemorl.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if ended.returncode:
        raise RuntimeError(f"{what} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")


def _commit_of(run_dir: Path) -> str | None:
    """Of the sources that a run was made with, which may be older than these."""
    header = run_dir / "header.json"
    return json.loads(header.read_text(encoding="utf-8"))[-1]["git_commit"] if header.exists() else None


def _trained(
    name: str, experiment: Experiment, lines: Sequence[StepMetrics], commit: str | None
) -> Iterator[Learned]:
    times = [line.values["time/step"] for line in lines if "time/step" in line.values]
    for metric in OWN.get(name) or OWN.get(experiment.algorithm.name) or (ACCURACY,):
        seen = [line.values for line in lines if metric in line.values]
        if len(seen) < 2:
            raise RuntimeError(f"{name} has not written {metric} twice")
        before, after = seen[0][metric], seen[-1][metric]
        falls = metric.endswith(FALLING)
        tasks = _held_out(experiment)
        errors = (
            None
            if falls
            else (_standard_error(seen[0], metric, tasks), _standard_error(seen[-1], metric, tasks))
        )
        yield Learned(
            algorithm=name,
            metric=metric.removeprefix("validation/"),
            before=before,
            after=after,
            standard_errors=errors,
            steps=lines[-1].step,
            seconds_of_a_step=median(times),
            seconds=sum(times),
            commit=commit,
        )


def _standard_error(values: Mapping[str, float], metric: str, tasks: int) -> float:
    """Of the mean over tasks, of a share where a run writes no interval."""
    if f"{metric}_low" in values:
        return (values[f"{metric}_high"] - values[f"{metric}_low"]) / (2 * QUANTILE)
    return math.sqrt(values[metric] * (1 - values[metric]) / tasks)


def _held_out(experiment: Experiment) -> int:
    """Tasks of a validation."""
    dataset = experiment.data.validation
    assert isinstance(dataset, ArithmeticDataset), "these experiments are about sums"
    return dataset.size


def row_of(one: Learned) -> dict[str, object]:
    """How the table shows it."""
    errors = one.standard_errors
    change = one.change_in_standard_errors
    return {
        "algorithm": one.algorithm,
        "metric": one.metric,
        "before": _with_error(one.before, errors and errors[0]),
        "after": _with_error(one.after, errors and errors[1]),
        "change in standard errors": "" if change is None else f"{change:+.1f}",
        "teacher's": "" if one.teacher is None else f"{one.teacher:.3f}",
        "moved": one.moved,
        "steps": one.steps,
        "s a step": one.seconds_of_a_step,
        "seconds": round(one.seconds),
    }


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"


def markdown_of(rows: Sequence[dict[str, object]]) -> str:
    """The table as docs/results has it."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_kept_rows(earlier: Path | None, found: Sequence[Learned]) -> list[Learned]:
    """What was found, and of other algorithms what an earlier JSON has, in the order of the files."""
    if earlier is None:
        return list(found)
    rows = [Learned(**row) for row in json.loads(earlier.read_text(encoding="utf-8"))["rows"]]
    again = {one.algorithm for one in found}
    order = list(experiments([]))
    kept = [one for one in rows if one.algorithm not in again and one.algorithm in order]
    return sorted([*kept, *found], key=lambda one: order.index(one.algorithm))


def main() -> None:
    """Train, compare, and print a table; exit 1 where a run failed or a metric moved the wrong way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=[], help="only these")
    parser.add_argument("--keep", type=Path, help="a JSON of this benchmark, whose other rows are kept")
    parser.add_argument("--steps", type=int, default=30, help="of those that sample (default 30)")
    options = parser.parse_args()
    os.chdir(ROOT)
    cli = [sys.executable, "-m", "nemorl.cli"]
    for model in ("arithmetic", "pairs"):
        if not Path(f"models/{model}").exists():
            subprocess.run([*cli, "models", "create", model, f"models/{model}"], check=True)
    for half in QUICKSTART:
        if not Path(f"runs/quickstart/{half}/hf").exists():
            subprocess.run([*cli, "train", f"configs/quickstart/{half}.yaml"], check=True)
    files = experiments(options.algorithms)
    for file in files.values():
        load_experiment(file)  # errors of all files are reported before the first run
    found, failed = _run_all(files, options.steps)
    found = with_kept_rows(options.keep, found)
    rows = [row_of(one) for one in found]
    if rows:
        path = publish(
            "algorithms",
            {"command": "make bench-algorithms", "rows": [asdict(one) for one in found], "failed": failed},
            table_of(f"{options.steps} steps on sums of two digits", rows),
        )
        path.with_suffix(".md").write_text(markdown_of(rows), encoding="utf-8")
    wrong = sorted({one.algorithm for one in found if one.moved == "wrong"})
    if failed or wrong:
        raise SystemExit(
            f"failed: {', '.join(failed) or 'none'}; moved the wrong way: {', '.join(wrong) or 'none'}"
        )


def _run_all(files: Mapping[str, Path], steps: int) -> tuple[list[Learned], list[str]]:
    """The results, and the names of the runs that failed, which do not keep others from theirs."""
    progress = Console(stderr=True)
    found: list[Learned] = []
    failed: list[str] = []
    for number, (name, file) in enumerate(files.items(), 1):
        try:
            trained = run(name, file, steps)
        except RuntimeError as error:
            failed.append(name)
            progress.print(f"{number} of {len(files)}: {error}", markup=False)
            continue
        found += trained
        for one in trained:
            progress.print(f"{number} of {len(files)}: {one}", markup=False)
    return found, failed


if __name__ == "__main__":
    main()
