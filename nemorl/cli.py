"""The command `nemorl`. What needs torch, Ray or numpy is imported when the command that needs it runs."""

import argparse
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nemorl
from nemorl.commands import (
    check,
    config_help,
    doctor,
    env,
    importing,
    models,
    plan,
    recipes,
    rewards,
    scale,
    serve,
    show,
    simulate,
    slurm,
    sweep,
    train,
    ui,
)
from nemorl.commands.terminal import ExitCode, complain, field_hint
from nemorl.errors import ConfigError, NemorlError, RunStopped, UsageError

COMMANDS = (
    train,
    sweep,
    recipes,
    rewards,
    check,
    env,
    show,
    ui,
    scale,
    serve,
    models,
    importing,
    plan,
    simulate,
    slurm,
    config_help,
    doctor,
)  # as in --help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (see `ExitCode`). `argv` is without the program's name."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if (here := str(Path.cwd())) not in sys.path:  # as of `python -m`: for functions in the user's files
        sys.path.insert(0, here)
    try:
        return int(arguments.action(arguments))
    except (NemorlError, OSError, KeyboardInterrupt) as error:
        if arguments.traceback:
            raise
        message, code = f"nemorl {arguments.command} was interrupted", ExitCode.INTERRUPTED
        if isinstance(error, NemorlError):
            message, code = str(error), ExitCode.FAILED
            if isinstance(error, RunStopped):
                code = ExitCode.STOPPED
            elif isinstance(error, ConfigError | UsageError):
                code = ExitCode.REFUSED
        elif isinstance(error, OSError):
            message, code = f"nemorl {arguments.command} failed: {error}", ExitCode.FAILED
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # in no writer's words, as of a library's files
                temporary = f"temporary files ({tempfile.gettempdir()}, /dev/shm)"
                fix = "make room, or set TMPDIR to another folder; then continue the run with --resume"
                message += f". The disk of the run folder or of {temporary} is full: {fix}"
        complain("\n".join([message, *getattr(error, "__notes__", ())]))
        return code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nemorl", description=nemorl.__doc__)
    parser.add_argument("--version", action="version", version=f"nemorl {nemorl.__version__}")
    traceback_help = "print the traceback of an error (also enabled by NEMORL_TRACEBACK=1)"
    parser.add_argument("--traceback", action="store_true", help=traceback_help)
    parser.set_defaults(traceback=bool(os.environ.get("NEMORL_TRACEBACK")))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    arguments, rest = parser.parse_known_args(argv)
    if rest[:1] == ["--"] and hasattr(arguments, "words"):  # argparse takes no words behind an option
        arguments.words, rest = [*arguments.words, *rest[1:]], []
    # argparse takes no `a.b=value` after an option.
    takes_overrides = hasattr(arguments, "overrides")
    options = [word for word in rest if word.startswith("-")]
    if options or (rest and not takes_overrides):
        takes_fields = takes_overrides or arguments.command == "check"
        hint = field_hint(options[0]) if options and takes_fields else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
