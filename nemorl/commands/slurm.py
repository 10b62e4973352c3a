"""`nemorl slurm`: runs on a Slurm cluster."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nemorl.commands.arguments import add_experiment

HELP = "submit runs to a Slurm cluster, and follow them there"


def add_arguments(parser: ArgumentParser) -> None:
    """One sub-command for each thing that can be done with a job."""
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    help_text = "what a job runs once on each of its nodes (nemorl.sbatch calls it, not you)"
    node = commands.add_parser("node", help=help_text, description=help_text)
    add_experiment(node)
    node.set_defaults(action=_node)


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    return int(arguments.action(arguments))


def _node(arguments: Namespace) -> int:
    from nemorl.slurm.launcher import run_node

    return run_node(Path(arguments.config), arguments.overrides)
