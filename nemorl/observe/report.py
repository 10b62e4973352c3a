"""report.html: a run as one page that needs no network and no server.

Plotly's script is put into the page (4.8 MB): its plots can be zoomed and read point by point years later,
and it is a library we already have. Everything in the page that a model or a person wrote is escaped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from plotly.offline import get_plotlyjs

from .charts import Chart, metric_charts, reward_chart, stage_chart, stage_totals
from .console import format_number, format_seconds
from .files import RunFolderError, write_atomically
from .metrics import SHOWN, Sample, StepMetrics, read_metrics, read_samples
from .run_folder import RunPaths, read_header

SAMPLES_SHOWN = 3  # of the first step, and of the last
MAX_CHARACTERS = 4000  # of one text


@dataclass(frozen=True)
class Tile:
    """One large value at the top."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class SampleGroup:
    """Conversations of one step under a heading."""

    title: str
    samples: tuple[Sample, ...]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run, finished or not, and return its path.

    Raises `RunFolderError` when the folder holds no run or a corrupt file, and `WriteError`.
    """
    paths = RunPaths(run_dir)
    if not paths.holds_run:
        raise RunFolderError(f"{run_dir} holds no run: neither config.yaml nor metrics.jsonl is there.")
    steps = read_metrics(paths.metrics)
    config_text = paths.config.read_text(encoding="utf-8") if paths.config.exists() else ""
    config = yaml.safe_load(config_text) or {}
    starts = read_header(paths.header)
    totals = stage_totals(steps)
    main, more = metric_charts(steps)
    page = _template().render(
        title=run_dir.resolve().name,
        subtitle=_subtitle(config, steps),
        tiles=_tiles(steps, _planned_steps(config)),
        lead=_rendered([chart for chart in (reward_chart(steps),) if chart], "lead"),
        main=_rendered(main, "main"),
        stages=_rendered([chart for chart in (stage_chart(steps, totals),) if chart], "stages"),
        totals=totals,
        more=_rendered(more, "more"),
        last=steps[-1] if steps else None,
        samples=_sample_groups(read_samples(paths.samples)),
        facts=_flatten(starts[-1]) if starts else {},
        starts=starts,
        config=config_text,
        plotly=get_plotlyjs(),
    )
    write_atomically(paths.report, page)
    return paths.report


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": format_number, "seconds": format_seconds, "cut": _cut}
    return environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))


def _rendered(charts: Sequence[Chart], place: str) -> list[dict[str, Any]]:
    """What the template needs of each chart; Plotly escapes its JSON so that it may stand inside a script."""
    return [
        {
            "id": f"{place}-{number}",
            "title": chart.title,
            "wide": chart.wide,
            "height": chart.plot.layout.height,
            "json": chart.plot.to_json(),
        }
        for number, chart in enumerate(charts)
    ]


def _planned_steps(config: Mapping[str, Any]) -> int | None:
    planned = config.get("algorithm", {}).get("num_steps")
    return planned if isinstance(planned, int) else None


def _subtitle(config: Mapping[str, Any], steps: Sequence[StepMetrics]) -> str:
    algorithm = config.get("algorithm", {}).get("name")
    model = config.get("policy", {}).get("model_path")
    return " · ".join(str(part) for part in (algorithm, model, _state(config, steps)) if part)


def _state(config: Mapping[str, Any], steps: Sequence[StepMetrics]) -> str:
    planned, last = _planned_steps(config), steps[-1] if steps else None
    if last is not None and planned is not None and last.step >= planned:
        return "finished"
    stop = config.get("algorithm", {}).get("early_stop") or {}
    patience, metric = stop.get("patience"), stop.get("metric")
    waited = last.values.get("early_stop/waited", 0.0) if last is not None else 0.0
    if isinstance(patience, int) and waited >= patience:
        return f"finished early, as {metric} got no better"
    return "not finished"


def _tiles(steps: Sequence[StepMetrics], planned: int | None) -> list[Tile]:
    done = steps[-1].step if steps else 0
    tiles = [Tile("steps", f"{done:,}", f"of {planned:,}" if planned is not None else "")]
    for row in SHOWN:
        if not row.tile:
            continue
        values = [step.values[row.prefix] for step in steps if row.prefix in step.values]
        if values:
            tiles.append(Tile(row.tile, format_number(values[-1]), f"from {format_number(values[0])}"))
    seconds = sum(step.values.get("time/step", 0.0) for step in steps)
    tiles.append(Tile("time of all steps", format_seconds(seconds)))
    if tokens := sum(step.values.get("tokens/trained", 0.0) for step in steps):
        tiles.append(Tile("tokens trained", f"{tokens:,.0f}"))
    return tiles


def _sample_groups(samples: Sequence[Sample]) -> list[SampleGroup]:
    """Of training, and of validation: some of the first step and some of the last."""
    groups = []
    for phase in ("training", "validation"):
        of_phase = [sample for sample in samples if sample.phase == phase]
        for step in sorted({s.step for s in (*of_phase[:1], *of_phase[-1:])}):
            chosen = tuple(sample for sample in of_phase if sample.step == step)[:SAMPLES_SHOWN]
            groups.append(SampleGroup(f"{phase}, step {step}", chosen))
    return [*groups, *_extremes([s for s in samples if s.phase == "training" and s.error is None])]


def _extremes(samples: Sequence[Sample]) -> Iterator[SampleGroup]:
    """The samples with the highest and the lowest value of each reward, which show what it really rewards.

    The latest of equal ones, which shows what the policy has learned.
    """
    for name in sorted({name for sample in samples for name in sample.rewards}):
        ranked = sorted((s for s in samples if name in s.rewards), key=lambda s: (s.rewards[name], s.step))
        low, high = ranked[0].rewards[name], ranked[-1].rewards[name]
        if low < high:
            lowest = max((s for s in ranked if s.rewards[name] == low), key=lambda s: s.step)
            values = (
                f"{format_number(high)} in step {ranked[-1].step}, {format_number(low)} in step {lowest.step}"
            )
            yield SampleGroup(f"highest and lowest {name}: {values}", (ranked[-1], lowest))


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name} · ")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… ({len(text) - MAX_CHARACTERS:,} more characters in samples.jsonl)"
