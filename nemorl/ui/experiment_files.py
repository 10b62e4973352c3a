"""Experiment files and files of rewards below the app's folder: list, read, and save without overwriting."""

import ast
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemorl.config.environment import Signature
from nemorl.config.load import SUFFIXES
from nemorl.observe.files import write_atomically
from nemorl.rewards.find import FORMS

from .errors import UiError
from .folders import MAX_DEPTH, SKIPPED, Folders

_MAX_FILES = 2000
_MAX_BYTES = 2 * 2**20
_REQUIRED = b"algorithm:"  # in every experiment file, or in one that it inherits

# What a new function of each signature begins with: a score of 1 for the expected answer.
_BODIES: dict[Signature, str] = {
    "trl": '''    """A number for each completion of a group, or None where the reward does not apply.

    A completion is a text, or with data.chat a list of messages. Columns of the task are lists, too.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.strip() == str(answer)) for text, answer in zip(texts, columns["answer"])]
''',
    "openrlhf": '''    """A number for each answer of a group; a query is a prompt with its answer."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    return [float(answer.strip() == str(label)) for answer, label in zip(answers, labels)]
''',
    "verl": '''    """The number of one answer."""
    return float(solution_str.strip() == str(ground_truth))
''',
}


@dataclass(frozen=True)
class Saved:
    text: str
    version: str  # of its bytes, as of the time of reading


class Conflict(UiError):
    """A file that changed since it was read; nothing was written."""

    def __init__(self, name: str, on_disk: Saved) -> None:
        fix = "take the text of the disk, or keep yours: both are shown, and nothing was overwritten"
        super().__init__(409, f"{name} was changed by another program since it was opened", name, fix)
        self.on_disk = on_disk

    def body(self) -> dict[str, str]:
        return {**super().body(), "text": self.on_disk.text, "version": self.on_disk.version}


def version_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def list_experiments(folders: Folders) -> list[str]:
    """Paths of the YAML files below the root that look like experiments, in order."""
    found = []
    for path in _yaml_files(folders.root, 0):
        with suppress(OSError):
            if path.stat().st_size <= _MAX_BYTES and _looks_like_one(path):
                found.append(path.relative_to(folders.root).as_posix())
        if len(found) == _MAX_FILES:
            break
    return found


def _looks_like_one(path: Path) -> bool:
    data = path.read_bytes()
    return any(line.startswith((_REQUIRED, b"defaults:")) for line in data.splitlines())


def _yaml_files(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # not ours to read, or gone
        return
    for entry in inside:
        if entry.is_file(follow_symlinks=False) and entry.name.endswith(SUFFIXES):
            yield Path(entry.path)
            continue
        is_hidden = entry.name.startswith(".") or entry.name in SKIPPED
        if entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH and not is_hidden:
            yield from _yaml_files(Path(entry.path), depth + 1)


def regular(folders: Folders, name: str) -> str:
    """The path of a file below the root, from there. Raises UiError for what is no file."""
    path = folders.file(name)
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UiError(415, f"{name} is no regular file", name, "choose one of the list")
    return path.relative_to(folders.root).as_posix()


def read_text(folders: Folders, name: str) -> Saved:
    """Raises UiError with the reason."""
    path = folders.root / regular(folders, name)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UiError(413, f"{name} is larger than {_MAX_BYTES // 2**20} MB: no experiment file", name)
        data = path.read_bytes()
        return Saved(data.decode("utf-8"), version_of(data))
    except FileNotFoundError as error:
        fix = "choose one of the list, or start with a recipe"
        raise UiError(404, f"there is no file {name}", name, fix) from error
    except UnicodeDecodeError as error:
        raise UiError(415, f"{name} is not UTF-8 text: {error.reason} at byte {error.start}", name) from error
    except OSError as error:
        raise UiError(403, f"{name} cannot be read: {error.strerror}", name) from error


def free_name(folders: Folders, name: str) -> str:
    """A name like this one that no file has."""
    path = folders.file(name)
    stem, suffix, number = path.stem, path.suffix, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{suffix}")
    return path.relative_to(folders.root).as_posix()


def save_text(path: Path, name: str, text: str, version: str | None) -> Saved:
    """Write a file that has the `version` that was read, or with None does not exist yet.

    Raises Conflict if it changed meanwhile, and UiError where it cannot be written.
    """
    try:
        on_disk = path.read_bytes() if path.exists() else None
        if (None if on_disk is None else version_of(on_disk)) != version and on_disk is not None:
            if on_disk != text.encode():
                raise Conflict(name, Saved(on_disk.decode("utf-8", "replace"), version_of(on_disk)))
            return Saved(text, version_of(on_disk))
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()  # a sentence before anything is replaced
        write_atomically(path, text)
    except OSError as error:
        fix = "choose another name, or make the folder writable"
        raise UiError(403, f"{name} cannot be written: {error.strerror}", name, fix) from error
    return Saved(text, version_of(text.encode()))


def save_experiment(folders: Folders, name: str, text: str, version: str | None) -> Saved:
    if not name.endswith(SUFFIXES):
        raise UiError(400, f"{name} is no name of an experiment file", name, "let it end with .yaml")
    return save_text(folders.file(name), name, text, version)


def reward_template(signature: Signature, function: str) -> str:
    """The text of a new file with one function of a signature."""
    return f"def {function}{FORMS[signature]}:\n{_BODIES[signature]}"


def save_reward(folders: Folders, name: str, text: str, version: str | None) -> tuple[Saved, list[str]]:
    """Save a file of rewards, and return the paths of its functions as `rewards.N.function` takes them.

    The text is parsed and not run. Raises UiError with the line of a syntax error, or for a name that Python
    could not import.
    """
    if not name.endswith(".py"):
        raise UiError(400, f"{name} is no name of a Python file", name, "let it end with .py")
    path = folders.file(name)
    relative = path.relative_to(folders.root).with_suffix("")
    if wrong := [part for part in relative.parts if not part.isidentifier()]:
        fix = "use letters, digits and _ in its name and in those of its folders"
        raise UiError(400, f"Python cannot import {name}: {wrong[0]!r} is no name of a module", name, fix)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        place = f"{name}:{error.lineno}"
        raise UiError(400, f"{place} is no Python: {error.msg}", place, "correct the line") from error
    except ValueError as error:
        raise UiError(400, f"{name} is no Python: {error}", name) from error
    functions = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        raise UiError(400, f"{name} defines no function", name, "define one, as the template does")
    saved = save_text(path, name, text, version)
    module = ".".join(relative.parts)
    return saved, [f"{module}:{function}" for function in functions if not function.startswith("_")]
