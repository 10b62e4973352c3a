"""The verdict of the checks on an experiment as JSON, and what is allowed but hardly meant."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemorl.config import shipped
from nemorl.config.algorithm import OnlineBase, OnlineConfig
from nemorl.config.experiment import Experiment
from nemorl.errors import ABSENT, ConfigError, Problem
from nemorl.plan.memory import MEMORY_PARTS

from .inspection import Inspected


def report_json(file: Path, found: Inspected | None, error: ConfigError | None) -> dict[str, Any]:
    """What `nemorl check --json` prints of a file; `found` is None where it cannot be read.

    Problems have `field`, `value` (null where it is not given), `fix`, `origin` (`file:line`, `command line`,
    `default` or empty) and `line`, null unless it is one of the file that was named. Memory is in bytes.
    """
    problems = error.problems if error is not None else ()
    report: dict[str, Any] = {"ok": error is None, "problems": [problem_json(p, file) for p in problems]}
    if found is None:
        return report | {"unverified": [], "remarks": [], "memory": []}
    meant = () if error is not None else staleness_remarks(found.loaded.experiment)
    remarks = [*found.remarks, *(Problem(*line) for line in meant)]
    report["unverified"] = [problem_json(p, file) for p in found.unverified]
    report["remarks"] = [problem_json(p, file) for p in remarks]
    report["memory"] = [
        {
            **{"group": p.group, "processes": p.count, "on_device": p.on_device, "total": p.total},
            "parts": {part: size for part in MEMORY_PARTS if (size := getattr(p, part))},
        }
        for p in (found.plan.processes if found.plan else ())
    ]
    return report


def problem_json(problem: Problem, file: Path) -> dict[str, Any]:
    """One of the problems of `report_json`."""
    value = None if problem.value is ABSENT else problem.value
    of_file, _, number = problem.origin.rpartition(":")
    line = int(number) if of_file == str(shipped.locate(file)) and number.isdecimal() else None
    plain = json.loads(json.dumps(value, default=str))
    return {
        "field": problem.field,
        "value": plain,
        "fix": problem.fix,
        "origin": problem.origin,
        "line": line,
    }


def staleness_remarks(experiment: Experiment | None) -> Iterator[tuple[str, int, str]]:
    """What is allowed, but hardly meant."""
    algorithm = experiment.algorithm if experiment else None
    if not isinstance(algorithm, OnlineBase) or not (age := algorithm.max_staleness):
        return
    lines = []
    if age >= algorithm.num_steps:
        lines.append(f"its first weights may sample all {algorithm.num_steps} steps; 1 to 8 is usual")
    if isinstance(algorithm, OnlineConfig) and age > 1 and not algorithm.corrects_age:
        lines.append("nothing weights samples by their age; set algorithm.correction.name")
    yield from (("algorithm.max_staleness", age, f"{line} (docs/asynchronous.md)") for line in lines)
