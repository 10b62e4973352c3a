"""`nemorl sweep`: check all points of a sweep, run them on this machine, and compare them in a table."""

import json
import os
import shlex
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemorl.config.base import counted
from nemorl.config.load import ORIGIN, load_experiment, to_yaml
from nemorl.config.shipped import is_name
from nemorl.config.sweep import Sweep, SweepPoint, read_sweep
from nemorl.errors import ConfigError, Problem, RunError, RunStopped, UsageError
from nemorl.observe.files import JsonObject, write_atomically
from nemorl.observe.metrics import format_number
from nemorl.observe.run_folder import RunPaths, lock_folder
from nemorl.observe.sweep import RECORD, Outcome, SweepRecord, metric_of, read_states
from nemorl.observe.timeline import format_seconds
from nemorl.plan.machine import Machine, read_machine
from nemorl.run.inspection import Ready, prepare
from nemorl.run.sweep import PlannedRun, Resources, SweepDriver, needs_of, to_continue

from .terminal import (
    Commands,
    ExitCode,
    add_command,
    complain,
    natural_number,
    output,
    positive_integer,
    say,
    table,
)

POINTS = "points"  # folder of the runs' experiment files
ROWS = 30  # of the table while the sweep runs
_TAIL_BYTES = 65_536


def register(commands: Commands) -> None:
    help_text = "run an experiment with several values of its fields and compare the runs (docs/sweeps.md)"
    sweep = add_command(commands, "sweep", _sweep, help_text)
    config_help = "experiment file, sweep file, or with --resume the folder of a sweep"
    sweep.add_argument("config", type=Path, metavar="CONFIG", help=config_help)
    words_help = "values of a field: a.b=1e-5,1e-6; a range for --random: log(1e-6,1e-4), uniform(0,1), "
    words_help += "int(1,8); one value is set in all runs"
    sweep.add_argument("overrides", nargs="*", default=[], metavar="a.b=v1,v2", help=words_help)

    def add(name: str, metavar: str, help_text: str, **options: Any) -> None:
        sweep.add_argument(name, metavar=metavar, help=help_text, **options)

    random_help = "draw N random points instead of all combinations"
    add("--random", "N", random_help, type=positive_integer)
    add("--seed", "S", "seed of the random points (default: 0)", type=natural_number)
    concurrent_help = "run at most M at the same time (default: as many as the machine has room for)"
    add("--max-concurrent", "M", concurrent_help, type=positive_integer)
    share_help = "start --max-concurrent runs even if they have more processes than the machine has cores"
    sweep.add_argument("--oversubscribe", action="store_true", help=share_help)
    add("--metric", "NAME", "metric that compares the runs, such as validation/reward")
    sweep.add_argument("--mode", choices=("max", "min"), help="whether the best value is the highest")
    add("--dir", "DIR", "folder of the sweep (default: run_dir of the experiment)", type=Path)
    resume_help = "continue a sweep: complete runs are kept, stopped and failed ones continue"
    sweep.add_argument("--resume", action="store_true", help=resume_help)
    dry_run_help = "check and list the points without starting anything"
    sweep.add_argument("--dry-run", action="store_true", help=dry_run_help)


def _sweep(arguments: Namespace) -> int:
    from nemorl.observe.sweep_results import write_results  # Plotly

    if arguments.oversubscribe and arguments.max_concurrent is None:
        raise UsageError("--oversubscribe: set the number of runs at the same time (--max-concurrent M)")
    folder, sweep, earlier = _described(arguments)
    machine = read_machine()
    checked = _check_points(sweep, folder, machine, resumes=earlier is not None)
    name, mode = arguments.metric or sweep.metric, arguments.mode or sweep.mode
    metric, mode = metric_of(checked[0].experiment, name, mode)
    record = SweepRecord(str(sweep.experiment), metric, mode, sweep.points)
    recorded = read_states(folder) if earlier is not None else {}
    runs = [
        _planned(point, ready, folder, recorded.get(point.name))
        for point, ready in zip(sweep.points, checked, strict=True)
    ]
    resources = Resources(
        machine,
        [run.needs for run in runs],
        max_concurrent=arguments.max_concurrent or sweep.max_concurrent,
        oversubscribe=arguments.oversubscribe,
        cores=frozenset(os.sched_getaffinity(0)),
        gpus=_visible_gpus(machine),
    )
    summary = (
        f"{counted(len(runs), 'run')}, up to {resources.most} at the same time, compared by {metric} ({mode})"
    )
    if arguments.dry_run:
        for point, run in zip(sweep.points, runs, strict=True):
            size = f"{counted(run.needs.processes, 'process')}, {run.needs.memory_bytes / 1e9:.1f} GB"
            size += f", {counted(run.needs.gpus, 'GPU')}" if run.needs.gpus else ""
            say(f"{run.run_dir}: {' '.join(point.overrides)} ({size})")
        say(summary)
        return ExitCode.WELL
    driver = SweepDriver(folder, runs, resources)
    with closing(lock_folder(folder)):
        (folder / POINTS).mkdir(exist_ok=True)
        for run, ready in zip(runs, checked, strict=True):
            write_atomically(run.config, to_yaml(ready.experiment))
        write_atomically(folder / RECORD, record.text())
        say(f"sweep: {folder}, {summary}")
        with _Progress(runs, metric) as progress:

            def on_change(run: PlannedRun) -> None:
                progress.report(run)
                if run.process is None:
                    write_results(folder)

            driver.run(on_change, progress.refresh)
        path = write_results(folder)
    return _report(folder, path, runs, driver.signals)


def _described(arguments: Namespace) -> tuple[Path, Sweep, SweepRecord | None]:
    """Folder and description of a sweep, and its record if it continues. Raises `UsageError`."""
    path, words = arguments.config, arguments.overrides
    if arguments.resume and not path.exists() and not is_name(path):
        raise UsageError(f"{path} --resume: there is no such folder or file; name the folder of a sweep")
    if arguments.resume and path.is_dir():
        if words or arguments.random is not None or arguments.dir is not None:
            raise UsageError(
                f"{path} --resume: a sweep continues with the points that it has; name no others"
            )
        if (record := SweepRecord.read(path)) is None:
            raise UsageError(f"{path} holds no sweep. Name an experiment file or a sweep file.")
        sweep = Sweep(Path(record.experiment), record.points, record.metric, record.mode)
        return path, sweep, record
    sweep = read_sweep(path, words, random=arguments.random, seed=arguments.seed)
    folder = arguments.dir or sweep.dir
    if folder is None:
        try:
            folder = load_experiment(sweep.experiment, sweep.points[0].overrides).run_dir
        except ConfigError:
            _check_points(sweep, Path("runs"), read_machine(), resumes=False)  # names all points
            raise
    earlier = SweepRecord.read(folder)
    if earlier is not None and not (arguments.resume or arguments.dry_run):
        raise UsageError(f"{folder} holds a sweep. Continue it with --resume, or set another --dir.")
    problem = ""
    if RunPaths(folder).has_steps:
        problem = f"{folder} holds a run. Set another --dir for the sweep."
    elif earlier is not None and earlier.points != sweep.points:
        fix = f"Continue it with `nemorl sweep {shlex.quote(str(folder))} --resume`, or set another --dir."
        problem = f"{folder} holds a sweep of other points. {fix}"
    if problem and not arguments.dry_run:
        raise UsageError(problem)
    if problem:
        complain(f"Before it starts: {problem}")
        earlier = None
    return folder, sweep, earlier


def _check_points(sweep: Sweep, folder: Path, machine: Machine, *, resumes: bool) -> list[Ready]:
    """Check every point. Raises `ConfigError` with the problems of all, each once with its points.

    A sweep that continues has files of its points: it runs the same even if the user's file has changed.
    """
    checked: list[Ready] = []
    found: dict[str, tuple[Problem, list[SweepPoint]]] = {}
    for point in sweep.points:
        written = folder / POINTS / f"{point.name}.yaml"
        continues = resumes and written.exists()
        path = written if continues else sweep.experiment
        run_dir = point.run_dir(folder)
        overrides = [] if continues else [*point.overrides, f"run_dir={run_dir}"]
        try:
            ready = prepare(path, overrides, machine, resumes=resumes and RunPaths(run_dir).has_steps)
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(str(problem), (problem, []))[1].append(point)
            continue
        checked.append(ready)
    if found:
        problems = []
        for problem, points in found.values():
            where = "all points" if len(points) == len(sweep.points) else ", ".join(map(str, points))
            at = (
                sweep.origins.get(problem.field, problem.origin)
                if problem.origin == ORIGIN
                else problem.origin
            )
            origin = ", ".join(part for part in (at, where) if part)
            problems.append(replace(problem, origin=origin))
        raise ConfigError(str(sweep.experiment), problems)
    return checked


def _planned(point: SweepPoint, ready: Ready, folder: Path, recorded: Outcome | None) -> PlannedRun:
    config, run_dir = folder / POINTS / f"{point.name}.yaml", point.run_dir(folder)
    needs = needs_of(ready.experiment, ready.plan.processes)
    run = PlannedRun(point.name, config, run_dir, needs, ready.experiment.algorithm.num_steps)
    run.outcome = to_continue(run_dir, recorded)
    return run


def _visible_gpus(machine: Machine) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(machine.gpus))]
    return [name for name in visible.split(",") if name]


class _Progress:
    """A table of the runs on a terminal, and a line for each change elsewhere."""

    def __init__(self, runs: Sequence[PlannedRun], metric: str) -> None:
        self._runs, self._metric, self._console = runs, metric, output()
        self._last: dict[str, tuple[int, dict[str, float]]] = {}  # step, and newest value of each metric
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self.refresh()
            self._live.stop()

    def report(self, run: PlannedRun) -> None:
        if self._live is None:
            ended = f" after {format_seconds(time.monotonic() - run.began)}" if run.process is None else ""
            reason = f": {run.outcome.reason}" if run.outcome.reason else ""
            value = "" if run.process is not None else self._value(run)
            shown = f", {self._metric} {value}" if value else ""
            say(f"{run.name}: {run.outcome.state}{ended}{shown}{reason}")

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        rows = table("", ["run", "state", "step", self._metric, "time"])
        # Those that run come first where there is no room for all.
        order = (
            sorted(self._runs, key=lambda run: run.process is None) if len(self._runs) > ROWS else self._runs
        )
        for run in order[:ROWS]:
            value = self._value(run)
            step = self._last[run.name][0] if run.name in self._last else 0
            seconds = format_seconds(time.monotonic() - run.began) if run.process is not None else ""
            done = f"{step} of {run.num_steps}"
            rows.add_row(Text(run.name), run.outcome.state.value, done, value, seconds)
        states = Counter(run.outcome.state.value for run in self._runs)
        rows.caption = ", ".join(f"{count} {state}" for state, count in states.items())
        rows.caption_justify = "left"
        return rows

    def _value(self, run: PlannedRun) -> str:
        """The newest value of the metric that the run has recorded."""
        path = RunPaths(run.run_dir).metrics
        if run.process is not None or run.name not in self._last or self._live is None:
            step, values = self._last.get(run.name, (0, {}))
            for line in _last_lines(path):
                step = int(line["step"])
                values |= {name: v for name, v in line.items() if name == self._metric and v is not None}
            self._last[run.name] = step, values
        value = self._last[run.name][1].get(self._metric)
        return "" if value is None else format_number(value)


def _last_lines(path: Path) -> list[JsonObject]:
    """The last complete lines of a file of metrics."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 : -1]
            return [json.loads(line) for line in lines]
    except (OSError, ValueError):  # not there yet
        return []


def _report(folder: Path, path: Path, runs: Sequence[PlannedRun], signals: Sequence[int]) -> int:
    """Print the results. Raises `RunStopped` for a sweep that was stopped, `RunError` where runs failed."""
    output().print(path.read_text(encoding="utf-8").rstrip(), markup=False)
    say(f"results: {path}\nplots: {path.with_suffix('.html')}")
    states = Counter(run.outcome.state.value for run in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    again = f"Continue with: nemorl sweep {shlex.quote(str(folder))} --resume"
    if signals:
        raise RunStopped(f"Stopped by {signal.Signals(signals[0]).name}: {counts}. {again}")
    if states["failed"]:
        raise RunError(f"{counts}; the reasons are in {path}. {again}")
    if states["stopped"]:
        raise RunStopped(f"{counts}. {again}")
    return ExitCode.WELL
