"""The folder that the web app was started for, its run folders, and the paths that requests may name."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nemorl.observe.run_folder import RunPaths

from .errors import UiError

MAX_DEPTH = 4  # of run folders below the root
SKIPPED = frozenset({"node_modules", "__pycache__"})


class Folders:
    """Every path that a request names lies below `root`; links that lead out are refused."""

    def __init__(self, root: Path, run: str | None = None) -> None:
        """`run` is the only run folder that is shown, by its path below the root."""
        self.root, self._only = root.resolve(), run

    def runs(self) -> Iterator[tuple[str, Path]]:
        """Name and folder of each run. The name is the path below the root."""
        if self._only is not None:
            yield self._only, self.root / self._only
            return
        yield from self._runs_below(self.root, 0)

    def run(self, name: str) -> Path:
        """Raises UiError where this is no run folder below the root."""
        if self._only not in (None, name):
            raise UiError(404, f"{name} is not the run that is shown", name, f"run nemorl ui {self.root}")
        path = self._below(name)
        if not RunPaths(path).holds_run:
            fix = "choose one of the list of runs"
            raise UiError(404, f"no run in {path}: it has no config.yaml and no metrics.jsonl", name, fix)
        return path

    def file(self, name: str) -> Path:
        """A file below the root, which need not exist. Raises UiError for other places."""
        return self._below(name)

    def name(self, path: Path) -> str | None:
        """The name of a path in requests; None if it is not below the root."""
        resolved = path.resolve()
        return resolved.relative_to(self.root).as_posix() if resolved.is_relative_to(self.root) else None

    def _below(self, name: str) -> Path:
        relative = PurePosixPath(name)
        if "\0" in name or relative.is_absolute() or ".." in relative.parts:
            raise UiError(403, f"{name!r} is not a path below {self.root}", name)
        try:
            path = (self.root / relative).resolve()
        except (OSError, RuntimeError) as error:  # too long; a circle of links
            raise UiError(404, f"{name!r} is not a path: {error}", name) from error
        if not path.is_relative_to(self.root):
            fix = f"start nemorl ui with the folder that {name} leads to"
            raise UiError(403, f"{name} leads out of {self.root}, to {path}", name, fix)
        return path

    def _runs_below(self, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
        if RunPaths(folder).holds_run and folder != self.root:
            yield folder.relative_to(self.root).as_posix(), folder
            return
        if depth == MAX_DEPTH:
            return
        try:
            with os.scandir(folder) as found:
                inside = sorted(
                    entry.name
                    for entry in found
                    if entry.is_dir(follow_symlinks=False)
                    and not entry.name.startswith(".")
                    and entry.name not in SKIPPED
                )
        except OSError:  # not ours to read, or gone
            return
        for name in inside:
            yield from self._runs_below(folder / name, depth + 1)
