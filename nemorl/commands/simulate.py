"""`nemorl simulate`: the throughput of an experiment on a cluster, before anything starts."""

import json
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from nemorl.config.algorithm import OnlineBase
from nemorl.config.base import counted
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import UsageError
from nemorl.models.shape import ModelShape
from nemorl.plan.calibration import Calibration, load_planned, read_calibration
from nemorl.plan.generation_time import default_lengths
from nemorl.plan.recompute import fitting_recompute
from nemorl.plan.step_time import RunPlan, UnplannedRun

from . import terminal
from .plan import HARDWARE_HELP
from .terminal import Commands, ExitCode, say

if TYPE_CHECKING:
    from nemorl.simulate.simulation import Prediction
    from nemorl.simulate.workload import Workload

_STEPS = 10


def register(commands: Commands) -> None:
    help_text = "predict throughput, idle time and staleness of a run by simulation"
    parser = terminal.add_command(commands, "simulate", _simulate, help_text)
    terminal.add_experiment(parser)
    trace_help = "take lengths and speeds from the folder of a finished run"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="RUN_DIR", help=trace_help)
    hardware_help = f"take speeds from the plan of time (docs/plan_time.md); {HARDWARE_HELP}"
    source.add_argument("--hardware", metavar="NAME_OR_FILE", help=hardware_help)
    gpus_help = "number of devices: those that the policy leaves become engines (generation.replicas)"
    parser.add_argument("--gpus", type=terminal.positive_integer, metavar="N", help=gpus_help)
    steps_help = f"number of measured steps (default: {_STEPS})"
    parser.add_argument(
        "--steps", type=terminal.positive_integer, metavar="N", default=_STEPS, help=steps_help
    )
    failures_help = "mean hours between failures of a device of the engines (default: none fails)"
    parser.add_argument("--failure-hours", type=terminal.positive_number, metavar="HOURS", help=failures_help)
    seed_help = "seed of lengths, delays and failures (default: 0)"
    parser.add_argument("--seed", type=terminal.natural_number, default=0, help=seed_help)
    parser.add_argument("--json", action="store_true", help="print all values as JSON")


def _simulate(arguments: Namespace) -> int:
    shape: ModelShape | None = None
    if arguments.hardware is None:
        experiment = load_experiment(arguments.config, arguments.overrides)
    else:
        experiment, shape = load_planned(arguments.config, arguments.overrides)
    experiment = _on(experiment, arguments.gpus)
    from nemorl.simulate.simulation import predict
    from nemorl.simulate.trace import traced_workload
    from nemorl.simulate.workload import default_workload, planned_workload, with_failures

    source = "from the run" if arguments.trace else "defaults"
    if arguments.trace is not None:
        workload = traced_workload(experiment, arguments.trace)
    elif shape is not None:
        source = f"planned for {arguments.hardware}"
        try:
            workload = planned_workload(_plan(experiment, shape, read_calibration(arguments.hardware)))
        except UnplannedRun as error:
            raise UsageError(str(error)) from error
    else:
        workload = default_workload(experiment)
    if arguments.failure_hours is not None:
        workload = with_failures(workload, experiment, 3600 * arguments.failure_hours)
    began = time.perf_counter()
    prediction = predict(experiment, workload, arguments.seed, arguments.steps)
    seconds = time.perf_counter() - began
    if arguments.json:
        say(json.dumps({"assumptions": dict(workload.assumptions), **asdict(prediction)}, indent=2))
        return ExitCode.WELL
    console = terminal.output()
    console.print(_assumptions(workload, source))
    console.print(_table(experiment, prediction))
    group = prediction.bottleneck
    shares = {what: share for what, share in prediction.shares[group].items() if what != "idle"}
    longest = max(shares, key=lambda what: shares[what])
    waits = {"policy": "the engines wait for the policy", "generation": "the policy waits for the engines"}
    has_source = arguments.trace or arguments.hardware
    hint = "" if has_source else " These are assumptions: give --trace RUN_DIR to take those of a run."
    terminal.notes().print(
        f"bottleneck: {group} ({shares[longest]:.0%} {longest}; {waits[group]}). "
        f"{counted(prediction.steps, 'step')} simulated in {seconds:.1f} s.{hint}",
        markup=False,
    )
    return ExitCode.WELL


def _plan(experiment: Experiment, shape: ModelShape, calibration: Calibration) -> RunPlan:
    hardware = calibration.hardware
    usable = hardware.shared_by(experiment.policy.layout.world_size).usable_bytes
    experiment = fitting_recompute(experiment, shape, usable, hardware)
    return RunPlan(experiment, shape, hardware, default_lengths(experiment), calibration.attained)


def _on(experiment: Experiment, gpus: int | None) -> Experiment:
    """The experiment with as many engines as fit on these devices. Raises UsageError."""
    generation, algorithm = experiment.generation, experiment.algorithm
    if not isinstance(algorithm, OnlineBase):
        raise UsageError(f"algorithm.name = {algorithm.name}: it does not sample, so nothing is simulated")
    if not generation.has_engines or not generation.takes_weights:
        problem = f"generation.backend = {generation.backend}: the simulator requires engines of the run"
        raise UsageError(f"{problem}; see docs/generation.md")
    if gpus is None:
        return experiment
    taken = 0 if generation.shares_devices else experiment.policy.layout.world_size
    replicas = (gpus - taken) // generation.ranks_per_replica
    if replicas < 1:
        needs = f"the policy takes {taken} and an engine {generation.ranks_per_replica}"
        raise UsageError(f"--gpus {gpus}: {needs}; give at least {taken + generation.ranks_per_replica}")
    changed = generation.model_copy(update={"replicas": replicas, "max_replicas": None})
    return experiment.model_copy(update={"generation": changed})


def _assumptions(workload: "Workload", source: str) -> Table:
    result = terminal.table(f"Assumptions ({source})", ["", "value"])
    for name, value in workload.assumptions:
        result.add_row(name, value)
    return result


def _table(experiment: Experiment, prediction: "Prediction") -> Table:
    generation, policy = experiment.generation, experiment.policy
    devices = policy.layout.world_size * (not generation.shares_devices)
    devices += (generation.max_replicas or generation.replicas) * generation.ranks_per_replica
    staleness = getattr(experiment.algorithm, "max_staleness", 0)
    title = f"Prediction: {counted(devices, 'device')}, max_staleness {staleness}"
    result = terminal.table(title, ["", "value"])
    p = prediction
    rows = {
        "step": f"{p.step_seconds:.4g} s, {3600 / p.step_seconds:.4g} steps an hour",
        "trained tokens per second": f"{p.trained_per_second:,.0f}",
        "sampled tokens per second": f"{p.generated_per_second:,.0f}",
        "seconds of a step by stage": ", ".join(f"{n} {s:.4g}" for n, s in p.stages.items() if s >= 5e-4),
    }
    for group, shares in p.shares.items():
        rows[f"time of the {group}"] = ", ".join(f"{n} {s:.1%}" for n, s in shares.items() if s >= 5e-4)
    rows["sequences in an engine that decodes"] = f"{p.sequences:.4g}"
    rows["age of sampled tokens"] = ", ".join(f"{age}: {share:.1%}" for age, share in p.ages.items())
    if any(p.dropped.values()):
        of_step = (f"{n.replace('_', ' ')} {value:.4g}" for n, value in p.dropped.items() if value)
        rows["dropped in a step"] = ", ".join(of_step)
    if p.lost_engines:
        rows["lost engines"] = str(p.lost_engines)
    for name, value in rows.items():
        result.add_row(name, value)
    return result
