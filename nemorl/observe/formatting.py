"""Text for metrics and stages, the same in bars, in plain lines and in the report."""

import math
from collections.abc import Mapping, Sequence

from .metrics import SHOWN, Shown, StepMetrics
from .timeline import Stage

COLUMNS = tuple(row for row in SHOWN if row.column)
VALIDATION = "validation/"


def format_number(value: float, digits: int = 4) -> str:
    """`digits` significant digits; integers with thousands separated."""
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


def choose_columns(values: Mapping[str, float], width: int) -> tuple[Shown, ...]:
    """The columns for which a run has metrics, as many as fit into `width`, by priority."""
    chosen, room = set(), width
    for row in sorted(COLUMNS, key=lambda row: row.priority):
        if row.prefix in values and row.width <= room:
            chosen.add(row)
            room -= row.width
    return tuple(row for row in COLUMNS if row in chosen)


def table_header(columns: Sequence[Shown]) -> str:
    """The header of the table of steps."""
    return "".join(f"{row.column:>{row.width}}" for row in columns)


def table_row(columns: Sequence[Shown], values: Mapping[str, float]) -> str:
    """The metrics of one step under `table_header`; `-` for a missing one."""
    cells = (format_number(values[c.prefix], digits=3) if c.prefix in values else "-" for c in columns)
    return "".join(f"{cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))


def describe_step(metrics: StepMetrics) -> str:
    """The metrics of one step as words: `reward 0.5, loss 0.01, seconds 3.2`."""
    present = (row for row in COLUMNS if row.prefix in metrics.values)
    return ", ".join(f"{row.column} {format_number(metrics.values[row.prefix], digits=3)}" for row in present)


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
    """The metrics of the validation after a step, if there was one."""
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
    """The interval of a metric that has one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return "" if low is None or high is None else f" ({format_number(low)} to {format_number(high)})"
