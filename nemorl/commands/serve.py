"""`nemorl serve`: an OpenAI-compatible server over a model, or a server of a reward model's scores."""

import asyncio
import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.errors import ConfigError, Problem
from nemorl.plan.machine import read_machine
from nemorl.plan.problems import has_chat_template, head_problems

from .check import prepare
from .terminal import Commands, ExitCode, add_command, add_overrides, say

MAX_SEQUENCE_TOKENS = 4096  # of a model folder, where nothing else is asked for


def register(commands: Commands) -> None:
    help_text = "serve a model through an OpenAI-compatible API, or the scores of a reward model"
    serve = add_command(commands, "serve", _serve, help_text)
    target_help = "experiment file (YAML) or model folder; with `reward` before it, that of a reward model"
    serve.add_argument("target", type=Path, metavar="[reward] CONFIG_OR_MODEL", help=target_help)
    add_overrides(serve)


def _serve(arguments: Namespace) -> int:
    target, overrides = arguments.target, arguments.overrides
    scores = str(target) == "reward" and bool(overrides) and "=" not in overrides[0]
    if scores:
        target, overrides = Path(overrides[0]), overrides[1:]
    if target.is_dir():
        experiment = _checked_model(target, overrides, scores)
    else:
        experiment = prepare(target, overrides, read_machine(), training=False, serving=True).experiment
    problems: list[Problem] = []
    generation, head = experiment.generation, experiment.policy.head
    if scores and head != "scalar":
        fix = "a reward model gives one number: set it to scalar, or leave out the word `reward`"
        problems = [Problem("policy.head", head, fix)]
    elif scores:
        problems = list(head_problems(experiment.policy.model_path))
    elif not generation.has_engines:
        fix = "this back end samples inside the policy and cannot be served; set one that has engines"
        problems = [Problem("generation.backend", generation.backend, fix)]
    if problems:
        raise ConfigError(str(target), problems)
    from nemorl.serve.app import Listening  # aiohttp and Ray: not before the checks
    from nemorl.session.endpoints import serve, serve_rewards

    def announce(at: Listening) -> None:
        say(f"endpoint: {at.url}")
        if at.generated:
            say(f"key: {at.api_key}")

    experiment = experiment.model_copy(update={"run_dir": experiment.run_dir / "serve"})
    asyncio.run((serve_rewards if scores else serve)(experiment, announce))
    return ExitCode.WELL


def _checked_model(model: Path, overrides: Sequence[str], scores: bool) -> Experiment:
    """An experiment with this model. Raises `ConfigError`, which names the folder."""
    with tempfile.TemporaryDirectory(prefix="nemorl-serve-") as scratch:
        file = Path(scratch) / "experiment.yaml"
        file.write_text(yaml.safe_dump(_experiment_of(model, scores)), encoding="utf-8")
        try:
            return prepare(file, overrides, read_machine(), training=False, serving=True).experiment
        except ConfigError as error:
            if error.source != str(file):  # the command line
                raise
            lines = f"{file}:"
            problems = [
                replace(p, origin="" if p.origin.startswith(lines) else p.origin) for p in error.problems
            ]
            raise ConfigError(str(model), problems) from error


def _experiment_of(model: Path, scores: bool) -> dict[str, Any]:
    """An experiment with this model. Data and algorithm are placeholders; an experiment requires them."""
    config = model / "config.json"
    if not config.is_file():
        fix = "this folder has no config.json: name a model's folder, or an experiment file"
        raise ConfigError(str(model), [Problem("", str(model), fix)])
    known = json.loads(config.read_text(encoding="utf-8"))
    length = min(known.get("max_position_embeddings", MAX_SEQUENCE_TOKENS), MAX_SEQUENCE_TOKENS)
    policy = {"model_path": str(model), "max_sequence_length": length, "micro_batch_tokens": length}
    kept = known.get("dtype", known.get("torch_dtype"))
    if kept in ("float32", "bfloat16"):
        policy["precision"] = kept
    data = {"chat": False, "train": {"name": "arithmetic", "digits": 1, "size": 1}}
    algorithm = {"name": "sft", "num_steps": 1, "batch_size": 1}
    tree = {"run_dir": "runs/serve", "policy": policy, "data": data, "algorithm": algorithm}
    if scores:  # conversations go through the model's chat template, if it has one
        policy |= {"head": "scalar", "micro_batch_tokens": 2 * length}
        data["chat"] = has_chat_template(model)
        algorithm["name"] = "reward_model"
    else:
        tree["generation"] = {"max_new_tokens": length - 1}
    return tree
