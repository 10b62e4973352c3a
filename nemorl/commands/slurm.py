"""`nemorl slurm`: runs on a Slurm cluster."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.text import Text

from nemorl.commands import slurm_submit
from nemorl.commands.terminal import output, say, table
from nemorl.config.load import load_experiment
from nemorl.errors import NemorlError

from .terminal import ExitCode, add_experiment

WIDE = 100_000
HELP = "submit runs to a Slurm cluster, and follow them there"


def add_arguments(parser: ArgumentParser) -> None:
    """One sub-command for each thing that can be done with a job."""
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    slurm_submit.add_arguments(
        commands.add_parser("submit", help=slurm_submit.HELP, description=slurm_submit.HELP)
    )
    _add_status(commands.add_parser("status", help=_STATUS, description=_STATUS))
    _add_logs(commands.add_parser("logs", help=_LOGS, description=_LOGS))
    _add_attach(commands.add_parser("attach", help=_ATTACH, description=_ATTACH))
    _add_cancel(commands.add_parser("cancel", help=_CANCEL, description=_CANCEL))
    node = commands.add_parser("node", help=_NODE, description=_NODE)
    add_experiment(node)
    node.set_defaults(action=_node)


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    return int(arguments.action(arguments))


_STATUS = "say where submitted runs stand"
_LOGS = "show what a submitted run said"
_ATTACH = "open a shell, or run a command, on a node of a running job"
_CANCEL = "end a job, wait for it, and say what became of it"
_NODE = "what a job runs once on each of its nodes (nemorl.sbatch calls it, not you)"


def _add_run(parser: ArgumentParser, **options: str) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="CONFIG|RUN_DIR",
        help="experiment file as it was submitted, or its run folder",
        **options,  # type: ignore[arg-type]
    )


def _add_status(parser: ArgumentParser) -> None:
    _add_run(parser, nargs="+")
    parser.set_defaults(action=_status)


def _add_logs(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "name",
        nargs="?",
        default="job",
        help="a rank (policy-0), a node (n1) or `job`; see --list",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on showing what comes")
    parser.add_argument("-n", "--lines", type=int, default=100, metavar="N", help="lines from the end, 100")
    parser.add_argument("--list", action="store_true", help="say what logs there are")
    parser.set_defaults(action=_logs)


def _add_attach(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("words", nargs="*", metavar="-- COMMAND", help="instead of a shell")
    parser.add_argument("--node", metavar="NAME", help="which node; the head if not given")
    parser.set_defaults(action=_attach)


def _add_cancel(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.set_defaults(action=_cancel)


def _node(arguments: Namespace) -> int:
    from nemorl.slurm.launcher import run_node

    return run_node(arguments.config, arguments.overrides)


def _status(arguments: Namespace) -> int:
    from nemorl.slurm.status import rows

    lines = table("", ["job", "state", "nodes", "step", "restarts", "run", "why"])
    for run_dir in map(_run_dir, arguments.run):
        for row in rows(run_dir):
            cells = (row.job, row.state, row.nodes, row.step, str(row.restarts), str(row.run_dir), row.why)
            lines.add_row(*map(Text, cells))
    console = output()
    # A program that reads the lines wants whole ones.
    console.print(lines, soft_wrap=False, width=None if console.is_terminal else WIDE)
    return ExitCode.WELL


def _logs(arguments: Namespace) -> int:
    from nemorl.slurm.status import logs
    from nemorl.slurm.view import show_log

    run_dir = _run_dir(arguments.run)
    found = logs(run_dir)
    if arguments.list:
        for name, path in found.items():
            say(f"{name}: {path}")
        return ExitCode.WELL
    if arguments.name not in found:
        names = ", ".join(found) or "none yet"
        raise NemorlError(f"{arguments.name} is no log of {run_dir}; there are {names}")
    return show_log(found[arguments.name], lines=arguments.lines, follow=arguments.follow)


def _attach(arguments: Namespace) -> int:
    from nemorl.slurm.view import attach

    return attach(_run_dir(arguments.run), arguments.words, arguments.node)


def _cancel(arguments: Namespace) -> int:
    from nemorl.slurm.records import newest_step
    from nemorl.slurm.status import submitted
    from nemorl.slurm.view import cancel

    for row in cancel(_run_dir(arguments.run)):
        step = newest_step(row.run_dir)
        kept = f"its newest checkpoint is of step {step}" if step else "it has no checkpoint"
        say(f"{row.job}: {row.state.lower()}; {kept}" + (f" ({row.why})" if row.why else ""))
        if row.state != "COMPLETED":
            say(f"to go on: {submitted(row.run_dir).again}")
    return ExitCode.WELL


def _run_dir(path: Path) -> Path:
    """The run folder itself, or that of an experiment file."""
    return path if path.is_dir() else load_experiment(path).run_dir
