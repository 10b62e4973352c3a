"""`nemorl ui`: the local web app."""

import webbrowser
from argparse import Namespace
from pathlib import Path
from urllib.parse import urlencode

from nemorl.errors import UsageError
from nemorl.observe.run_folder import RunPaths

from .terminal import Commands, ExitCode, add_command, natural_number, say


def register(commands: Commands) -> None:
    ui = add_command(commands, "ui", _ui, "compose, watch and read runs in the browser")
    of_help = "a run folder, a config, or a folder that contains them (default: the current folder)"
    ui.add_argument("path", nargs="?", type=Path, default=Path(), metavar="PATH", help=of_help)
    ui.add_argument("--port", type=natural_number, default=0, help="port on 127.0.0.1 (default: a free one)")
    only_help = "show, and neither write files nor start or stop runs"
    ui.add_argument("--read-only", action="store_true", help=only_help)
    ui.add_argument("--no-browser", action="store_true", help="print the address without opening it")


def _ui(arguments: Namespace) -> int:
    import asyncio

    from nemorl.config.load import SUFFIXES
    from nemorl.serve.app import event_at_signals
    from nemorl.ui.app import serving
    from nemorl.ui.folders import Folders

    path: Path = arguments.path
    if arguments.port > 65535:
        raise UsageError(f"--port {arguments.port}: expected at most 65535")
    if not path.exists():
        raise UsageError(f"{path} does not exist; name a run folder, a config, or a folder of these")
    view = ""
    if path.is_file() and path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is no experiment file, whose name ends with {' or '.join(SUFFIXES)}")
    if path.is_file():
        folders = Folders(_root_of(path))
        view = f"compose?{urlencode({'file': folders.name(path) or path.name})}"
    elif RunPaths(path).holds_run:
        run = path.resolve()
        folders = Folders(run.parent, run.name)
        view = f"watch?{urlencode({'run': run.name})}"
    else:
        folders = Folders(path)

    async def serve() -> None:
        ended = event_at_signals()
        async with serving(folders, arguments.port, read_only=arguments.read_only) as (url, token):
            address = f"{url}/{view}#{token}"
            say(address)
            if not arguments.no_browser:
                webbrowser.open(address)
            await ended.wait()

    asyncio.run(serve())
    return ExitCode.WELL


def _root_of(config: Path) -> Path:
    """The current folder, from which the paths of a config start; the config's own if it is elsewhere."""
    here, found = Path.cwd(), config.resolve()
    return here if found.is_relative_to(here) else found.parent
