"""Does the policy learn in environments of several turns, with tools and as an agent?

    python benchmarks/learning.py NAME [--steps N] [--seeds 1 2 3]

| NAME | what has to rise |
|---|---|
| `game` | the reward of `guess_number`, from an untrained model |
| `tools` | right answers to a task that requires a tool; without the tool nothing may rise |
| `agent` | the same with an agent behind the recording endpoint |
| `program` | the reward of an agent that is a program |
| `mixture` | the rewards of two environments in one run |

Models that an experiment starts from are made or trained first, unless they are there. The rise of a seed is
the mean of its last five steps less that of the first five, in standard errors of the difference; that of a
side is the mean over the seeds with the 95 % interval of Student's t.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import reward_rise
from common import OUT, publish, table_of
from curves import Curves, interval, plot, train_in_processes

from nemorl.config.base import counted

REWARD = "reward/mean"
WITHOUT_TOOL = ("env={name: single_turn}", "rewards=[{function: exact_match}]")


@dataclass(frozen=True)
class Learning:
    config: str
    start: Mapping[str, tuple[str, ...]]  # folders of models, and the command that makes each
    steps: int
    sides: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})  # fields to set
    metrics: tuple[str, ...] = (REWARD,)


CREATED = {"models/arithmetic": ("models", "create", "arithmetic", "models/arithmetic")}
QUICKSTART = CREATED | {"runs/quickstart/sft/hf": ("train", "configs/quickstart/sft.yaml")}
TOOLS = {
    "models/chat": ("models", "create", "chat", "models/chat"),
    "runs/tools/sft/hf": ("train", "configs/tools/sft.yaml"),
}
EXPERIMENTS = {
    "game": Learning("configs/grpo_guess_number.yaml", CREATED, steps=60),
    "tools": Learning(
        "configs/tools/grpo.yaml",
        TOOLS,
        steps=12,
        sides={"with the tool": (), "without": WITHOUT_TOOL},
    ),
    "agent": Learning("configs/tools/agent.yaml", TOOLS, steps=12),
    "program": Learning("configs/grpo_program.yaml", QUICKSTART, steps=30),
    "mixture": Learning(
        "configs/grpo_two_environments.yaml",
        TOOLS,
        steps=20,
        metrics=("environment/shelves/reward", "environment/game/reward"),
    ),
}


def train(name: str, side: str, seed: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """Each metric at every step, and the seconds of the steps."""
    one = EXPERIMENTS[name]
    overrides = [
        f"seed={seed}",
        f"algorithm.num_steps={steps}",
        "algorithm.validation={at_start: false, at_end: false, period: null}",
        f"checkpointing.period={steps}",
        *one.sides[side],
    ]
    folder = "-".join(["learning", name, *side.split(), str(seed)])
    lines = [one.values for one in train_in_processes(Path(one.config), OUT / folder, overrides) if one.step]
    curves = {metric: [values[metric] for values in lines] for metric in one.metrics}
    return curves, sum(values["time/step"] for values in lines)


def main() -> None:
    """Train each seed of each side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, help="of a run (default: by the experiment)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    name, one, seeds = arguments.name, EXPERIMENTS[arguments.name], arguments.seeds
    steps = arguments.steps or one.steps
    if len(seeds) < 2 or steps < 2 * reward_rise.WINDOW:
        parser.error(f"give at least two seeds and {2 * reward_rise.WINDOW} steps")
    for folder, command in one.start.items():
        if not Path(folder).exists():
            subprocess.run([sys.executable, "-m", "nemorl.cli", *command], check=True, stdout=sys.stderr)
    curves: dict[str, Curves] = {}
    rows: list[dict[str, object]] = []
    for side in one.sides:
        for seed in seeds:
            found, seconds = train(name, side, seed, steps)
            for metric, curve in found.items():
                label = " ".join(part for part in (side, metric if len(found) > 1 else "") if part) or metric
                curves.setdefault(label, {})[seed] = curve
                rise = reward_rise.rise_of(curve)
                rows.append({"curve": label, "seed": seed, **rise, "seconds": seconds})
    rises = {
        label: interval([float(str(row["rise"])) for row in rows if row["curve"] == label])
        for label in curves
    }
    title = f"{name}: {steps} steps, {counted(len(seeds), 'seed')}; rise " + ", ".join(
        f"{label}: {mean:.3f} ± {half:.3f}" for label, (mean, half) in rises.items()
    )
    plot(curves, f"{one.config}, {counted(len(seeds), 'seed')}", OUT / f"learning_{name}.png", "reward")
    publish(f"learning_{name}", {"curves": curves, "seeds": rows, "rises": rises}, table_of(title, rows))


if __name__ == "__main__":
    main()
