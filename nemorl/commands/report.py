"""`nemorl report`: write the report of a run again."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nemorl.commands.terminal import say

HELP = "write the report of a run again from its files"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    from nemorl.observe.report import write_report  # Plotly

    say(f"report: {write_report(arguments.run_dir)}")
    return 0
