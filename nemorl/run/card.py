"""The model card of an exported folder: README.md with the hub's metadata, from the files of its run.

What is not known is left out. Names of folders are written without the folders above them, and no host,
address or variable of the machine is.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, UsageError
from nemorl.models.hub import commits_in, is_hub_id
from nemorl.observe.files import write_atomically
from nemorl.observe.metrics import SHOWN, StepMetrics, format_number, read_metrics
from nemorl.observe.run_folder import RunPaths, read_header

CARD_FILE, CURVES_FILE = "README.md", "curves.svg"
_DIGEST_FILE = ".card.sha256"  # of the card as it was written; another one was edited
_HUB = "https://huggingface.co"
_OF_THE_MACHINE = ("run_dir", "cluster", "logger", "checkpointing")  # sections that are not in a card
_ADDRESS = re.compile(r"(^|_)(env|key|url|urls|host|hosts|address|port|command)$")
_MEASURED = re.compile(r"validation/(?:(?P<set>\w+)/)?(?P<metric>reward|accuracy|loss|pass@\d+|cons@\d+)")
_TITLES = {"accuracy": "accuracy", "reward": "mean reward", "loss": "loss"}

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 180, 64, 30, 24  # of a panel and its margins, in pixels
_COLUMNS, _MAX_PANELS, _MAX_POINTS = 2, 6, 400
Points = Sequence[tuple[int, float]]  # step and value


@dataclass(frozen=True)
class Measured:
    """A value of the evaluation table."""

    dataset: str
    metric: str
    value: float
    kind: str  # of the dataset: an id on the hub, or the name of its kind
    source: str  # what measured it
    config: str | None = None  # of a dataset on the hub
    spread: float | None = None  # standard error, if known

    def as_result(self, task: str) -> EvalResult:
        return EvalResult(
            task_type=task,
            dataset_type=self.kind,
            dataset_name=self.dataset,
            dataset_config=self.config,
            metric_type=re.sub(r"\W+", "_", self.metric.partition(",")[0]),
            metric_name=self.metric,
            metric_value=self.value,
        )


@dataclass
class Facts:
    """What is known about a folder's model."""

    folder: Path
    run: str  # its name
    step: int
    steps: Sequence[StepMetrics] = ()  # of the run up to `step`
    start: Mapping[str, Any] = field(default_factory=dict)  # of header.json
    experiment: Experiment | None = None
    model: str = "policy"
    base: Path | None = None
    base_id: str | None = None  # on the hub
    base_card: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, run_dir: Path, step: int, model: str = "policy") -> "Facts":
        """Raises UsageError if the run folder is not there."""
        paths = RunPaths(run_dir)
        if not paths.config.exists():
            fix = "name it with --run if it was moved"
            raise UsageError(f"{run_dir}, the run of {folder}, is not there or holds no config.yaml: {fix}")
        facts = cls(folder, run_dir.resolve().name, step, model=model)
        facts.steps = [each for each in read_metrics(paths.metrics) if each.step <= step]
        starts = read_header(paths.header)
        facts.start = starts[-1] if starts else {}
        try:
            facts.experiment = load_experiment(paths.config)
        except ConfigError:  # of another version
            return facts
        specs = {spec.name: spec.config for spec in models_of(facts.experiment)}
        if model in specs:
            facts.base = specs[model].model_path
            facts.base_id = next(iter(commits_in(str(facts.base))), None)
            if facts.base_id is None and is_hub_id(facts.base):
                facts.base_id = str(facts.base)
            facts.base_card = _metadata(facts.base / CARD_FILE)
        return facts

    @property
    def is_adapter(self) -> bool:
        return (self.folder / "adapter_config.json").exists()

    @property
    def base_name(self) -> str | None:
        return self.base_id or (_short(self.base) if self.base is not None else None)


def write_card(facts: Facts, evaluations: Sequence[Path] = ()) -> bool:
    """Write README.md and the curves into the folder; False if a card is there that nemorl did not write.

    `evaluations` are results of lm-evaluation-harness. Raises UsageError for a file that is none.
    """
    card, digest = facts.folder / CARD_FILE, facts.folder / _DIGEST_FILE
    if is_edited(facts.folder):
        return False
    curves = curves_svg(facts.steps)
    if curves is not None:
        write_atomically(facts.folder / CURVES_FILE, curves)
    measured = [*_validated(facts), *(row for path in evaluations for row in read_lm_eval(path))]
    text = str(ModelCard(_content(facts, measured, has_curves=curves is not None)))
    write_atomically(card, text)
    write_atomically(digest, hashlib.sha256(card.read_bytes()).hexdigest() + "\n")
    return True


def is_edited(folder: Path) -> bool:
    """True if a folder has a card, and it is not as nemorl wrote it."""
    card, digest = folder / CARD_FILE, folder / _DIGEST_FILE
    if not card.exists():
        return False
    written = digest.read_text().strip() if digest.exists() else ""
    return hashlib.sha256(card.read_bytes()).hexdigest() != written


def read_lm_eval(path: Path) -> Iterator[Measured]:
    """The metrics of a `results_….json` of lm-evaluation-harness. Raises UsageError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = dict(content["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "name the results_….json that `lm_eval --output_path` wrote"
        raise UsageError(f"{path} holds no results of lm-evaluation-harness ({error}): {fix}") from error
    version = content.get("lm_eval_version")
    source = f"lm-evaluation-harness {version}" if version else "lm-evaluation-harness"
    for task, metrics in results.items():
        about = content.get("configs", {}).get(task, {})
        shots = content.get("n-shot", {}).get(task)
        kind, config = about.get("dataset_path") or task, about.get("dataset_name")
        kind = kind if is_hub_id(Path(kind)) else task  # otherwise a script or a kind of files
        for key, value in metrics.items():
            name, _, variant = key.partition(",")
            if not isinstance(value, int | float) or isinstance(value, bool) or name.endswith("_stderr"):
                continue
            if not variant:  # such as the number of samples
                continue
            title = name if variant == "none" else f"{name} ({variant})"
            title += f", {shots}-shot" if isinstance(shots, int) else ""
            spread = metrics.get(f"{name}_stderr,{variant}")
            spread = spread if isinstance(spread, int | float) else None
            yield Measured(task, title, float(value), kind, source, config, spread)


def _validated(facts: Facts) -> Iterator[Measured]:
    """The newest validation of the run up to the exported step."""
    if facts.experiment is None or facts.model != "policy":
        return
    data = facts.experiment.data
    found = (each for each in reversed(facts.steps) if any(map(_MEASURED.fullmatch, each.values)))
    newest = next(found, None)
    if newest is None:
        return
    for name, value in newest.values.items():
        match = _MEASURED.fullmatch(name)
        if match is None:
            continue
        dataset: Any = data.validation_sets.get(match["set"]) if match["set"] else data.validation
        if dataset is None:
            continue
        metric = _TITLES.get(match["metric"], match["metric"])
        kind, label, config = _dataset(dataset)
        source = f"validation at step {newest.step}"
        yield Measured(label if match["set"] is None else match["set"], metric, value, kind, source, config)


def _dataset(dataset: Any) -> tuple[str, str, str | None]:
    """Kind, label and configuration of a dataset: its id on the hub, or the name of its kind."""
    path = getattr(dataset, "path", None)
    if path is not None and getattr(dataset, "split", None) is not None and is_hub_id(path):
        return str(path), str(path), dataset.subset
    return dataset.name, path.name if path is not None else dataset.name, None


def _content(facts: Facts, measured: Sequence[Measured], *, has_curves: bool) -> str:
    experiment, is_adapter = facts.experiment, facts.is_adapter
    head = None if experiment is None else getattr(experiment.policy, "head", "lm")
    generates = head == "lm" and facts.model == "policy"
    task = "text-generation" if generates else "text-classification"
    name = f"{facts.run}-step-{facts.step}"
    algorithm = None if experiment is None else experiment.algorithm.name
    datasets = [] if experiment is None else sorted(_hub_datasets(experiment))
    data = ModelCardData(
        base_model=facts.base_id,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=None if experiment is None else task,
        tags=["nemorl", *([algorithm] if algorithm else []), *(["lora"] if is_adapter else [])],
        datasets=datasets or None,
        license=facts.base_card.get("license"),
        license_name=facts.base_card.get("license_name"),
        license_link=facts.base_card.get("license_link"),
        language=facts.base_card.get("language"),
        model_name=name if measured else None,
        eval_results=[row.as_result(task) for row in measured] or None,
    )
    sections = ["---", data.to_yaml(), "---", "", f"# {name}", "", *_opening(facts, algorithm)]
    if experiment is not None:
        sections += ["", "## Training", "", *_table(_training(facts, experiment)), ""]
        sections += ["## Data", "", *_table(_data_rows(experiment)), ""]
    if has_curves:
        sections += ["## Curves", "", f"![Metrics by step]({CURVES_FILE})", ""]
    if measured:
        rows = [
            (row.dataset, row.metric, f"{format_number(row.value)}{_plus_minus(row)}", row.source)
            for row in measured
        ]
        sections += ["## Evaluation", "", *_table(rows, ("dataset", "metric", "value", "measured by")), ""]
    if experiment is not None:
        settings = yaml.safe_dump(_settings(experiment), sort_keys=False, allow_unicode=True, width=110)
        sections += ["## Settings", "", "Those that differ from the defaults of nemorl:", ""]
        sections += ["```yaml", settings.rstrip(), "```", ""]
    if versions := facts.start.get("versions"):
        sections += ["## Versions", "", *_table(versions.items(), ("package", "version")), ""]
    return "\n".join(sections)


def _opening(facts: Facts, algorithm: str | None) -> Iterator[str]:
    what = {"critic": "The critic"}.get(facts.model, "An adapter (LoRA)" if facts.is_adapter else "A model")
    by = f" by {algorithm}" if algorithm else ""
    start = facts.base_name
    base = f"[{start}]({_HUB}/{start})" if facts.base_id else f"`{start}`"
    yield f"{what} trained with nemorl{by}{f' from {base}' if start else ''}; step {facts.step} of its run."


def _training(facts: Facts, experiment: Experiment) -> Iterator[tuple[str, object]]:
    algorithm, policy = experiment.algorithm, experiment.policy
    yield "algorithm", algorithm.name
    yield "steps", f"{facts.step} of {algorithm.num_steps}"
    for title, name in (
        ("prompts per step", "num_prompts_per_step"),
        ("samples per prompt", "num_generations_per_prompt"),
        ("batch size", "batch_size"),
        ("max staleness", "max_staleness"),
    ):
        if (value := getattr(algorithm, name, None)) is not None:
            yield title, value
    yield "optimizer", policy.optimizer.name
    yield "learning rate", policy.optimizer.lr
    yield "schedule", policy.schedule.name
    yield "precision", policy.precision
    yield "max sequence length", policy.max_sequence_length
    if policy.lora is not None:
        yield "LoRA", f"rank {policy.lora.rank}, alpha {policy.lora.alpha:g}"
    if algorithm.generates:
        yield "engine", experiment.generation.backend
    yield "seed", experiment.seed
    run, machine = facts.start.get("run", {}), facts.start.get("machine", {})
    for title, value in (
        ("device", run.get("policy device")),
        ("layout", run.get("policy layout")),
        ("cores of the driver's node", machine.get("cores")),
        ("memory of the driver's node", machine.get("memory_gigabytes")),
    ):
        if value is not None:
            yield title, f"{value} GB" if title.startswith("memory") else value
    if seconds := sum(step.values.get("time/step", 0.0) for step in facts.steps):
        yield "time of the steps", f"{seconds / 3600:.2f} h"
    if tokens := sum(step.values.get("tokens/trained", 0.0) for step in facts.steps):
        yield "tokens trained", f"{tokens:,.0f}"


def _data_rows(experiment: Experiment) -> Iterator[tuple[str, object]]:
    for name, source in experiment.data.sources.items():
        yield f"training {name}".strip(), _described(source.dataset)
    if experiment.data.validation is not None:
        yield "validation", _described(experiment.data.validation)
    for name, dataset in experiment.data.validation_sets.items():
        yield f"validation {name}", _described(dataset)


def _described(dataset: Any) -> str:
    kind, label, config = _dataset(dataset)
    if kind == label and "/" in kind:
        parts = [f"[{kind}]({_HUB}/datasets/{kind})", config, getattr(dataset, "split", None)]
        return ", ".join(part for part in parts if part)
    return kind if kind == label else f"{kind}: `{label}`"


def _hub_datasets(experiment: Experiment) -> set[str]:
    """Ids of the datasets of training: those on the hub."""
    kinds = (_dataset(source.dataset)[0] for source in experiment.data.sources.values())
    return {kind for kind in kinds if "/" in kind}


def _settings(experiment: Experiment) -> Any:
    dumped = experiment.model_dump(exclude_defaults=True)
    return _cleaned({name: value for name, value in dumped.items() if name not in _OF_THE_MACHINE})


def _cleaned(value: Any) -> Any:
    """Without addresses and names of variables, and with names in place of paths."""
    if isinstance(value, Mapping):
        return {str(k): _cleaned(v) for k, v in value.items() if not _ADDRESS.search(str(k))}
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(each) for each in value]
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "~"))):
        return _short(Path(value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _short(path: Path) -> str:
    """An id on the hub, or the last name of a folder; a folder `hf` with its run's."""
    if found := next(iter(commits_in(str(path))), None):
        return found
    if is_hub_id(path):
        return str(path)
    return f"{path.parent.name}/{path.name}" if path.name == "hf" and path.parent.name else path.name


def _plus_minus(row: Measured) -> str:
    return "" if row.spread is None else f" ± {format_number(row.spread)}"


def _table(rows: Any, header: Sequence[str] = ("", "")) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"


def _metadata(card: Path) -> Mapping[str, Any]:
    """The YAML block of a base model's card; empty if there is none that can be read."""
    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict() if card.exists() else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def curves_svg(steps: Sequence[StepMetrics]) -> str | None:
    """An image with a panel for each of the main metrics (those with a tile or a column), or None."""
    panels: list[tuple[str, Points]] = []
    for row in SHOWN:
        of_speed = "time/", "idle/", "throughput/", "tflops/", "lr"
        if not (row.tile or row.column) or row.prefix.startswith(of_speed):
            continue
        found = [(step.step, step.values[row.prefix]) for step in steps if row.prefix in step.values]
        if len(found) > 1:
            panels.append((row.prefix, found))
    panels = panels[:_MAX_PANELS]
    if not panels:
        return None
    rows = -(-len(panels) // _COLUMNS)
    size = f"{_COLUMNS * _WIDTH} {rows * _HEIGHT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif"',
        ' font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, points) in enumerate(panels):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, points), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, points: Points) -> Iterable[str]:
    points = list(points)[:: -(-len(points) // _MAX_POINTS)]
    values = [value for _, value in points]
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM

    def place(step: int, value: float) -> str:
        across = (step - first) / max(1, last - first)
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + width * across:.1f},{_TOP + height * (1 - up):.1f}"

    bottom = _TOP + height
    yield f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(name)}</text>'
    yield f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>'
    for label, at in ((high, _TOP + 9), (low, bottom)):
        yield f'<text x="{_LEFT - 4}" y="{at}" text-anchor="end">{escape(format_number(label))}</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 15}">step {first}</text>'
    yield f'<text x="{_LEFT + width}" y="{bottom + 15}" text-anchor="end">{last}</text>'
    line = " ".join(place(step, value) for step, value in points)
    yield f'<polyline points="{line}" fill="none" stroke="#4a8bd0" stroke-width="1.5"/>'
