"""`nemorl train`: check an experiment and run it."""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.commands.terminal import notes, plan_table, say
from nemorl.config.load import to_yaml
from nemorl.errors import ConfigError, NemorlError, RunStopped
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.machine import read_machine

from .check import Ready, describe_unverified, prepare
from .terminal import RESUME, add_experiment

if TYPE_CHECKING:
    from nemorl.run.train import RunResult

HELP = "run an experiment"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    add_experiment(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show the resolved experiment and its plan, and start nothing"
    )
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
        where="unknown" if arguments.dry_run else "here",
    )
    if arguments.dry_run:
        show(ready)
        return 0
    try:
        result = _train(ready, resume=arguments.resume)
    except (ConfigError, RunStopped):  # which say themselves what to do
        raise
    except NemorlError as error:
        if note := _how_to_continue(arguments, ready.experiment.run_dir):
            error.add_note(note)
        raise
    _summarize(result)
    return 0


def _how_to_continue(arguments: Namespace, run_dir: Path) -> str | None:
    """None where the run wrote nothing, so that the same command starts it again."""
    paths = RunPaths(run_dir)
    if not paths.has_steps:
        return None
    words = [str(arguments.config), *arguments.overrides, "--resume"]
    names = (folder.name.removeprefix("step_") for folder in paths.checkpoints.glob("step_*"))
    steps = [int(name) for name in names if name.isdecimal()]
    place = f"after step {max(steps)}" if steps else "from the start, as there is no checkpoint yet"
    return f"To continue {place}: nemorl train {shlex.join(words)}"


def show(ready: Ready) -> None:
    """Print the resolved experiment on standard output and the plan on standard error."""
    say(to_yaml(ready.experiment).rstrip())
    for line in describe_unverified(ready):
        notes().print(line.strip(), markup=False)
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
