"""`nemorl check`: every problem of experiment files before they start."""

import json
import os
from argparse import Namespace
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.load import ORIGIN as COMMAND_LINE
from nemorl.errors import ConfigError, UsageError
from nemorl.plan.machine import read_machine
from nemorl.run.inspection import Inspected, Ready, Weights, Where, inspect
from nemorl.run.verdict import report_json, staleness_remarks

from .terminal import Commands, ExitCode, add_command, complain, notes, plan_table, say


def register(commands: Commands) -> None:
    check = add_command(commands, "check", _check, "check experiment files and list all problems")
    words_help = (
        "experiment files (YAML) or names of `nemorl recipes list`, and fields to set in each of them"
    )
    check.add_argument("words", nargs="+", metavar="CONFIG|a.b=value", help=words_help)
    here_help = "treat missing GPUs, nodes and servers as errors, since the run will start on this machine"
    check.add_argument("--here", action="store_true", help=here_help)
    json_help = "print problems, remarks and the memory plan of each file as JSON, with sizes in bytes"
    check.add_argument("--json", action="store_true", help=json_help)
    weights_help = "plan from config.json: of models on the hub only that is downloaded, and weights, "
    weights_help += "tokenizers and data that are not on this machine are listed as not verified"
    check.add_argument("--no-weights", action="store_true", help=weights_help)


def _check(arguments: Namespace) -> int:
    overrides = [word for word in arguments.words if "=" in word and not os.path.exists(word)]
    paths = [Path(word) for word in arguments.words if word not in overrides]
    if not paths:
        raise UsageError(f"{', '.join(overrides)}: name the experiment file in which to set these fields")
    machine, code = read_machine(), ExitCode.WELL
    where: Where = "here" if arguments.here else "unknown"
    weights: Weights = "absent" if arguments.no_weights else "required"
    reports = []
    for path in paths:
        try:
            found = inspect(path, overrides, machine, where=where, weights=weights)
            error = ConfigError(str(path), found.loaded.problems) if found.loaded.problems else None
        except ConfigError as refused:
            if refused.source == COMMAND_LINE:  # which is the same for every file
                raise
            found, error = None, refused
        code = code if error is None else ExitCode.REFUSED
        if arguments.json:
            reports.append({"file": str(path), **report_json(path, found, error)})
        elif error is not None:
            complain(str(error))
        elif found is not None and found.plan is not None:
            remarks = (f"  {p.field} = {p.value}: {p.fix}" for p in found.remarks)
            lines = (*describe_unverified(found), *remarks, *_staleness_lines(found.loaded.experiment))
            say("\n".join([f"{path}: OK", *lines]))
            notes().print(plan_table(found.plan))
    if arguments.json:
        say(json.dumps(reports, indent=2, ensure_ascii=False))
    return code


def describe_unverified(ready: "Ready | Inspected") -> list[str]:
    later = "will be verified on the target machine"
    return [f"  {p.field} = {p.value}: {later} ({p.fix.partition(';')[0]})" for p in ready.unverified]


def _staleness_lines(experiment: Experiment | None) -> list[str]:
    return [f"  {field} = {value}: {fix}" for field, value, fix in staleness_remarks(experiment)]
