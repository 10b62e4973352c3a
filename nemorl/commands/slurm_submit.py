"""`nemorl slurm submit`: check an experiment and hand it to Slurm."""

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.commands.terminal import notes, plan_table, say
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, NemorlError
from nemorl.plan.machine import Machine

from .check import prepare
from .terminal import ExitCode, add_experiment

if TYPE_CHECKING:
    from nemorl.slurm.submission import Options, Submission

HELP = "check an experiment and hand it to Slurm"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    add_experiment(parser)
    parser.add_argument(
        "--nodes", type=_count, metavar="N", help="nodes; cluster.num_nodes of the experiment if not given"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs of each node; cluster.gpus_per_node of the experiment if not given",
    )
    parser.add_argument(
        "--cpu-nodes",
        type=_count,
        default=0,
        metavar="N",
        help="further nodes without GPUs, for rollout workers and environments (a heterogeneous job)",
    )
    parser.add_argument("--time", metavar="LIMIT", help="time limit, such as 30 (minutes) or 1-12:00:00")
    parser.add_argument("--partition", metavar="NAME", help="partition of the nodes")
    parser.add_argument(
        "--cpu-partition", metavar="NAME", help="partition of the CPU nodes; that of the others if not given"
    )
    parser.add_argument("--account", metavar="NAME", help="whom the job is charged to")
    parser.add_argument(
        "--container", metavar="IMAGE", help="image to run in, by pyxis; else this environment"
    )
    parser.add_argument(
        "--mounts", metavar="LIST", help="folders for the container: /data:/data,/models:/models"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="a task for each value, or combination of values where this is given several times",
    )
    parser.add_argument(
        "--at-once", type=_count, metavar="N", help="at most so many tasks of a sweep at a time"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any further option of sbatch, such as --sbatch=--qos=high; can be given several times",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run that the run folder holds already"
    )
    parser.add_argument(
        "--cpu-sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="the same for the CPU nodes, which are a component of their own",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command, and submit nothing")
    parser.set_defaults(action=_submit)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text}: give a number from 1")
    return int(text)


def _submit(arguments: Namespace) -> int:
    from nemorl.slurm import submission as slurm
    from nemorl.slurm.status import rows
    from nemorl.slurm.sweep import table as task_table
    from nemorl.slurm.sweep import tasks

    container = arguments.container or os.environ.get("NEMORL_CONTAINER")
    container = slurm.image(container) if container else None
    found = tasks(arguments.sweep) if arguments.sweep else []
    whole = load_experiment(arguments.config, arguments.overrides) if found else None
    experiments: list[Experiment] = []
    for task in found:
        assert whole is not None
        own = [*task.overrides, f"run_dir={task.run_dir(whole.run_dir)}"]
        experiments.append(_checked(arguments, own, shown=not experiments))
    if not found:
        experiments.append(_checked(arguments, [], shown=True))
    first = whole or experiments[0]
    options = _options(arguments, experiments[0])
    submission = slurm.submission(
        first,
        options,
        [experiment.run_dir for experiment in experiments],
        container=container,
        mounts=arguments.mounts,
        sweep=bool(found),
        again=_again(arguments, options, container),
    )
    if arguments.dry_run:
        say(slurm.SCRIPT.read_text(encoding="utf-8"))
        say(f"# {submission}")
        return ExitCode.WELL
    with slurm.alone(first.run_dir):
        for folder in (first.run_dir, *(task.run_dir(first.run_dir) for task in found)):
            if earlier := slurm.latest(folder):
                _refuse_if_active(earlier, [row.state for row in rows(folder)], folder)
        slurm.write_configs(first.run_dir, experiments, sweep=bool(found))
        if found:
            lines = "\n".join(task_table(found, first.run_dir))
            (first.run_dir / "tasks.tsv").write_text(lines + "\n", encoding="utf-8")
        submission = submission.submit()
        submission.keep(first.run_dir)
    _tell(arguments.config, first, submission)
    return ExitCode.WELL


def _checked(arguments: Namespace, own: Sequence[str], *, shown: bool) -> Experiment:
    """An experiment that nothing speaks against, on the nodes that are asked for. Raises `ConfigError`."""
    from nemorl.slurm.requirements import no_room, rooms_asked

    words = [*arguments.overrides, *own]
    nodes = arguments.nodes
    if nodes is None and arguments.cpu_nodes:
        nodes = load_experiment(arguments.config, words).cluster.num_nodes
    if nodes is not None:
        words.append(f"cluster.num_nodes={nodes + arguments.cpu_nodes}")
    if arguments.gpus_per_node is not None:
        words.append(f"cluster.gpus_per_node={arguments.gpus_per_node}")
    # What this machine has says nothing about the nodes, nor its packages about an image.
    image = arguments.container or os.environ.get("NEMORL_CONTAINER")
    elsewhere = Machine(sys.maxsize, sys.maxsize, None, gpus=(), same_packages=not image)
    ready = prepare(
        arguments.config,
        words,
        elsewhere,
        new_run=not arguments.resume,
        resumes=arguments.resume,
        where="elsewhere",
    )
    rooms = rooms_asked(_options(arguments, ready.experiment))
    if refused := list(no_room(ready.experiment, rooms)) if rooms else []:
        raise ConfigError(str(arguments.config), refused)
    if shown:
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
        more=tuple(arguments.sbatch),
        cpu_more=tuple(arguments.cpu_sbatch),
    )


def _again(arguments: Namespace, options: "Options", container: str | None) -> list[str]:
    """What is not in the configuration that is kept, as words for this command."""
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
    words += [f"--sbatch={option}" for option in options.more]
    return words + [f"--cpu-sbatch={option}" for option in options.cpu_more]


def _refuse_if_active(earlier: "Submission", states: Sequence[str], run_dir: Path) -> None:
    from nemorl.slurm.jobs import ACTIVE

    if any(state in ACTIVE for state in states):
        raise NemorlError(
            f"run_dir = {run_dir}: job {earlier.job} of {earlier.submitted} is for this folder and not over. "
            f"End it with `nemorl slurm cancel {run_dir}`, or name another run_dir."
        )


def _tell(config: Path, experiment: Experiment, submission: "Submission") -> None:
    count = f"{len(submission.run_dirs)} tasks, listed in {experiment.run_dir / 'tasks.tsv'}"
    say(f"submitted: job {submission.job}" + (f", {count}" if submission.tasks else ""))
    say(f"command: {submission}")
    say(f"run: {experiment.run_dir}")
    word = experiment.run_dir if experiment.run_dir.is_dir() else config
    say(f"next: nemorl slurm status|logs|attach|cancel {shlex.quote(str(word))}")
