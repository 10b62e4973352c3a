"""TRL's configs as its command line reads them: YAML, scripts with a launcher, and calls in a Python file."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .rules import CannotImport
from .sources import options_of, read_command, read_text, read_yaml, resolved
from .trl_trainers import OWN

_SIZES = "num_processes", "num_machines"  # of `accelerate launch`, which `trl` takes as well
_TORCHRUN = {"nproc_per_node": "num_processes", "nnodes": "num_machines"}
_BUILT_IN = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8)
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "python", "python3")
_ALIASES = {"r": "lora_r", "target_modules": "lora_target_modules"}  # of LoraConfig


def read(file: Path, trainers: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a YAML of `trl NAME --config`, of a script with its command line, or of a config.

    `trainers` has the config classes by the names of commands; the key `trainer` has the name. Raises
    CannotImport.
    """
    folder = file.parent
    if file.suffix == ".py":
        return _of_python(file, trainers)
    if file.suffix in (".yaml", ".yml"):
        return _launched(_of_yaml(file), folder)
    text = read_text(file)
    starts = any(word in _LAUNCHERS for word in text.split())
    words = read_command(text, find=_launch_command) if starts else text.replace("\\\n", " ").split()
    return from_words(words, folder, trainers)


def _of_yaml(file: Path) -> dict[str, Any]:
    tree = resolved(read_yaml(file), str(file))
    tree.pop("env", None)
    return tree


def _launch_command(words: list[str]) -> list[str]:
    """The words from a launcher on, if they start a script or `trl NAME`."""
    for place, word in enumerate(words):
        if word in _LAUNCHERS and (word == "trl" or any(_is_script(one) for one in words[place:])):
            return words[place:]
    return []


def _is_script(word: str) -> bool:
    return word.endswith(".py") or word.startswith("trl.scripts.")


def from_words(words: list[str], folder: Path, trainers: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a command: of its launcher, of its `--config`, and its own, which win."""
    ends = [place for place, word in enumerate(words) if _is_script(word) or word == "trl"]
    end = ends[0] if ends else 0
    before, after = words[:end], words[end + 1 :] if ends else words
    tree = {_TORCHRUN.get(key, key): value for key, value in options_of(before).items()}
    known = (*_SIZES, "config_file")
    tree = {key: value for key, value in tree.items() if key in known}
    if "torchrun" in before and "num_processes" in tree:
        tree["num_processes"] *= tree.get("num_machines", 1)
    name = Path(words[end]).stem.removeprefix("trl.scripts.") if ends else ""
    if name == "trl":
        name = after[0] if after else ""
    if name not in trainers and (name in (*OWN, "gkd") or "trl" in words[end : end + 1]):
        listed = ", ".join(trainers)
        raise CannotImport(f"trl {name}: this trainer is not imported; those that are: {listed}")
    own = options_of(after)
    if config := own.pop("config", None):
        tree |= _of_yaml(_near(str(config), folder))
    tree |= own
    if not tree:
        raise CannotImport("the command has no options such as --model_name_or_path; give the config as YAML")
    if name in trainers:
        tree["trainer"] = name
    return _launched(tree, folder)


def _near(name: str, folder: Path) -> Path:
    """A file that a script names, from the current folder or from the script's."""
    found = [path for path in (Path(name), folder / name) if path.is_file()]
    if not found:
        raise CannotImport(f"{name}: there is no such file here or in {folder}; put it next to the script")
    return found[0]


def _launched(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments with the number of processes and machines of accelerate's config."""
    config = tree.pop("accelerate_config", None) or tree.pop("config_file", None)
    if config in _BUILT_IN:
        return {"num_processes": _BUILT_IN[config]} | tree
    if config is None:
        return tree
    launch = resolved(read_yaml(_near(str(config), folder)), str(config))
    return {key: launch[key] for key in _SIZES if launch.get(key) is not None} | tree


def _of_python(file: Path, trainers: Mapping[str, str]) -> dict[str, Any]:
    """The literal keyword arguments of configs and trainers; nothing is executed."""
    tree: dict[str, Any] = {}
    try:
        module = ast.parse(read_text(file))
    except SyntaxError as error:
        raise CannotImport(f"{file}:{error.lineno}: this is no Python: {error.msg}") from error
    found: dict[str, None] = {}
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        kind = next((one for one, config in trainers.items() if name in (config, _trainer(config))), None)
        if kind is None and name != "LoraConfig":
            continue
        if kind is not None:
            found[kind] = None
        for argument in node.keywords:
            try:
                value = ast.literal_eval(argument.value)
            except ValueError:
                continue
            key = str(argument.arg)
            tree[_ALIASES.get(key, key) if name == "LoraConfig" else key] = value
        if name == "LoraConfig":
            tree["use_peft"] = True
    if not found:
        listed = ", ".join(trainers.values())
        raise CannotImport(f"{file}: there is no call of {listed}; other trainers are not imported")
    if len(found) > 1:
        raise CannotImport(f"{file}: there are calls of {', '.join(found)}; give a file with one of them")
    return {"trainer": next(iter(found)), **tree}


def _trainer(config: str) -> str:
    """The trainer of a config class: `SFTTrainer` of `SFTConfig`."""
    return config.replace("Config", "Trainer")
