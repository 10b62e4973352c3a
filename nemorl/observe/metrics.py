"""Records of a run (metrics.jsonl, samples.jsonl), and how metrics are shown.

Names are paths such as `reward/mean`, `grad_norm`, `time/generation` (seconds) and `validation/...`; the code
that computes a metric chooses its name. `SHOWN` is the only table of titles, columns and tiles.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .files import JsonObject, read_json_lines

# Metrics between 0 and 1 of one of `data.validation_sets` share a plot.
_SET_METRIC = re.compile(r"validation/(?!rewards/|distillation/)(\w+)/(reward|accuracy|pass@\d+|cons@\d+)")
RESERVED_KEYS = frozenset({"step", "version", "nonfinite"})
Phase = Literal["training", "validation"]


@dataclass(frozen=True)
class StepMetrics:
    """The metrics after one step; step 0 is the state before the first one."""

    step: int
    version: int  # of the weights after the step
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        if taken := RESERVED_KEYS & set(self.values):
            raise ValueError(f"metrics of step {self.step}: {sorted(taken)} are names of the line itself")

    def to_json(self) -> JsonObject:
        """Return the line of metrics.jsonl; NaN and infinity are null, with their kind under `nonfinite`."""
        values = {key: float(value) for key, value in self.values.items()}
        nonfinite = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
        line: JsonObject = {"step": self.step, "version": self.version, **values, **dict.fromkeys(nonfinite)}
        return line | ({"nonfinite": nonfinite} if nonfinite else {})


@dataclass(frozen=True)
class Change:
    metric: str
    before: float | None  # None where it was not measured
    after: float | None


@dataclass(frozen=True)
class Sample:
    """One conversation: the opening, and everything after it (tool results included)."""

    step: int
    phase: Phase
    task: int  # index of the task in its dataset
    prompt: str
    completion: str
    reward: float  # the weighted sum
    rewards: Mapping[str, float]  # by name, before weights
    stop: str  # the stop reason
    prompt_tokens: int
    sampled_tokens: int
    seconds_environment: float = 0.0  # that the environment and rewards took
    answer: str | None = None  # the expected one, if the task has it
    error: str | None = None


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return all steps, NaN and infinities restored. Raises `RunFolderError` for a corrupt line."""
    steps = []
    for line in read_json_lines(path):
        values = {key: value for key, value in line.items() if key not in RESERVED_KEYS and value is not None}
        values |= {key: float(kind) for key, kind in line.get("nonfinite", {}).items()}
        steps.append(StepMetrics(line["step"], line["version"], values))
    return steps


def read_samples(path: Path) -> list[Sample]:
    return [Sample(**line) for line in read_json_lines(path)]


@dataclass(frozen=True)
class Shown:
    prefix: str  # the complete name where there is a column or a tile
    title: str = ""  # of the plot; rows with one title share a plot and a unit. Empty: plotted elsewhere
    column: str = ""  # header in the table of steps
    priority: int = 0  # of the column: a narrow terminal keeps the lowest
    width: int = 10  # of the column, in characters
    tile: str = ""  # label among the large numbers of the report
    log_scale: bool = False


# The first row whose prefix matches decides. Plots, columns and tiles have this order; others come last.
SHOWN = (
    Shown("reward/mean", column="reward", priority=1, width=8, tile="reward"),
    Shown("reward/std", column="spread", priority=13, width=8),
    Shown("validation/rewards/accuracy", "Accuracy of pairs and steps"),
    Shown("validation/rewards/", "Implicit rewards"),
    Shown("validation/reward", "Validation", tile="validation reward"),
    Shown("validation/accuracy", "Validation"),
    Shown("validation/pass@", "Validation"),
    Shown("validation/cons@", "Validation"),
    Shown("validation/loss", "Validation loss"),
    Shown("validation/length", "Sampled tokens in validation"),
    Shown("loss/policy", "Loss", "loss", 2),
    Shown("loss/preference", "Loss", "preference", 3, tile="preference loss"),
    Shown("loss/sft", "Loss", "loss", 6, tile="loss"),
    Shown("loss/", "Loss"),
    Shown("distillation/", "Distance from the teacher"),
    Shown("validation/distillation/", "Distance from the teacher"),
    Shown("rewards/accuracy", "Accuracy of pairs and steps", "accuracy", 4, tile="accuracy of pairs"),
    Shown("accuracy", "Accuracy of pairs and steps", "accuracy", 5, tile="accuracy"),
    Shown("rewards/", "Implicit rewards"),
    Shown("score/", "Scores"),
    Shown("logprobs/", "Logprobs of answers"),
    Shown("critic/explained_variance", "Explained variance of the critic", "explained", 11),
    Shown("critic/value", "Values and returns of the critic"),
    Shown("critic/return", "Values and returns of the critic"),
    Shown("kl/reference", "Divergence from the reference", "kl", 12),
    Shown("kl/penalty", "Divergence subtracted from the reward of a trajectory"),
    Shown("kl/", "Divergence from the reference"),
    Shown("entropy", "Entropy of the policy", "entropy", 10, 9),
    Shown("grad_norm", "Gradient norm", "grad norm", 8),
    Shown("guards/", "Updates beyond limits, and returns to a checkpoint"),
    Shown("critic/guards/", "Updates beyond limits, and returns to a checkpoint"),
    Shown("lr", "Learning rate", "lr", 15),
    # Mean and maximum lie orders of magnitude apart.
    Shown("logprob_gap/max", "Logprob gap between engine and trainer", "max gap", 14, log_scale=True),
    Shown("logprob_gap/", "Logprob gap between engine and trainer", log_scale=True),
    Shown("throughput/tokens_per_second", "Throughput, tokens per second", "tokens/s", 9),
    Shown("throughput/", "Throughput, tokens per second"),
    Shown("mfu/training", "Model FLOPs utilization (MFU)", "mfu", 17, width=8, tile="MFU of training"),
    Shown("mfu/", "Model FLOPs utilization (MFU)"),
    Shown("tflops/", "TFLOP/s of a device"),
    Shown("flops/", "Operations of the model in a step"),
    Shown("idle/policy", "Idle share of processes", "idle", 16, width=8),
    Shown("idle/", "Idle share of processes"),
    Shown("critical/", "Critical path: share of a step that the driver waits for"),
    Shown("time/step", column="seconds", priority=7, width=9),
    Shown("time/"),
    Shown("refit/seconds/", "Seconds of a weight update by stage, in the slowest rank"),
    Shown("reward/", "Rewards by name"),
    Shown("reward_std/", "Standard deviation of each reward"),
    Shown("reward_absent/", "Share of answers to which a reward does not apply"),
    Shown("reward_errors/", "Trajectories lost to an error of a reward"),
    Shown("reward_seconds/", "Seconds to score a group"),
    Shown("reward_waiting/", "Seconds that the scoring of a group waits for a free slot"),
    Shown("reward_retries/", "Retried requests of rewards"),
    Shown("players/", "Rewards of players"),
    Shown("validation/players/", "Rewards of players in validation"),
    Shown("source/", "Sources: share of samples, reward, pass rate"),
    Shown("sampling/", "Tasks that sampling by pass rate skipped and replayed"),
    Shown("trajectory_seconds/", "Seconds of a trajectory"),
    Shown("environment/", "Trajectories whose environment failed, and attempts that were repeated"),
    Shown("tokens/", "Tokens of a step"),
)


def shown(name: str) -> Shown:
    return next((row for row in SHOWN if name.startswith(row.prefix)), Shown(name, title=name))


@dataclass(frozen=True)
class MetricGroup:
    title: str
    names: list[str]  # of metrics with one unit
    is_main: bool  # of `SHOWN`, or a further validation set


def metric_groups(names: Collection[str]) -> list[MetricGroup]:
    """Metrics that share a plot: first those of `SHOWN` and of further validation sets, then the others.

    Limits of intervals (`_low`, `_high`) of another metric are left out.
    """
    found = set(names)
    keys = sorted(key for key in found if key.removesuffix("_low").removesuffix("_high") not in found - {key})
    of_set = {key: f"Validation: {match[1]}" for key in keys if (match := _SET_METRIC.fullmatch(key))}
    titles = dict.fromkeys([row.title for row in SHOWN if row.title] + list(of_set.values()))
    grouped: dict[str, list[str]] = {title: [] for title in titles}
    for key in sorted(keys, key=lambda key: SHOWN.index(shown(key)) if shown(key) in SHOWN else len(SHOWN)):
        if title := of_set.get(key, shown(key).title):
            grouped.setdefault(title, []).append(key)
    filled = [MetricGroup(title, members, title in titles) for title, members in grouped.items() if members]
    return sorted(filled, key=lambda group: not group.is_main)


def format_number(value: float, digits: int = 4) -> str:
    """Return `digits` significant digits; integers with thousands separated."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.{digits}g}"
