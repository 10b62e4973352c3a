"""`nemorl slurm`: submit runs to a Slurm cluster, and follow them there."""

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, NemorlError
from nemorl.plan.machine import Machine

from .check import prepare
from .terminal import ExitCode, add_experiment, notes, output, plan_table, say, table

if TYPE_CHECKING:
    from nemorl.slurm.submission import Options

WIDE = 100_000  # columns, where the output is not a terminal
HELP = "submit runs to a Slurm cluster, and follow them there"


def add_arguments(parser: ArgumentParser) -> None:
    """Add one sub-command for each thing to do with a job."""
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)

    def add(name: str, action: Any, help_text: str) -> ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.set_defaults(action=action)
        return command

    _add_submit_arguments(add("submit", _submit, "check an experiment and submit it to Slurm"))
    status = add("status", _status, "show the state of submitted runs")
    logs = add("logs", _logs, "show the output of a submitted run")
    attach = add("attach", _attach, "open a shell, or run a command, on a node of a running job")
    cancel = add("cancel", _cancel, "stop a job after its current step, and wait for its end")
    add_experiment(add("node", _node, "run the launcher on a node of a job (used by nemorl.sbatch)"))

    for command, nargs in ((status, "+"), (logs, None), (attach, None), (cancel, None)):
        run_help = "experiment file as it was submitted, or its run folder"
        command.add_argument("run", type=Path, metavar="CONFIG|RUN_DIR", help=run_help, nargs=nargs)
    name_help = "a rank (policy-0), a node (n1) or `job`; see --list"
    logs.add_argument("name", nargs="?", default="job", help=name_help)
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing new output")
    logs.add_argument(
        "-n",
        "--lines",
        type=int,
        default=100,
        metavar="N",
        help="number of last lines to print (default: 100)",
    )
    logs.add_argument("--list", action="store_true", help="list the logs")
    attach.add_argument("words", nargs="*", metavar="-- COMMAND", help="command to run instead of a shell")
    attach.add_argument("--node", metavar="NAME", help="node to attach to (default: the head)")


def _add_submit_arguments(parser: ArgumentParser) -> None:
    add_experiment(parser)

    def add(name: str, metavar: str, help_text: str, **options: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help_text, **options)

    add("--nodes", "N", "number of nodes (default: cluster.num_nodes)", type=_count)
    add("--gpus-per-node", "N", "GPUs of each node (default: cluster.gpus_per_node)", type=int)
    cpu_help = "additional nodes without GPUs, for rollout workers and environments (a heterogeneous job)"
    add("--cpu-nodes", "N", cpu_help, type=_count, default=0)
    add("--time", "LIMIT", "time limit, such as 30 (minutes) or 1-12:00:00")
    add("--partition", "NAME", "partition of the nodes")
    add("--cpu-partition", "NAME", "partition of the CPU nodes (default: --partition)")
    add("--account", "NAME", "account to charge the job to")
    add("--container", "IMAGE", "image to run in, through pyxis (default: the environment of this command)")
    add("--mounts", "LIST", "folders to mount into the container: /data:/data,/models:/models")
    sweep_help = "run a task for each value; given several times, for each combination of values"
    add("--sweep", "FIELD=A,B", sweep_help, action="append", default=[])
    add("--at-once", "N", "maximum number of tasks of a sweep that run at the same time", type=_count)
    sbatch_help = "any other option of sbatch, such as --sbatch=--qos=high; can be given several times"
    add("--sbatch", "OPTION", sbatch_help, action="append", default=[])
    add("--cpu-sbatch", "OPTION", "the same for the CPU nodes", action="append", default=[])
    parser.add_argument("--resume", action="store_true", help="continue the run in the run folder")
    parser.add_argument("--dry-run", action="store_true", help="print script and command; submit nothing")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text}: expected an integer of at least 1")
    return int(text)


def run(arguments: Namespace) -> int:
    """Run the sub-command. Raises `NemorlError`."""
    return int(arguments.action(arguments))


def _submit(arguments: Namespace) -> int:
    from nemorl.slurm import submission as slurm
    from nemorl.slurm.status import status_rows

    container = arguments.container or os.environ.get("NEMORL_CONTAINER")
    container = slurm.resolve_image(container) if container else None
    tasks = slurm.sweep_tasks(arguments.sweep) if arguments.sweep else []
    if tasks:
        run_dir = load_experiment(arguments.config, arguments.overrides).run_dir
        own = [[*task.overrides, f"run_dir={task.run_dir(run_dir)}"] for task in tasks]
        experiments = [_check(arguments, own[task.index], show=task.index == 0) for task in tasks]
    else:
        experiments = [_check(arguments, [], show=True)]
        run_dir = experiments[0].run_dir
    run_dirs = [experiment.run_dir for experiment in experiments]
    options = _options(arguments, experiments[0])
    submission = slurm.prepare_submission(
        run_dir,
        options,
        run_dirs,
        container=container,
        mounts=arguments.mounts,
        is_sweep=bool(tasks),
        resume_options=_resume_options(arguments, options, container),
    )
    if arguments.dry_run:
        say(slurm.SCRIPT.read_text(encoding="utf-8"))
        say(f"# {submission}")
        return ExitCode.WELL
    files = slurm.config_files(run_dir, experiments, is_sweep=bool(tasks))
    if tasks:
        files[run_dir / "tasks.tsv"] = slurm.sweep_table(tasks, run_dir)
    with slurm.lock_run_folder(run_dir):
        for folder in dict.fromkeys([run_dir, *run_dirs]):
            earlier = slurm.latest_submission(folder)
            if earlier and any(row.is_active for row in status_rows(folder)):
                raise NemorlError(
                    f"run_dir = {folder}: job {earlier.job}, submitted at {earlier.submitted}, uses this "
                    f"folder and has not ended. Cancel it with `nemorl slurm cancel {folder}`, or set "
                    "another run_dir."
                )
        with slurm.write_files(files):
            submission = submission.submit()
        submission.record(run_dir)
    sweep = f", {len(tasks)} tasks, listed in {run_dir / 'tasks.tsv'}" if tasks else ""
    say(f"submitted: job {submission.job}{sweep}")
    say(f"command: {submission}")
    say(f"run: {run_dir}")
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
    image = arguments.container or os.environ.get("NEMORL_CONTAINER")
    elsewhere = Machine(sys.maxsize, sys.maxsize, None, gpus=(), same_packages=not image)
    ready = prepare(
        arguments.config,
        overrides,
        elsewhere,
        new_run=not arguments.resume,
        resumes=arguments.resume,
        where="elsewhere",
    )
    sizes = _options(arguments, ready.experiment).node_sizes()
    if sizes and (refused := list(capacity_problems(ready.experiment, sizes))):
        raise ConfigError(str(arguments.config), refused)
    if show:
        notes().print(plan_table(ready.plan))
    return ready.experiment


def _options(arguments: Namespace, experiment: Experiment) -> "Options":
    from nemorl.slurm.submission import Options

    cluster = experiment.cluster
    return Options(
        nodes=cluster.num_nodes - arguments.cpu_nodes,
        gpus_per_node=cluster.gpus_per_node,
        cpu_nodes=arguments.cpu_nodes,
        time=arguments.time,
        partition=arguments.partition,
        cpu_partition=arguments.cpu_partition,
        account=arguments.account,
        at_once=arguments.at_once,
        sbatch=tuple(arguments.sbatch),
        cpu_sbatch=tuple(arguments.cpu_sbatch),
    )


def _resume_options(arguments: Namespace, options: "Options", container: str | None) -> list[str]:
    """Options of this command that the configuration in the run folder does not hold."""
    given = {
        "nodes": options.nodes,
        "cpu-nodes": options.cpu_nodes or None,
        "time": options.time,
        "partition": options.partition,
        "cpu-partition": options.cpu_partition,
        "account": options.account,
        "container": container,
        "mounts": arguments.mounts,
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += [f"--sbatch={option}" for option in options.sbatch]
    return words + [f"--cpu-sbatch={option}" for option in options.cpu_sbatch]


def _status(arguments: Namespace) -> int:
    from nemorl.slurm.status import status_rows

    lines = table("", ["job", "state", "nodes", "step", "restarts", "run", "reason"])
    for row in (row for run in arguments.run for row in status_rows(_run_dir(run))):
        cells = (row.job, row.state, row.nodes, row.step, str(row.restarts), str(row.run_dir), row.reason)
        lines.add_row(*map(Text, cells))
    console = output()
    if not console.is_terminal:  # a program that reads the lines needs them whole
        console.width = WIDE
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
        raise NemorlError(f"{run_dir} has no log {arguments.name}; it has {', '.join(found) or 'none yet'}.")
    return show_log(found[arguments.name], lines=arguments.lines, follow=arguments.follow)


def _attach(arguments: Namespace) -> int:
    from nemorl.slurm.status import attach

    return attach(_run_dir(arguments.run), arguments.words, arguments.node)


def _cancel(arguments: Namespace) -> int:
    from nemorl.slurm.records import newest_step
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
    """The run folder itself, or that of an experiment file."""
    return path if path.is_dir() else load_experiment(path).run_dir
