"""How figures and stages are written for a person, the same in bars, in plain lines and in the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .metrics import StepMetrics
from .timeline import Stage


@dataclass(frozen=True)
class Column:
    """One figure of the step table."""

    key: str  # in metrics.jsonl
    header: str
    width: int


# In the order of the table; a narrow terminal loses columns from the end of `BY_IMPORTANCE`.
COLUMNS = (
    Column("reward/mean", "reward", 8),
    Column("reward/std", "spread", 8),
    Column("loss/policy", "loss", 10),
    Column("loss/preference", "preference", 10),
    Column("loss/sft", "loss", 10),
    Column("rewards/accuracy", "told right", 10),
    Column("accuracy", "told right", 10),
    Column("critic/explained_variance", "explained", 10),
    Column("kl/reference", "kl", 10),
    Column("entropy", "entropy", 9),
    Column("grad_norm", "grad norm", 10),
    Column("lr", "lr", 10),
    Column("logprob_gap/max", "gap", 10),
    Column("throughput/tokens_per_second", "tokens/s", 10),
    Column("time/step", "seconds", 9),
)
BY_IMPORTANCE = (
    "reward/mean", "loss/policy", "loss/preference", "rewards/accuracy", "accuracy", "loss/sft", "time/step",
    "grad_norm", "throughput/tokens_per_second",
    "entropy", "critic/explained_variance", "kl/reference", "reward/std", "logprob_gap/max", "lr",
)  # fmt: skip
VALIDATION = "validation/"


def format_number(value: float, digits: int = 4) -> str:
    """So many significant digits; whole numbers with thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """`8.3 s`, `4 min 10 s` or `2 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_progress(stage: Stage) -> str:
    """How far a stage is: `34/128 trajectories, 410 tokens/s`; empty when nothing is counted."""
    parts = []
    if stage.total is not None or stage.done:
        total = "" if stage.total is None else f"/{stage.total:,}"
        parts.append(f"{stage.done:,}{total} {stage.unit}".rstrip())
    if stage.tokens:
        parts.append(f"{format_number(round(stage.tokens / max(stage.seconds, 1e-9)))} tokens/s")
    return ", ".join(parts)


def choose_columns(values: Mapping[str, float], width: int) -> tuple[Column, ...]:
    """The columns that a run has figures for; the important ones first, as many as fit into `width`."""
    present = {column.key: column for column in COLUMNS if column.key in values}
    chosen, room = set(), width
    for key in BY_IMPORTANCE:
        if key in present and present[key].width <= room:
            chosen.add(key)
            room -= present[key].width
    return tuple(column for column in COLUMNS if column.key in chosen)


def table_header(columns: Sequence[Column]) -> str:
    """The heading over the figures."""
    return "".join(f"{column.header:>{column.width}}" for column in columns)


def table_row(columns: Sequence[Column], values: Mapping[str, float]) -> str:
    """The figures of one step under `table_header`; `-` for one that this step does not have."""
    cells = (format_number(values[c.key], digits=3) if c.key in values else "-" for c in columns)
    return "".join(f"{cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))


def describe_step(metrics: StepMetrics) -> str:
    """The figures of one step as words: `reward 0.5, loss 0.01, seconds 3.2`."""
    present = (column for column in COLUMNS if column.key in metrics.values)
    return ", ".join(
        f"{column.header} {format_number(metrics.values[column.key], digits=3)}" for column in present
    )


def describe_losses(metrics: StepMetrics) -> str | None:
    """What a step lost: trajectories with an error, and updates whose gradients are not finite, or all 0."""
    found = {key: value for key, value in metrics.values.items() if value > 0}
    parts = [
        f"{key} {format_number(value)}"
        for key, value in found.items()
        if key == "errors" or key.startswith("reward_errors/")
    ]
    if parts:
        parts[-1] += " (why: logs/rollout-*.log)"
    if skipped := found.get("updates/skipped"):
        parts.append(f"skipped {format_number(skipped)} of {format_number(found['updates/all'])} updates")
    if empty := found.get("updates/empty"):
        parts.append(
            f"nothing to learn in {format_number(empty)} of {format_number(found['updates/all'])} updates"
        )
    if skipped := found.get("critic/skipped_updates"):
        parts.append(f"critic skipped {format_number(skipped)} updates")
    return ", ".join(parts) or None


def describe_validation(metrics: StepMetrics) -> str | None:
    """The figures of the validation after a step, if there was one."""
    found = {
        key.removeprefix(VALIDATION): v for key, v in metrics.values.items() if key.startswith(VALIDATION)
    }
    shown = [
        f"{name} {format_number(value)}{_between(name, found)}"
        for name, value in found.items()
        if name.removesuffix("_low").removesuffix("_high") not in found.keys() - {name}
    ]
    return ", ".join(shown) or None


def _between(name: str, metrics: Mapping[str, float]) -> str:
    """The interval of a figure that has one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return "" if low is None or high is None else f" ({format_number(low)} to {format_number(high)})"
