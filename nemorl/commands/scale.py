"""`nemorl scale`: change the number of engines of a run while it is going."""

import time
from argparse import Namespace
from pathlib import Path

from nemorl.config.load import load_experiment
from nemorl.errors import RunError, UsageError
from nemorl.observe.run_folder import RunPaths, holder

from .terminal import Commands, ExitCode, add_command, positive_integer, positive_number, say

_POLL_SECONDS = 0.25


def register(commands: Commands) -> None:
    scale = add_command(commands, "scale", _scale, "let engines join or leave a run while it is going")
    scale.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder")
    help_text = "generation replicas that the run is to have"
    scale.add_argument("--replicas", type=positive_integer, required=True, metavar="N", help=help_text)
    help_text = "seconds to wait until they are there (%(default)s); the run continues to try after that"
    scale.add_argument("--wait", type=positive_number, default=600.0, metavar="SECONDS", help=help_text)


def _scale(arguments: Namespace) -> int:
    run_dir, number, paths = arguments.run_dir, arguments.replicas, RunPaths(arguments.run_dir)
    if not paths.config.exists():
        raise UsageError(f"{run_dir} holds no run: {paths.config} is missing; name a run_dir")
    generation = load_experiment(paths.config, []).generation
    least = f"generation.replicas={min(number, generation.replicas)}"
    experiment = load_experiment(paths.config, [least, f"generation.max_replicas={number}"])
    if not experiment.algorithm.generates:
        raise UsageError(f"{run_dir} samples nothing, so that it has no generation replicas")
    if holder(run_dir) is None:
        fix = "set generation.replicas and start it with `nemorl train`"
        raise UsageError(f"{run_dir} is not being run; {fix}")
    from nemorl.run.scaling import ReplicaReport, ScaleRequest, read  # imports Ray

    request, end = ScaleRequest(number), time.monotonic() + arguments.wait
    before = read(ReplicaReport, paths.replicas) or ReplicaReport(0)
    request.send(paths)
    shown = before.replicas
    while True:
        newest, report = read(ScaleRequest, paths.scale_request), read(ReplicaReport, paths.replicas)
        if holder(run_dir) is None:
            raise RunError(f"{run_dir} has ended; `nemorl doctor {run_dir}` shows how")
        if newest is not None and newest.id != request.id:
            raise RunError(f"another `nemorl scale` has asked for {newest.number} generation replicas since")
        if report is not None and report.problem:
            raise RunError(f"{run_dir}: {report.problem}")
        if report is not None and report.request == request.id:
            for name in sorted(shown.keys() | report.replicas.keys(), key=_by_number):
                state = report.replicas.get(name)
                if state != shown.get(name):
                    say(f"{name}: {state or 'left'}")
            if report.complete:
                if report.replicas == before.replicas:
                    say(f"{run_dir} has {number} generation replicas already")
                return ExitCode.WELL
            if report.failed:
                num_up = sum(state.state == "up" for state in report.replicas.values())
                raise RunError(f"{run_dir} continues with {num_up} of {number} generation replicas")
            shown = report.replicas
        if time.monotonic() > end:
            problem = f"{run_dir} does not have {number} generation replicas after {arguments.wait:g} s"
            raise RunError(f"{problem}; it continues to try. `nemorl doctor {run_dir}` shows its state.")
        time.sleep(_POLL_SECONDS)


def _by_number(name: str) -> int:
    return int(name.rpartition(" ")[2])
