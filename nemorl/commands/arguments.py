"""Arguments that several commands take."""

from argparse import ArgumentParser
from pathlib import Path

RESUME = "go on from the newest whole checkpoint of the run folder"


def add_experiment(parser: ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="experiment file (YAML)")
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    """The overrides of an experiment."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="set a field of the experiment; the value is YAML, such as 1e-6, null or [1, 2]",
    )
