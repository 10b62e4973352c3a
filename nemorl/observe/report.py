"""report.html: a run as one page that needs no network and no server.

Plotly's script is put into the page (4.8 MB): its plots can be zoomed and read point by point years later,
and it is a library we already have. Everything in the page that a model or a person wrote is escaped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from plotly.offline import get_plotlyjs

from .charts import Chart, metric_charts, reward_chart, stage_chart, stage_totals
from .files import RunFolderError, write_atomically
from .metrics import SHOWN, Sample, StepMetrics, format_number, read_metrics, read_samples
from .run_folder import RunPaths, read_header
from .timeline import format_seconds

SAMPLES_SHOWN = 3  # of the first step, and of the last
MAX_CHARACTERS = 4000  # of one text

Tile = tuple[str, str, str]  # label, value and note of one large value at the top
SampleGroup = tuple[str, Sequence[Sample]]  # conversations under a heading


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
    algorithm = config.get("algorithm", {})
    planned = algorithm.get("num_steps")
    planned = planned if isinstance(planned, int) else None
    subtitle = (algorithm.get("name"), config.get("policy", {}).get("model_path"), _state(algorithm, steps))
    starts = read_header(paths.header)
    totals = stage_totals(steps)
    main, more = metric_charts(steps)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": format_number, "seconds": format_seconds, "cut": _cut}
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        title=run_dir.resolve().name,
        subtitle=" · ".join(str(part) for part in subtitle if part),
        tiles=list(_tiles(steps, planned)),
        lead=_rendered([reward_chart(steps)], "lead"),
        main=_rendered(main, "main"),
        stages=_rendered([stage_chart(steps, totals)], "stages"),
        totals=totals,
        more=_rendered(more, "more"),
        last=steps[-1] if steps else None,
        samples=list(_sample_groups(read_samples(paths.samples))),
        facts=_flatten(starts[-1]) if starts else {},
        starts=starts,
        config=config_text,
        plotly=get_plotlyjs(),
    )
    write_atomically(paths.report, page)
    return paths.report


def _rendered(charts: Sequence[Chart | None], area: str) -> list[dict[str, Any]]:
    """Return what the template needs of each chart; Plotly escapes its JSON for use inside a script."""
    return [
        {
            "id": f"{area}-{number}",
            "title": chart.title,
            "wide": chart.wide,
            "height": chart.plot.layout.height,
            "json": chart.plot.to_json(),
        }
        for number, chart in enumerate(charts)
        if chart is not None
    ]


def _state(algorithm: Mapping[str, Any], steps: Sequence[StepMetrics]) -> str:
    planned, last = algorithm.get("num_steps"), steps[-1] if steps else None
    if last is not None and isinstance(planned, int) and last.step >= planned:
        return "finished"
    stop = algorithm.get("early_stop") or {}
    patience, metric = stop.get("patience"), stop.get("metric")
    waited = last.values.get("early_stop/waited", 0.0) if last is not None else 0.0
    if isinstance(patience, int) and waited >= patience:
        return f"finished early, as {metric} got no better"
    return "not finished"


def _tiles(steps: Sequence[StepMetrics], planned: int | None) -> Iterator[Tile]:
    done = steps[-1].step if steps else 0
    yield "steps", f"{done:,}", f"of {planned:,}" if planned is not None else ""
    for row in SHOWN:
        values = [step.values[row.prefix] for step in steps if row.tile and row.prefix in step.values]
        if values:
            yield row.tile, format_number(values[-1]), f"from {format_number(values[0])}"
    yield "time of all steps", format_seconds(sum(step.values.get("time/step", 0.0) for step in steps)), ""
    if tokens := sum(step.values.get("tokens/trained", 0.0) for step in steps):
        yield "tokens trained", f"{tokens:,.0f}", ""


def _sample_groups(samples: Sequence[Sample]) -> Iterator[SampleGroup]:
    """Of training, and of validation: some of the first step and some of the last.

    Then the samples with the highest and the lowest value of each reward, which show what it really rewards;
    the latest of equal ones, which shows what the policy has learned.
    """
    for phase in ("training", "validation"):
        of_phase = [sample for sample in samples if sample.phase == phase]
        for step in sorted({s.step for s in (*of_phase[:1], *of_phase[-1:])}):
            yield f"{phase}, step {step}", [s for s in of_phase if s.step == step][:SAMPLES_SHOWN]
    scored = [sample for sample in samples if sample.phase == "training" and sample.error is None]
    for name in sorted({name for sample in scored for name in sample.rewards}):
        of_reward = [sample for sample in scored if name in sample.rewards]
        highest = max(reversed(of_reward), key=lambda s: (s.rewards[name], s.step))
        lowest = max(of_reward, key=lambda s: (-s.rewards[name], s.step))
        low, high = lowest.rewards[name], highest.rewards[name]
        if low < high:
            values = (
                f"{format_number(high)} in step {highest.step}, {format_number(low)} in step {lowest.step}"
            )
            yield f"highest and lowest {name}: {values}", [highest, lowest]


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
