"""The command `nemorl`.

Parsing, `check`, `config` and `train --dry-run` import neither torch nor Ray nor numpy: what a command needs
beyond that it imports when it runs.
"""

import argparse
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nemorl
from nemorl.commands import check, config_help, doctor, evaluate, models, plan, report, serve, slurm, train
from nemorl.commands.terminal import ExitCode, complain
from nemorl.errors import ConfigError, NemorlError, RunStopped, UsageError

COMMANDS = {
    "train": train,
    "check": check,
    "eval": evaluate,
    "serve": serve,
    "models": models,
    "plan": plan,
    "report": report,
    "slurm": slurm,
    "config": config_help,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (see `ExitCode`). `argv` is without the program's name."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    _find_modules_here()
    try:
        return int(COMMANDS[arguments.command].run(arguments))
    except NemorlError as error:
        if arguments.traceback:
            raise
        complain("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return _exit_code(error)
    except OSError as error:
        if arguments.traceback:
            raise
        complain(f"nemorl {arguments.command} failed: {error}{_fix(error)}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        if arguments.traceback:
            raise
        complain(f"nemorl {arguments.command} was interrupted")
        return ExitCode.INTERRUPTED


def _exit_code(error: NemorlError) -> ExitCode:
    if isinstance(error, RunStopped):
        return ExitCode.STOPPED
    return ExitCode.REFUSED if isinstance(error, ConfigError | UsageError) else ExitCode.FAILED


def _fix(error: OSError) -> str:
    """For a full disk that no writer has put in words, as of a library's own files."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return (
        f". Full is the disk of the run folder or of temporary files ({tempfile.gettempdir()}, /dev/shm): "
        "make room, or set TMPDIR to another folder; then continue the run with --resume"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Ends the process with status 2 for a wrong usage, as argparse does."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest[:1] == ["--"] and hasattr(arguments, "words"):  # argparse takes no words behind an option
        arguments.words, rest = [*arguments.words, *rest[1:]], []
    # argparse takes no `a.b=value` after an option.
    late_overrides = [word for word in rest if not word.startswith("-")]
    if len(late_overrides) < len(rest) or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_hint(arguments, rest)}")
    if late_overrides:
        arguments.overrides += late_overrides
    return arguments


def _hint(arguments: argparse.Namespace, rest: Sequence[str]) -> str:
    """For who sets a field as other programs have it, `--seed 1`."""
    if not hasattr(arguments, "overrides") and arguments.command != "check":
        return ""
    field = next(word for word in rest if word.startswith("-")).lstrip("-").partition("=")[0]
    return f" (fields are set without dashes, as `{field}=value`)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemorl", description=nemorl.__doc__)
    parser.add_argument("--version", action="version", version=f"nemorl {nemorl.__version__}")
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=bool(os.environ.get("NEMORL_TRACEBACK")),
        help="show where in the code an error came from (also by NEMORL_TRACEBACK=1)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP, description=command.HELP))
    return parser


def _find_modules_here() -> None:
    """Let `rewards` name functions in files of the current folder, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    sys.exit(main())
