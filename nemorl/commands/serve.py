"""`nemorl serve`: an OpenAI-compatible server over the engines of an experiment, or over a model.

`nemorl serve reward` serves the scores of a reward model instead.
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import yaml

from nemorl.commands.terminal import say
from nemorl.errors import ConfigError, Problem
from nemorl.plan.machine import read_machine
from nemorl.plan.problems import head_problems

from .check import Ready, prepare
from .terminal import add_overrides

HELP = (
    "answer requests of OpenAI's API with the model of an experiment or with a model folder; or score answers"
)
REWARD = "reward"

MAX_SEQUENCE_TOKENS = 4096  # of a model folder, where nothing else is asked for


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "target",
        type=Path,
        metavar="[reward] CONFIG_OR_MODEL",
        help="experiment file (YAML), or a model's folder; behind `reward` those of a reward model, of which "
        "the scores are served",
    )
    add_overrides(parser)


def run(arguments: Namespace) -> int:
    """Serve until the process receives SIGINT or SIGTERM. Raises NemorlError."""
    target, overrides = arguments.target, arguments.overrides
    scores = str(target) == REWARD and bool(overrides) and "=" not in overrides[0]
    if scores:
        target, overrides = Path(overrides[0]), overrides[1:]
    prepared = _prepare_reward if scores else _prepare
    if target.is_dir():
        with tempfile.TemporaryDirectory(prefix="nemorl-serve-") as scratch:
            of_model = _reward_experiment if scores else _experiment_of
            ready = prepared(of_model(target, Path(scratch)), overrides)
    else:
        ready = prepared(target, overrides)
    from nemorl.serve.app import Listening  # aiohttp and Ray: not before the checks
    from nemorl.session.endpoints import serve, serve_rewards

    def announce(at: Listening) -> None:
        say(f"endpoint: {at.url}")
        if at.generated:
            say(f"key: {at.api_key}")

    folder = ready.experiment.run_dir / "serve"
    experiment = ready.experiment.model_copy(update={"run_dir": folder})
    serve_rewards(experiment, announce) if scores else serve(experiment, announce)
    return 0


def _prepare(path: Path, overrides: list[str]) -> Ready:
    ready = prepare(path, overrides, read_machine(), training=False, measuring=False, serving=True)
    generation = ready.experiment.generation
    if not generation.has_engines:
        fix = "this back end samples inside the policy and cannot be served; set one that has engines"
        raise ConfigError(str(path), [Problem("generation.backend", generation.backend, fix)])
    return ready


def _prepare_reward(path: Path, overrides: list[str]) -> Ready:
    ready = prepare(path, overrides, read_machine(), training=False, measuring=False, serving=True)
    if ready.experiment.policy.head != "scalar":
        fix = "a reward model gives one number: set it to scalar, or leave out the word `reward`"
        raise ConfigError(str(path), [Problem("policy.head", ready.experiment.policy.head, fix)])
    problems = list(head_problems(ready.experiment.policy.model_path))
    if problems:
        raise ConfigError(str(path), problems)
    return ready


def _experiment_of(model: Path, folder: Path) -> Path:
    """An experiment file with this model. What it says of data and algorithm is for form's sake."""
    tree = _tree(model)
    tree["generation"] = {"max_new_tokens": tree["policy"]["max_sequence_length"] - 1}
    tree["algorithm"] = {"name": "sft", "num_steps": 1, "batch_size": 1}
    return _written(tree, model, folder)


def _reward_experiment(model: Path, folder: Path) -> Path:
    """The same with a reward model, whose conversations go through its chat template, if it has one."""
    tree = _tree(model)
    tree["policy"] |= {"head": "scalar", "micro_batch_tokens": 2 * tree["policy"]["max_sequence_length"]}
    tree["data"]["chat"] = has_chat_template(model)
    tree["algorithm"] = {"name": "reward_model", "num_steps": 1, "batch_size": 1}
    return _written(tree, model, folder)


def has_chat_template(model: Path) -> bool:
    """Whether the folder's tokenizer has one, in a file of its own or in its configuration."""
    config = model / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return (model / "chat_template.jinja").is_file() or bool(known.get("chat_template"))


def _tree(model: Path) -> dict[str, Any]:
    config = model / "config.json"
    if not config.is_file():
        fix = "this folder has no config.json: name a model's folder, or an experiment file"
        raise ConfigError(str(model), [Problem("", str(model), fix)])
    known = json.loads(config.read_text(encoding="utf-8"))
    positions = known.get("max_position_embeddings", MAX_SEQUENCE_TOKENS)
    length = min(positions, MAX_SEQUENCE_TOKENS)
    kept = known.get("dtype", known.get("torch_dtype"))
    precision = {"precision": kept} if kept in ("float32", "bfloat16") else {}
    return {
        "run_dir": "runs/serve",
        "policy": {
            "model_path": str(model),
            "max_sequence_length": length,
            "micro_batch_tokens": length,
            **precision,
        },
        "data": {"chat": False, "train": {"name": "arithmetic", "digits": 1, "size": 1}},
    }


def _written(tree: dict[str, Any], model: Path, folder: Path) -> Path:
    path = folder / f"{model.absolute().name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path
