"""How far are planned seconds and memory from those of runs on this machine?

    python benchmarks/plan_time.py [--config configs/grpo_smollm2_reasoning.yaml] [--steps 6]

Runs of one model that differ in layout, engine, batch and algorithm. The constants of the plan of time start
from the rates of this machine and are fitted to five of the runs (`nemorl plan time --calibrate`); the others
are predicted. Stages that take less than 5% of a step are shown and not judged. Memory is the
high-water mark of the fullest process of the policy, next to the plan by the tokens that the run computed.

Nothing else may run meanwhile: the rates are those of an idle machine.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import OUT, publish, table_of
from launch import train, without_checkpoints
from meter import resident_peak
from rich.progress import track

from nemorl.cluster.logs import log_path, process_of
from nemorl.plan.calibration import Calibration, MeasuredRun, calibrate, measure_machine, read_run
from nemorl.plan.hardware import Hardware
from nemorl.plan.memory import MEMORY_PARTS
from nemorl.plan.training_time import Lengths

_LEAST_SHARE = 0.05  # of a step, of stages that are judged
_LONG = (
    *("policy.max_sequence_length=256", "policy.micro_batch_tokens=2048", "generation.max_kv_tokens=16384"),
    *("generation.max_new_tokens=128", "generation.stop_strings=[]"),
)
_SMALL_GROUPS = ("algorithm.num_generations_per_prompt=2", "algorithm.num_prompts_per_step=16")
_VLLM = ("generation={backend: vllm, max_num_seqs: 64, max_new_tokens: 24, stop_strings: ['\\n']}",)


@dataclass(frozen=True)
class Case:
    """A run by its overrides."""

    overrides: tuple[str, ...]
    is_fitted: bool = False  # else it is predicted
    period: int | None = None  # steps between checkpoints, which are written while the policy trains


def layout(data: int = 1, pipeline: int = 1, context: int = 1) -> str:
    sizes = {"data": data, "pipeline": pipeline, "context": context}
    return f"policy.layout={{{', '.join(f'{name}_parallel_size: {size}' for name, size in sizes.items())}}}"


CASES = {
    "one process": Case((layout(),), is_fitted=True),
    "DP2": Case((layout(data=2),), is_fitted=True),
    "PP2": Case((layout(pipeline=2),)),
    "CP2": Case((layout(context=2),)),
    "long responses": Case((layout(), *_LONG), is_fitted=True),
    "long responses, DP2": Case((layout(data=2), *_LONG, "algorithm.num_prompts_per_step=4")),
    "small groups, reference": Case(
        (layout(), *_SMALL_GROUPS, "algorithm.kl.coefficient=0.01"), is_fitted=True
    ),
    "two updates, checkpoints": Case((layout(), "algorithm.num_minibatches=2"), period=3),
    "vLLM": Case((layout(), *_VLLM), is_fitted=True),
    "vLLM, small groups": Case((layout(data=2), *_VLLM, "algorithm.num_generations_per_prompt=4")),
    "PP2, small micro-batches": Case((layout(pipeline=2), "policy.micro_batch_tokens=128")),
    "CP2, small groups": Case((layout(context=2), *_SMALL_GROUPS)),
    "long responses, recomputation": Case(
        (layout(), *_LONG, "algorithm.num_prompts_per_step=4", "policy.recompute={name: full}")
    ),
    "DP2, reference, two updates": Case(
        (layout(data=2), "algorithm.kl.coefficient=0.01", "algorithm.num_minibatches=2")
    ),
}


def peak_of(config: Path, folder: Path, case: Case, steps: int) -> int:
    """Run it; the high-water mark of the policy's fullest process, in bytes. Raises RuntimeError."""
    peaks = {0: 0}

    def look() -> None:
        for rank, process in enumerate(_processes(folder)):
            with suppress(OSError):
                peaks[rank] = max(peaks.get(rank, 0), resident_peak(process))

    saves = without_checkpoints() if case.period is None else [f"checkpointing.period={case.period}"]
    train(config, folder, (*case.overrides, f"algorithm.num_steps={steps}", *saves), look)
    return max(peaks.values())


def _processes(folder: Path) -> Iterator[int]:
    """Of the policy's ranks, as far as they have started."""
    rank = 0
    while (found := process_of(log_path(folder, "policy", rank))) is not None:
        yield found[0]
        rank += 1


def stages_of(run: MeasuredRun, calibration: Calibration) -> list[dict[str, Any]]:
    """Measured and predicted seconds of each stage and of the step."""
    predicted = run.predicted(calibration)
    least = _LEAST_SHARE * run.seconds["step"]
    return [
        {
            "stage": stage,
            "measured_seconds": seconds,
            "predicted_seconds": predicted[stage],
            "error": predicted[stage] / seconds - 1 if seconds else 0.0,
            "is_judged": seconds >= least,
        }
        for stage, seconds in run.seconds.items()
    ]


def lengths_of(lengths: Lengths) -> dict[str, Any]:
    """The longest and the median response in place of all quantiles."""
    plain = {name: value for name, value in asdict(lengths).items() if name != "quantiles"}
    if lengths.quantiles:
        plain |= {"median": lengths.quantile(0.5), "longest": lengths.quantiles[-1]}
    return plain


def memory_of(run: MeasuredRun, peak_bytes: int) -> dict[str, Any]:
    planned = run.memory
    return {
        "measured_bytes": peak_bytes,
        "planned_bytes": planned.total,
        "error": planned.total / peak_bytes - 1,
        "parts": {part: getattr(planned, part) for part in MEMORY_PARTS},
    }


def compare(
    cases: Mapping[str, Case],
    runs: Mapping[str, MeasuredRun],
    peaks: Mapping[str, int],
    calibration: Calibration,
) -> dict[str, Any]:
    """The fits, which begin from `calibration`, and each run next to its plan.

    An engine has constants of its own, so those of a second one are fitted from the first one's on.
    """
    of_engine: dict[str, Calibration] = {}
    for engine in dict.fromkeys(run.experiment.generation.backend for run in runs.values()):
        of_it = [runs[name] for name, case in cases.items() if case.is_fitted]
        of_it = [run for run in of_it if run.experiment.generation.backend == engine]
        calibration = of_engine[engine] = calibrate(of_it, calibration)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "is_fitted": case.is_fitted,
            "overrides": case.overrides,
            "steps": runs[name].steps,
            "lengths": lengths_of(runs[name].lengths),
            "stages": stages_of(runs[name], of_engine[runs[name].experiment.generation.backend]),
            "memory": memory_of(runs[name], peaks[name]),
        }
        for name, case in cases.items()
    }
    judged = [
        abs(stage["error"])
        for row in rows.values()
        if not row["is_fitted"]
        for stage in row["stages"]
        if stage["is_judged"]
    ]
    memory = [abs(row["memory"]["error"]) for row in rows.values()]
    return {
        "hardware": asdict(calibration.hardware),
        "attained": {engine: asdict(one.attained) for engine, one in of_engine.items()},
        "median_error_of_predicted_stages": median(judged),
        "largest_error_of_predicted_stages": max(judged),
        "largest_error_of_memory": max(memory),
        "runs": rows,
    }


def table_rows(runs: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    for name, run in runs.items():
        shown = {"run": name, "": "fitted" if run["is_fitted"] else "predicted"}
        for stage in run["stages"]:
            values = {"measured": stage["measured_seconds"], "planned": stage["predicted_seconds"]}
            error = f"{stage['error']:+.0%}" if stage["is_judged"] else ""
            yield {**shown, "of": f"{stage['stage']}, s", **values, "error": error}
        memory = run["memory"]
        values = {"measured": memory["measured_bytes"] / 1e9, "planned": memory["planned_bytes"] / 1e9}
        yield {**shown, "of": "memory, GB", **values, "error": f"{memory['error']:+.0%}"}


def main() -> None:
    """Run all cases, or plan the runs of the last time again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/grpo_smollm2_reasoning.yaml"))
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--again", action="store_true", help="plan the runs of the last time, start none")
    arguments = parser.parse_args()
    calibration = measure_machine()
    folders = {name: OUT.absolute() / f"plan_time_{number}" for number, name in enumerate(CASES)}
    if arguments.again:
        last = json.loads((OUT / "plan_time.json").read_text(encoding="utf-8"))
        peaks = {name: last["runs"][name]["memory"]["measured_bytes"] for name in CASES}
        calibration = replace(calibration, hardware=Hardware(**last["hardware"]))
    else:
        peaks = {
            name: peak_of(arguments.config, folder, CASES[name], arguments.steps)
            for name, folder in track(folders.items(), "runs")
        }
    runs = {name: read_run(folder) for name, folder in folders.items()}
    metrics = compare(CASES, runs, peaks, calibration)
    title = "Stages and memory of runs on this machine, next to the plan"
    publish("plan_time", metrics, table_of(title, list(table_rows(metrics["runs"]))))


if __name__ == "__main__":
    main()
