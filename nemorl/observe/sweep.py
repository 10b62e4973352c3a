"""The folder of a sweep: what it compares, and the state of each of its runs.

<sweep>/sweep.json        the points and the metric by which they are compared
<sweep>/states.json       how runs ended, as the process that started them saw it
<sweep>/points/           the experiment file of each run
<sweep>/<point>/          the run folder of each
<sweep>/results.*         the table and the page (`sweep_results`)
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from nemorl.config.base import suggestion
from nemorl.config.experiment import Experiment
from nemorl.config.facts import metric_names
from nemorl.config.sweep import Mode, SweepPoint
from nemorl.errors import UsageError

from .files import write_atomically
from .run_folder import RunPaths, holder, read_header

RECORD, STATES = "sweep.json", "states.json"
_USUAL_METRICS = ("validation/reward", "validation/loss", "reward/mean", "loss/sft", "loss/preference")


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    state: State
    reason: str = ""  # of a failure


@dataclass(frozen=True)
class SweepRecord:
    """What a sweep compares; it does not change while the sweep runs."""

    experiment: str  # file, as named at the start
    metric: str
    mode: Mode
    points: tuple[SweepPoint, ...]

    @classmethod
    def read(cls, sweep: Path) -> Self | None:
        """None where the folder holds no sweep. Raises `UsageError`."""
        path = sweep / RECORD
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UsageError(f"{path} is corrupt ({error}). Start the sweep in another folder.") from error

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def metric_of(experiment: Experiment, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
    """The metric to compare by, and whether its best value is the highest. Raises `UsageError`.

    By default that of the best checkpoint or of early stopping, else the reward or the loss of the run.
    """
    known = metric_names(
        *(experiment.algorithm, experiment.env, experiment.rewards, experiment.data),
        teachers=experiment.teachers,
    )
    stop, checkpointing = experiment.algorithm.early_stop, experiment.checkpointing
    higher: bool | None = None
    if metric is None and checkpointing.metric is not None:
        metric, higher = checkpointing.metric, checkpointing.higher_is_better
    elif metric is None and stop is not None:
        metric, higher = stop.metric, stop.higher_is_better
    elif metric is None:
        metric = next((name for name in _USUAL_METRICS if name in known), min(known))
    if metric not in known:
        raise UsageError(f"--metric {metric}: the runs do not have it; {suggestion(metric, sorted(known))}")
    if higher is None:
        higher = "loss" not in metric
    return metric, mode or ("max" if higher else "min")


def read_states(sweep: Path) -> dict[str, Outcome]:
    try:
        return TypeAdapter(dict[str, Outcome]).validate_json((sweep / STATES).read_bytes())
    except (OSError, ValueError):
        return {}


def write_states(sweep: Path, states: Mapping[str, Outcome]) -> None:
    text = json.dumps({name: asdict(outcome) for name, outcome in states.items()}, indent=1)
    write_atomically(sweep / STATES, text + "\n")


def state_of(run_dir: Path, recorded: Outcome | None = None) -> Outcome:
    """The state of a run by its folder, unless an end was recorded."""
    if holder(run_dir) is not None:
        return Outcome(State.RUNNING)
    if recorded is not None and recorded.state not in (State.WAITING, State.RUNNING):
        return recorded
    starts = read_header(RunPaths(run_dir).header)
    if not starts:
        return Outcome(State.WAITING)
    end = starts[-1].get("end")
    if end is None:  # it was killed
        return Outcome(State.STOPPED)
    return Outcome(State(end["outcome"]), _first_line(end["error"]) if end["outcome"] == "failed" else "")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
