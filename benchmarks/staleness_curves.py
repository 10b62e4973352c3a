"""Does GRPO learn as well from samples of older weights?

    python benchmarks/staleness_curves.py [FIELD=VALUE ...] [--config FILE] [--name NAME] [--steps N]

The same experiment at several values of `max_staleness`, with truncated importance sampling and without, each
with every seed. All runs train on as many samples. Accuracy is measured on the tasks of `data.validation`
before the first and after the last step. Differences are between runs of the same seed, with the interval of
Student's t over the seeds.

Runs are kept: what is in `runs/bench` from an earlier call with the same arguments is not repeated.
"""

import argparse
import json
import math
import re
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import OUT, publish, table_of
from curves import Curves, interval, plot, train_in_processes

from nemorl.config.base import counted
from nemorl.config.load import load_experiment
from nemorl.data.datasets import load_tasks

CONFIG = Path("configs/quickstart/grpo.yaml")
ACCURACY = "validation/accuracy"
# A policy that moves far within 4 updates is measured to the end, instead of stopped by the gate.
FAR_BEHIND = ["algorithm.max_staleness=4", "algorithm.max_logprob_gap=1"]
SIDES = {  # by the value of `max_staleness` and the correction
    "0": ["algorithm.max_staleness=0"],
    "1": ["algorithm.max_staleness=1"],
    "1, tis": ["algorithm.max_staleness=1", "algorithm.correction={name: tis}"],
    "4": FAR_BEHIND,
    "4, tis": [*FAR_BEHIND, "algorithm.correction={name: tis}"],
}
BASE = "0"


def run(config: Path, side: str, seed: int, steps: int, samples: int, changes: list[str]) -> dict[str, Any]:
    """The reward of each step, the mean age of its samples, and both accuracies."""
    parts = ["staleness", config.parent.name, config.stem, side.replace(", ", "-"), seed, steps, samples]
    name = "-".join(map(str, [*parts, *(change.rpartition(".")[2] for change in changes)]))
    name = re.sub(r"[^\w=-]+", "_", name)  # of a folder, as a command line takes it
    kept = OUT / f"{name}.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    overrides = [
        *changes,
        *SIDES[side],
        f"seed={seed}",
        f"algorithm.num_steps={steps}",
        "algorithm.validation={at_start: true, period: null, at_end: true}",
        f"algorithm.validation.num_generations_per_prompt={samples}",
        f"checkpointing={{period: {steps}}}",
    ]
    lines = train_in_processes(config, OUT / name, overrides)
    trained = [line.values for line in lines if line.step]
    before, after = (v[ACCURACY] for v in (line.values for line in lines) if ACCURACY in v)
    found = {
        "rewards": [values["reward/mean"] for values in trained],
        "lag": statistics.fmean(values["version/lag"] for values in trained),
        "before": before,
        "after": after,
    }
    kept.write_text(json.dumps(found), encoding="utf-8")
    shutil.rmtree(OUT / name / "checkpoints")
    return found


def row(side: str, runs: Mapping[str, Mapping[int, dict[str, Any]]], num_tasks: int) -> dict[str, object]:
    of_side = runs[side].values()
    before, after = (statistics.fmean(found[when] for found in of_side) for when in ("before", "after"))
    # The tasks are drawn once for all seeds, so that more seeds or samples do not make them more certain.
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / num_tasks)
    difference, half = interval(
        [found["after"] - runs[BASE][seed]["after"] for seed, found in runs[side].items()]
    )
    return {
        "max_staleness": side,
        "age": statistics.fmean(found["lag"] for found in of_side),
        "before": before,
        "after": after,
        "rise in standard errors": (after - before) / error,
        f"after, less that at {BASE}": difference,
        "± (95 %)": half,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--samples", type=int, default=4, help="of each validation task (default 4)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--name", help="of what is published (default: the name of the config)")
    parser.add_argument("changes", nargs="*", metavar="FIELD=VALUE", help="of the config, for all sides")
    arguments = parser.parse_args()
    if BASE not in arguments.sides or len(arguments.seeds) < 2:
        parser.error(f"the differences are from {BASE}, which --sides must name, over at least two --seeds")
    data = load_experiment(arguments.config).data
    if data.validation is None:
        parser.error(f"{arguments.config} has no data.validation to measure the accuracy on")
    num_tasks = len(load_tasks(data.validation, data))
    OUT.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[int, dict[str, Any]]] = {side: {} for side in arguments.sides}
    for seed in arguments.seeds:
        for side in arguments.sides:
            runs[side][seed] = run(
                arguments.config, side, seed, arguments.steps, arguments.samples, arguments.changes
            )
    curves: dict[str, Curves] = {
        side: {seed: found["rewards"] for seed, found in of_side.items()} for side, of_side in runs.items()
    }
    seeds = counted(len(arguments.seeds), "seed")
    name = f"staleness_{arguments.name or f'{arguments.config.parent.name}_{arguments.config.stem}'}"
    plot(curves, f"{arguments.config.stem} by max_staleness, {seeds}", OUT / f"{name}.png", "reward")
    rows = [row(side, runs, num_tasks) for side in arguments.sides]
    settings = {
        "config": str(arguments.config),
        "changes": arguments.changes,
        "steps": arguments.steps,
        "samples": arguments.samples,
    }
    table = table_of(f"accuracy after {arguments.steps} steps, {seeds}", rows)
    publish(name, settings | {"tasks": num_tasks, "rows": rows, "runs": runs}, table)


if __name__ == "__main__":
    main()
