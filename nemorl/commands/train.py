"""`nemorl train`: check an experiment and run it."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.commands.terminal import notes, plan_table, say
from nemorl.config.load import to_yaml
from nemorl.plan.machine import read_machine

from .check import Ready, prepare
from .terminal import RESUME, add_experiment

if TYPE_CHECKING:
    from nemorl.run.train import RunResult

HELP = "run an experiment"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    add_experiment(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and write nothing")
    parser.add_argument("--resume", action="store_true", help=RESUME)


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    new_run = not arguments.resume and not arguments.dry_run
    ready = prepare(
        arguments.config,
        arguments.overrides,
        read_machine(),
        new_run=new_run,
        resumes=arguments.resume,
        starts=not arguments.dry_run,
    )
    if arguments.dry_run:
        show(ready)
        return 0
    _summarize(_train(ready, resume=arguments.resume))
    return 0


def show(ready: Ready) -> None:
    """The whole experiment on standard output, fit to be saved and run; the plan beside it."""
    say(to_yaml(ready.experiment).rstrip())
    notes().print(plan_table(ready.plan))


def _train(ready: Ready, *, resume: bool) -> "RunResult":
    from nemorl.run.train import train  # torch, Megatron and Ray: not for --help and --dry-run

    return train(ready.experiment, resume=resume)


def _summarize(result: "RunResult") -> None:
    rows: list[tuple[str, Path | None]] = [
        ("run", result.run_dir),
        ("weights", result.hf_dir),
    ]
    for name, path in rows:
        if path is not None:
            say(f"{name}: {path}")
