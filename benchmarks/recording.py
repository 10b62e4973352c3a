"""How many seconds of a step does it take to record trajectories (`logger.trajectories`)?

    python benchmarks/recording.py [--config configs/grpo_smollm2_reasoning.yaml] [--steps 8] [--rounds 2]

Runs that record none, those of the default, and all, in turns. Most of recording happens while the weights
travel, so what it costs is the increase of the stages `refit` and `recording` together, as a share of a step
that records nothing; the ratio of whole steps has the noise of all stages, and is shown with it.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import OUT, publish, table_of
from launch import train, without_checkpoints

from nemorl.observe.metrics import StepMetrics, read_metrics
from nemorl.observe.run_folder import RunPaths

KINDS = ("none", "sampled", "all")
_STAGES = ("refit", "recording")


def seconds_of(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Medians over the steps without the first: of a step, and of the stages in which recording happens."""
    names = ("step", *_STAGES)
    return {name: median(step.values.get(f"time/{name}", 0.0) for step in steps[1:]) for name in names}


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A row of each kind, by medians over rounds; each round is compared with its own run without records."""
    rows = []
    for kind in KINDS:
        added = [
            sum(each[kind][stage] - each["none"][stage] for stage in _STAGES) / each["none"]["step"]
            for each in rounds
        ]
        rows.append(
            {
                "trajectories": kind,
                **{
                    f"{name}_seconds": median(each[kind][name] for each in rounds) for name in rounds[0][kind]
                },
                "share_of_a_step": median(added),
                "steps_ratio": median(each[kind]["step"] / each["none"]["step"] for each in rounds),
            }
        )
    return rows


def main() -> None:
    """Run all kinds in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/grpo_smollm2_reasoning.yaml"))
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        found = {}
        for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
            folder = OUT.absolute() / f"recording_{kind}_{number}"
            settings = (f"algorithm.num_steps={arguments.steps}", f"logger.trajectories={kind}")
            train(arguments.config, folder, (*settings, *without_checkpoints()))
            found[kind] = seconds_of(list(read_metrics(RunPaths(folder).metrics)))
        rounds.append(found)
    rows = compare(rounds)
    name = f"recording_{arguments.config.parent.name}_{arguments.config.stem}"
    metrics = {"config": str(arguments.config), "steps": arguments.steps, "rounds": rounds, "rows": rows}
    publish(name, metrics, table_of("What recording adds to a step", rows))


if __name__ == "__main__":
    main()
