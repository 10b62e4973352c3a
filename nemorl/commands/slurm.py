"""`nemorl slurm`: submit runs to a Slurm cluster and follow them."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.sweep import SweepPoint, is_sweep_file
from nemorl.errors import ConfigError, UsageError
from nemorl.observe.sweep import RECORD, SweepRecord, metric_of
from nemorl.plan.machine import Machine
from nemorl.run.inspection import prepare

from . import terminal
from .terminal import (
    Commands,
    ExitCode,
    add_command,
    add_experiment,
    natural_number,
    positive_integer,
    say,
)

if TYPE_CHECKING:
    from nemorl.slurm.submission import Options


def register(commands: Commands) -> None:
    group = terminal.add_group(commands, "slurm", "submit runs to a Slurm cluster and follow them")
    submit = add_command(group, "submit", _submit, "check an experiment and submit it to Slurm")
    _add_submit_arguments(submit)
    status = add_command(group, "status", _status, "show the state of submitted runs")
    logs = add_command(group, "logs", _logs, "print a log of a submitted run")
    attach_help = "open a shell, or run a command, on a node of a running job"
    attach = add_command(group, "attach", _attach, attach_help)
    cancel_help = "stop a job after its current step and wait until it has ended"
    cancel = add_command(group, "cancel", _cancel, cancel_help)
    node_help = "run the launcher on a node of a job (used by nemorl.sbatch)"
    add_experiment(add_command(group, "node", _node, node_help))

    for command, nargs in ((status, "+"), (logs, None), (attach, None), (cancel, None)):
        run_help = "run folder, or experiment that was submitted"
        command.add_argument("run", type=Path, metavar="CONFIG|RUN_DIR", help=run_help, nargs=nargs)
    name_help = "log of the job (`job`, the default), of a rank (`policy-0`) or of a node; see --list"
    logs.add_argument("name", nargs="?", default="job", metavar="NAME", help=name_help)
    logs.add_argument("-f", "--follow", action="store_true", help="continue printing new output")
    lines_help = "number of last lines to print (default: 100)"
    logs.add_argument("-n", "--lines", type=int, default=100, metavar="N", help=lines_help)
    logs.add_argument("--list", action="store_true", help="list the logs")
    attach.add_argument("words", nargs="*", metavar="-- COMMAND", help="command to run instead of a shell")
    attach.add_argument("--node", metavar="NAME", help="node to attach to (default: the first)")


def _add_submit_arguments(parser: ArgumentParser) -> None:
    add_experiment(parser)

    def add(name: str, metavar: str, help_text: str, **options: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help_text, **options)

    add("--nodes", "N", "number of nodes (default: cluster.num_nodes)", type=positive_integer)
    add("--gpus-per-node", "N", "GPUs per node (default: cluster.gpus_per_node)", type=int)
    cpu_help = "additional nodes without GPUs, for rollout workers and environments (a heterogeneous job)"
    add("--cpu-nodes", "N", cpu_help, type=positive_integer, default=0)
    add("--time", "LIMIT", "time limit, such as 30 (minutes) or 1-12:00:00")
    add("--partition", "NAME", "partition of the nodes")
    add("--cpu-partition", "NAME", "partition of the CPU nodes (default: --partition)")
    add("--account", "NAME", "account to charge")
    add("--container", "IMAGE", "container image, through pyxis (default: the environment of this command)")
    add("--mounts", "LIST", "folders to mount into the container, such as /data:/data,/models:/models")
    sweep_help = "run one task per value; given several times, one per combination of values (docs/sweeps.md)"
    add("--sweep", "FIELD=A,B", sweep_help, action="append", default=[])
    random_help = "number of random points of the sweep, instead of all combinations"
    add("--random", "N", random_help, type=positive_integer)
    add("--seed", "S", "seed of the random points", type=natural_number)
    at_once_help = "maximum number of tasks of a sweep that run at the same time"
    add("--at-once", "N", at_once_help, type=positive_integer)
    sbatch_help = "further option of sbatch, such as --sbatch=--qos=high; can be given several times"
    add("--sbatch", "OPTION", sbatch_help, action="append", default=[])
    add("--cpu-sbatch", "OPTION", "like --sbatch, for the CPU nodes", action="append", default=[])
    parser.add_argument("--resume", action="store_true", help="continue the run in the run folder")
    dry_run_help = "print the script and the command without submitting"
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)


def _submit(arguments: Namespace) -> int:
    from nemorl.slurm import submission as slurm
    from nemorl.slurm.status import status_rows

    if container := arguments.container or os.environ.get("NEMORL_CONTAINER"):
        arguments.container = slurm.resolve_image(container)
    tasks: Sequence[SweepPoint] = ()
    if arguments.sweep or is_sweep_file(arguments.config):
        sweep = slurm.sweep_tasks(arguments.config, arguments.sweep, arguments.random, arguments.seed)
        tasks, arguments.config = sweep.points, sweep.experiment
        arguments.at_once = arguments.at_once or sweep.max_concurrent
        run_dir = sweep.dir or load_experiment(arguments.config, arguments.overrides).run_dir
        own = [[*task.overrides, f"run_dir={task.run_dir(run_dir)}"] for task in tasks]
        experiments = [_check(arguments, own[task.index], show=task.index == 0) for task in tasks]
    else:
        experiments = [_check(arguments, [], show=True)]
        run_dir = experiments[0].run_dir
    run_dirs = [experiment.run_dir for experiment in experiments]
    options = _options(arguments, experiments[0])
    submission = slurm.prepare_submission(run_dir, options, run_dirs, is_sweep=bool(tasks))
    if arguments.dry_run:
        say(slurm.SCRIPT.read_text(encoding="utf-8"))
        say(f"# {submission}")
        return ExitCode.WELL
    files = slurm.config_files(run_dir, experiments, is_sweep=bool(tasks))
    if tasks:
        files[run_dir / "tasks.tsv"] = slurm.sweep_table(tasks, run_dir)
        metric, mode = metric_of(experiments[0], sweep.metric, sweep.mode)
        record = SweepRecord(str(arguments.config), metric, mode, sweep.points)
        files[run_dir / RECORD] = record.text()  # for `nemorl report`
    with slurm.lock_run_folder(run_dir):
        for folder in dict.fromkeys([run_dir, *run_dirs]):
            earlier = slurm.latest_submission(folder)
            if earlier and any(row.is_active for row in status_rows(folder)):
                job = f"job {earlier.job}, submitted at {earlier.submitted},"
                fix = f"Cancel it with `nemorl slurm cancel {folder}`, or set another run_dir."
                raise UsageError(f"run_dir = {folder}: {job} uses this folder and has not ended. {fix}")
        with slurm.write_files(files):
            submission = submission.submit()
        submission.record(run_dir)
    listed = f", {len(tasks)} tasks, listed in {run_dir / 'tasks.tsv'}" if tasks else ""
    say(f"submitted: job {submission.job}{listed}\ncommand: {submission}\nrun: {run_dir}")
    say(f"next: nemorl slurm status|logs|attach|cancel {shlex.quote(str(run_dir))}")
    return ExitCode.WELL


def _check(arguments: Namespace, own: Sequence[str], *, show: bool) -> Experiment:
    """Check an experiment on the requested nodes; `own` are the overrides of a task. Raises `ConfigError`."""
    from nemorl.slurm.requirements import capacity_problems

    overrides = [*arguments.overrides, *own]
    nodes = arguments.nodes
    if nodes is None and arguments.cpu_nodes:
        nodes = load_experiment(arguments.config, overrides).cluster.num_nodes
    if nodes is not None:
        overrides.append(f"cluster.num_nodes={nodes + arguments.cpu_nodes}")
    if arguments.gpus_per_node is not None:
        overrides.append(f"cluster.gpus_per_node={arguments.gpus_per_node}")
    # This machine's resources are not those of the nodes, nor its packages those of an image.
    elsewhere = Machine(sys.maxsize, sys.maxsize, None, gpus=(), same_packages=not arguments.container)
    start = {"new_run": not arguments.resume, "resumes": arguments.resume}
    ready = prepare(arguments.config, overrides, elsewhere, **start, where="elsewhere")
    sizes = _options(arguments, ready.experiment).node_sizes()
    if sizes and (refused := list(capacity_problems(ready.experiment, sizes))):
        raise ConfigError(str(arguments.config), refused)
    if show:
        terminal.notes().print(terminal.plan_table(ready.plan))
    return ready.experiment


def _options(arguments: Namespace, experiment: Experiment) -> "Options":
    from nemorl.slurm.submission import Options

    same = ("cpu_nodes", "time", "partition", "cpu_partition", "account", "container", "mounts", "at_once")
    return Options(
        nodes=experiment.cluster.num_nodes - arguments.cpu_nodes,
        gpus_per_node=experiment.cluster.gpus_per_node,
        sbatch=tuple(arguments.sbatch),
        cpu_sbatch=tuple(arguments.cpu_sbatch),
        stop_seconds=experiment.checkpointing.stop_seconds,
        **{name: getattr(arguments, name) for name in same},
    )


def _status(arguments: Namespace) -> int:
    from nemorl.slurm.status import status_rows

    lines = terminal.table("", ["job", "state", "nodes", "step", "restarts", "run", "reason"])
    for row in (row for run in arguments.run for row in status_rows(_run_dir(run))):
        cells = (row.job, row.state, row.nodes, row.step, str(row.restarts), str(row.run_dir), row.reason)
        lines.add_row(*map(Text, cells))
    console = terminal.output()
    if not console.is_terminal:  # a program that reads the lines needs them whole
        console.width = terminal.WIDE
    console.print(lines, soft_wrap=False)
    return ExitCode.WELL


def _logs(arguments: Namespace) -> int:
    from nemorl.slurm.status import find_logs, show_log

    run_dir = _run_dir(arguments.run)
    found = find_logs(run_dir)
    if arguments.list:
        for name, path in found.items():
            say(f"{name}: {path}")
        return ExitCode.WELL
    if arguments.name not in found:
        raise UsageError(f"{run_dir} has no log {arguments.name}; it has {', '.join(found) or 'none yet'}.")
    return show_log(found[arguments.name], lines=arguments.lines, follow=arguments.follow)


def _attach(arguments: Namespace) -> int:
    from nemorl.slurm.status import attach

    return attach(_run_dir(arguments.run), arguments.words, arguments.node)


def _cancel(arguments: Namespace) -> int:
    from nemorl.slurm.start import newest_step
    from nemorl.slurm.status import cancel, find_submission

    for row in cancel(_run_dir(arguments.run)):
        step = newest_step(row.run_dir)
        checkpoint = f"newest checkpoint: step {step}" if step else "no checkpoint"
        reason = f" ({row.reason})" if row.reason and row.state != "CANCELLED" else ""
        say(f"{row.job}: {row.state.lower()}; {checkpoint}{reason}")
        if row.state != "COMPLETED":
            say(f"continue with: {find_submission(row.run_dir).resume_command}")
    return ExitCode.WELL


def _node(arguments: Namespace) -> int:
    from nemorl.slurm.launcher import run_node

    return run_node(arguments.config, arguments.overrides)


def _run_dir(path: Path) -> Path:
    return path if path.is_dir() else load_experiment(path).run_dir
