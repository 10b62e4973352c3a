"""`defaults:`: a file that says only what differs from others."""

from pathlib import Path

from nemorl.errors import ConfigError, Violation

from .merge import merged
from .variants import common_fields
from .yaml import Document, parse_document

DEFAULTS = "defaults"


def read_document(file: Path) -> Document:
    """A file with everything it inherits.

    `defaults:` is a path or a list of paths, relative to the file that says so. They are read depth-first;
    later ones win over earlier ones, and the file itself over all (see `merge.merged` and `variants`).
    Raises `ConfigError`: a file that is missing or unreadable, broken YAML, files that inherit in a circle.
    """
    return _read(file, ())


def _read(file: Path, heirs: tuple[Path, ...]) -> Document:
    """`heirs` are the files that led here, the one asked for first."""
    own = parse_document(_text(file, heirs), str(file))
    result = Document({})
    for parent in _parents(own, file):
        _refuse_circle(parent, (*heirs, file))
        result = _over(result, _read(parent, (*heirs, file)))
    own.tree.pop(DEFAULTS, None)
    return _over(result, own)


def _over(base: Document, over: Document) -> Document:
    tree = merged(base.tree, over.tree, common_fields)
    assert isinstance(tree, dict)
    return Document(tree, base.origins | over.origins)


def _text(file: Path, heirs: tuple[Path, ...]) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        overrides = "=" in file.name and not heirs
        problem = "there is no such file" + (
            ": the experiment file comes first, and overrides such as this after it" if overrides else ""
        )
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text: {error.reason} at byte {error.start}"
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
    source = str(heirs[0]) if heirs else str(file)
    wanted_by = f"; `{DEFAULTS}` of {heirs[-1]} names it" if heirs else ""
    raise ConfigError(
        source, [Violation(DEFAULTS if heirs else "", str(file), f"{problem}{wanted_by}", str(file))]
    )


def _parents(document: Document, file: Path) -> list[Path]:
    named = document.tree.get(DEFAULTS, [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        mend = "a path or a list of paths is wanted, relative to this file"
        raise ConfigError(str(file), [Violation(DEFAULTS, named, mend, document.origins[(DEFAULTS,)])])
    return [file.parent / name for name in names]


def _refuse_circle(parent: Path, heirs: tuple[Path, ...]) -> None:
    if parent.resolve() in {heir.resolve() for heir in heirs}:
        circle = " -> ".join(map(str, (*heirs, parent)))
        mend = f"these files inherit in a circle, {circle}: take one of the links away"
        raise ConfigError(str(heirs[0]), [Violation(DEFAULTS, str(parent), mend, str(heirs[-1]))])
