"""The experiment files that come with nemorl, by name: `quickstart/grpo` is configs/quickstart/grpo.yaml.

name  ->  file, and those that it builds on  ->  what `nemorl recipes list` shows  ->  a copy for the user
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import yaml as pyyaml

from .environment import OneEnvConfig
from .generation import GenerationConfig
from .schema import common_fields, variants
from .schema import names as variant_names
from .yaml import Tree, is_written, merged, parse_document

_PACKAGE = Path(__file__).parents[1]
_ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # of a wheel, of a clone
FOLDER, EXAMPLES = _ROOT / "configs", _ROOT / "examples"
PROGRAMS = "examples/"  # programs that an experiment runs from a file in the current folder
# What a value of an experiment requires before a run.
_COMMANDS = {
    "models/arithmetic": "nemorl models create arithmetic models/arithmetic",
    "models/chat": "nemorl models create chat models/chat",
    "models/pairs": "nemorl models create pairs models/pairs",
    "models/smollm2": "pip install 'nemorl[smollm2]' && nemorl models fetch smollm2 models/smollm2",
    "nemorl.examples.shelves_openai:Factory": "pip install openai",
}
_RUNS = "runs/"
_SENTENCE_END = re.compile(r"(?<!\bDr)\. (?=[A-Z`])")
_MAX_NEAREST = 3


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(_name(file) for file in FOLDER.rglob("*.yaml")))


def locate(path: Path) -> Path:
    """The file of a shipped experiment if `path` does not exist and is the name of one, else `path`."""
    return file_of(str(path)) if is_name(path) else path


def is_name(path: Path) -> bool:
    """True if this is no path here, but the name of a shipped file."""
    return str(path) in names() and not path.exists()


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def nearest(text: str) -> str:
    """The names that are most like a text that is none, and the command that lists all of them."""
    given = text.removesuffix(".yaml").removesuffix(".yml").removeprefix("configs/")
    last = given.rpartition("/")[2]
    complete = [recipe.name for recipe in recipes()]
    by_path = difflib.get_close_matches(given, complete, _MAX_NEAREST)
    same_last = [name for name in complete if last in (name.rpartition("/")[2], *name.split("/")[:-1])]
    close = list(dict.fromkeys([*(name for name in complete if name == given), *by_path, *same_last]))
    meant = ", ".join(f"`{name}`" for name in close[:_MAX_NEAREST])
    question = f"did you mean {meant}? " if meant else ""
    return f"{question}`nemorl recipes list` shows the experiments that come with nemorl"


def command_for(value: str) -> str | None:
    """The command after which a value of a shipped experiment, such as a model's path, is available."""
    if value in _extras():
        return f"pip install 'nemorl[{value.replace('_', '-')}]'"
    if value.startswith(PROGRAMS) and (name := _runner(value)):
        return f"nemorl recipes copy {name}"
    if value.startswith(_RUNS) and (producer := _producers().get(value)):
        return f"nemorl train {producer}"
    return _COMMANDS.get(value)


@dataclass(frozen=True)
class Recipe:
    """A shipped experiment, as its file and those that it builds on describe it."""

    name: str
    algorithm: str
    model: str  # path, or id on the Hugging Face hub
    devices: str  # `CPU`, `8 GPUs` or `2 x 8 GPUs`
    description: str  # first sentence of the file's comment
    needs: dict[str, str]  # values that are not available everywhere -> what to do before a run

    def matches(self, pattern: str) -> bool:
        # Every second one begins with a model of the quickstart's runs.
        searched = [self.name, self.algorithm, *([] if self.model.startswith(_RUNS) else [self.model])]
        return fnmatch(self.name, pattern) or any(pattern.lower() in text.lower() for text in searched)


def recipes(pattern: str = "") -> list[Recipe]:
    """Those whose name, algorithm or model contains a text, or whose name matches a pattern of a shell.

    Files that only others build on, which lack a model or an algorithm, are left out.
    """
    found = [recipe for name in names() if (recipe := describe(name)) is not None]
    return [recipe for recipe in found if recipe.matches(pattern)]


def describe(name: str) -> Recipe | None:
    """None of a file that is not complete."""
    tree = _tree(name)
    if not (is_written(tree, ("algorithm", "name")) and is_written(tree, ("policy", "model_path"))):
        return None
    return Recipe(
        name=name,
        algorithm=str(_value(tree, "algorithm", "name")),
        model=str(_value(tree, "policy", "model_path")),
        devices=_devices(tree),
        description=_description(file_of(name).read_text(encoding="utf-8")),
        needs={text: command for text in _texts(tree) if (command := command_for(text))}
        | dict(_data_needs(tree.get("data"))),
    )


def parents(name: str) -> Iterator[str]:
    """Names of the files that a shipped file builds on, directly or not; the nearest first."""
    for parent in _own(name)[1]:
        yield parent
        yield from parents(parent)


def copies(name: str, to: Path) -> dict[Path, str]:
    """The text of each file of a copy that works without the shipped ones.

    `defaults:` names the copies of the parents, which are next to the copy under their own names. A program
    that the experiment runs is copied to where the experiment names it, in the current folder.
    """
    texts = {to.parent / f"{parent}.yaml": _text(parent) for parent in parents(name)}
    texts |= {Path(file): (EXAMPLES.parent / file).read_text(encoding="utf-8") for file in _programs(name)}
    return texts | {to: _with_parents(name)}


def _with_parents(name: str) -> str:
    """The text of a file whose `defaults:` are relative to the folder of all files."""
    text, directly = _text(name), iter(reversed(_own(name)[1]))
    root = pyyaml.compose(text, pyyaml.SafeLoader)
    assert isinstance(root, pyyaml.MappingNode)
    for key, value in root.value:
        if key.value == "defaults":
            items = value.value if isinstance(value, pyyaml.SequenceNode) else [value]
            for item in reversed(items):  # from the end, as positions move
                start, end = item.start_mark.index, item.end_mark.index
                text = f"{text[:start]}{next(directly)}.yaml{text[end:]}"
    return text


def _text(name: str) -> str:
    return file_of(name).read_text(encoding="utf-8")


def _name(file: Path) -> str:
    return file.relative_to(FOLDER).with_suffix("").as_posix()


@cache
def _own(name: str) -> tuple[Tree, tuple[str, ...]]:
    """What a file itself says, and the names of those that it builds on."""
    file = file_of(name)
    tree = parse_document(_text(name), str(file)).tree
    named = tree.pop("defaults", [])
    listed = [named] if isinstance(named, str) else named
    assert isinstance(listed, list)
    return tree, tuple(_name((file.parent / path).resolve()) for path in listed)


def _tree(name: str) -> Tree:
    own, directly = _own(name)
    tree: Tree = {}
    for over in (*map(_tree, directly), own):
        tree = merged(tree, over, common_fields)
    return tree


def _value(tree: Tree, section: str, field: str, default: object = None) -> object:
    part = tree.get(section)
    return part.get(field, default) if isinstance(part, dict) else default


def _texts(value: object) -> Iterator[str]:
    """All values of a tree that are texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _data_needs(section: object) -> Iterator[tuple[str, str]]:
    """Of paths of datasets: those with a split are Hugging Face's, which an extra reads."""
    if isinstance(section, dict):
        path = section.get("path")
        if isinstance(path, str):
            is_hub = "split" in section
            yield path, "pip install 'nemorl[data]'" if is_hub else "write this file (docs/data.md)"
        for value in section.values():
            yield from _data_needs(value)


def _devices(tree: Tree) -> str:
    nodes = _value(tree, "cluster", "num_nodes", 1)
    gpus = _value(tree, "cluster", "gpus_per_node", 0)
    if not gpus:
        return "CPU" if nodes == 1 else f"{nodes} nodes, CPU"
    return f"{gpus} GPU{'s' * (gpus != 1)}" if nodes == 1 else f"{nodes} x {gpus} GPUs"


def _description(text: str) -> str:
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    first = _SENTENCE_END.split(" ".join(comment), maxsplit=1)[0]
    return first.removesuffix(".")


def _programs(name: str) -> list[str]:
    return [text for text in _texts(_tree(name)) if text.startswith(PROGRAMS)]


@cache
def _runner(program: str) -> str | None:
    return next((name for name in names() if program in _programs(name)), None)


@cache
def _extras() -> frozenset[str]:
    """Engines and environments whose package is installed by the extra of their name."""
    sections = (*variants(GenerationConfig), *variants(OneEnvConfig))
    return frozenset(
        name for section in sections if getattr(section, "package", "") for name in variant_names(section)
    )


@cache
def _producers() -> dict[str, str]:
    """The experiment that writes a model, by the path of the model."""
    return {
        f"{run_dir}/hf": name
        for name in names()
        if (run_dir := _own(name)[0].get("run_dir")) and _value(_tree(name), "checkpointing", "save_hf")
    }
