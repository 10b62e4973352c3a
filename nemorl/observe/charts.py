"""The plots of a report. Colors that depend on the light or dark theme are set by the page."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from .metrics import SHOWN, StepMetrics, shown

PALETTE = ("#4a8bd0", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#d4a514", "#9d7660", "#8c8c94")
REST_COLOR = "#8c8c94"
MAX_BARS = 200  # more steps than this are averaged in groups


@dataclass(frozen=True)
class Chart:
    """A plot with its heading."""

    title: str
    plot: go.Figure  # words: allow
    wide: bool = False


@dataclass(frozen=True)
class StageTotal:
    """Seconds of one stage over the run, and their part of all."""

    name: str
    seconds: float
    fraction: float
    color: str


def reward_chart(steps: Sequence[StepMetrics]) -> Chart | None:
    """Mean reward with its spread in the batch, and validations as points; None for a run without rewards."""
    plot = _plot(steps, height=360)
    rewarded = [step for step in steps if "reward/mean" in step.values]
    if rewarded:
        _add_band(plot, [step for step in rewarded if "reward/std" in step.values])
        _add_line(plot, rewarded, "reward/mean", "training", PALETTE[0])
    validated = [step for step in steps if "validation/reward" in step.values]
    if validated:
        _add_line(plot, validated, "validation/reward", "validation", PALETTE[1], "lines+markers")
    if not plot.data:
        return None
    plot.update_layout(showlegend=True, xaxis_title="step", yaxis_title="reward")
    return Chart("Reward", plot, wide=True)


def metric_charts(steps: Sequence[StepMetrics]) -> tuple[list[Chart], list[Chart]]:
    """Plots of all other metrics: first those of `SHOWN` and of further validation sets, then the rest."""
    found = {key for step in steps for key in step.values}
    keys = sorted(key for key in found if key.removesuffix("_low").removesuffix("_high") not in found - {key})
    titles = dict.fromkeys([row.title for row in SHOWN if row.title] + _validation_titles(keys))
    grouped: dict[str, list[str]] = {title: [] for title in titles}
    for key in sorted(keys, key=lambda key: SHOWN.index(shown(key)) if shown(key) in SHOWN else len(SHOWN)):
        title = _validation_title(key) or shown(key).title
        if title:
            grouped.setdefault(title, []).append(key)
    charts = {title: _line_chart(title, steps, members) for title, members in grouped.items() if members}
    main = [chart for title, chart in charts.items() if title in titles]
    return main, [chart for title, chart in charts.items() if title not in titles]


_VALIDATION_SET = re.compile(
    r"validation/(?!rewards/|distillation/)(\w+)/(reward|accuracy|pass@\d+|cons@\d+)"
)


def _validation_title(key: str) -> str | None:
    """Metrics between 0 and 1 of one of `data.validation_sets` share a plot."""
    match = _VALIDATION_SET.fullmatch(key)
    return f"Validation: {match[1]}" if match else None


def _validation_titles(keys: Sequence[str]) -> list[str]:
    return [title for key in keys if (title := _validation_title(key))]


def stage_chart(steps: Sequence[StepMetrics], totals: Sequence[StageTotal]) -> Chart | None:
    """Seconds of each stage, stacked, for every step; long runs show means over groups of steps."""
    timed = [step for step in steps if step.values.get("time/step", 0) > 0]
    if not timed:
        return None
    size = -(-len(timed) // MAX_BARS)
    groups = [timed[start : start + size] for start in range(0, len(timed), size)]
    plot = _plot(steps, height=320)
    for total in totals:
        seconds = [
            sum(stage_seconds(step).get(total.name, 0) for step in group) / len(group) for group in groups
        ]
        plot.add_bar(
            x=[group[0].step for group in groups], y=seconds, name=total.name, marker_color=total.color
        )
    axis = "step" if size == 1 else f"step (means over {size})"
    plot.update_layout(
        barmode="stack",
        bargap=0.1,
        showlegend=True,
        legend_traceorder="normal",
        xaxis_title=axis,
        yaxis_title="seconds",
    )
    return Chart("Seconds of each stage", plot, wide=True)


def stage_totals(steps: Sequence[StepMetrics]) -> list[StageTotal]:
    """Seconds of each stage over all steps, the longest first, what no stage accounts for at the end."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, seconds in stage_seconds(step).items():
            sums[name] = sums.get(name, 0.0) + seconds
    whole = sum(sums.values()) or 1.0
    ordered = sorted(sums.items(), key=lambda item: (item[0] == "other", -item[1]))
    return [
        StageTotal(
            name, seconds, seconds / whole, REST_COLOR if name == "other" else PALETTE[i % (len(PALETTE) - 1)]
        )
        for i, (name, seconds) in enumerate(ordered)
    ]


def stage_seconds(step: StepMetrics) -> dict[str, float]:
    """Seconds by stage of one step; `other` is what lies between the stages."""
    stages = {
        key.removeprefix("time/"): value for key, value in step.values.items() if key.startswith("time/")
    }
    whole = stages.pop("step", None)
    if whole is not None and (rest := whole - sum(stages.values())) > 0:
        stages["other"] = rest
    return stages


def _line_chart(title: str, steps: Sequence[StepMetrics], keys: Sequence[str]) -> Chart:
    plot = _plot(steps, height=260)
    for number, key in enumerate(keys):
        drawn = [step for step in steps if key in step.values]
        mode = "lines+markers" if len(drawn) < 2 or key.startswith("validation/") else "lines"
        name = (key.partition("/")[2] or key).replace("_", " ")
        _add_line(plot, drawn, key, name, PALETTE[number % len(PALETTE)], mode)
    plot.update_layout(showlegend=len(keys) > 1)
    if _always(steps, keys, lambda value: value >= 0):
        plot.update_yaxes(rangemode="tozero")
    if shown(keys[0]).log_scale and _always(steps, keys, lambda value: value > 0):
        plot.update_yaxes(type="log")
    return Chart(title, plot)


def _always(steps: Sequence[StepMetrics], keys: Sequence[str], holds: Callable[[float], bool]) -> bool:
    return all(holds(step.values[key]) for step in steps for key in keys if key in step.values)


def _add_line(
    plot: go.Figure,  # words: allow
    steps: Sequence[StepMetrics],
    key: str,
    name: str,
    color: str,
    mode: str = "lines",
) -> None:
    plot.add_scatter(
        x=[step.step for step in steps],
        y=[step.values[key] for step in steps],
        name=name,
        mode=mode if len(steps) > 1 else "markers",
        line={"color": color, "width": 2},
        marker={"color": color, "size": 7},
    )


def _add_band(plot: go.Figure, steps: Sequence[StepMetrics]) -> None:  # words: allow
    """The mean with one standard deviation above and below."""
    if len(steps) < 2:
        return
    low = [step.values["reward/mean"] - step.values["reward/std"] for step in steps]
    high = [step.values["reward/mean"] + step.values["reward/std"] for step in steps]
    numbers = [step.step for step in steps]
    plot.add_scatter(
        x=numbers + numbers[::-1],
        y=high + low[::-1],
        fill="toself",
        fillcolor="rgba(74, 139, 208, 0.18)",
        line={"width": 0},
        hoverinfo="skip",
        name="± standard deviation",
        mode="lines",
    )


def _plot(steps: Sequence[StepMetrics], height: int) -> go.Figure:  # words: allow
    first, last = (steps[0].step, steps[-1].step) if steps else (0, 0)
    margin = max(0.02 * (last - first), 0.5)
    return go.Figure(  # words: allow
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 60, "r": 16, "t": 12, "b": 32},
            "hovermode": "x unified",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {
                "automargin": True,
                "range": [first - margin, last + margin],
                "dtick": 1 if last - first <= 10 else None,  # no half steps
            },
            "yaxis": {"automargin": True, "exponentformat": "e"},
        }
    )
