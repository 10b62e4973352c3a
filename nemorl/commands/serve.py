"""`nemorl serve`: an OpenAI-compatible server over a model, a server of a reward model's scores, or one of
environments.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.generation import EndpointConfig
from nemorl.config.load import SUFFIXES
from nemorl.config.shipped import is_name
from nemorl.errors import ConfigError, Problem
from nemorl.models.hub import HubError, fetch_model, is_hub_id
from nemorl.plan.machine import read_machine
from nemorl.plan.problems import has_chat_template, head_problems
from nemorl.run.inspection import prepare
from nemorl.run.stop import run_to_end

from .env import experiment_of, factory_of
from .terminal import (
    EXPERIMENT_HELP,
    Commands,
    ExitCode,
    add_command,
    add_overrides,
    positive_integer,
    say,
)

if TYPE_CHECKING:
    from nemorl.serve.app import Listening

MAX_SEQUENCE_TOKENS = 4096  # of a model folder, where nothing else is asked for
MAX_SESSIONS, IDLE_SECONDS = 256, 3600.0  # of environments
_ENDPOINT_OPTIONS = {
    "--host": "generation.endpoint.host",
    "--port": "generation.endpoint.port",
    "--api-key-env": "generation.endpoint.api_key_env",
}


def register(commands: Commands) -> None:
    help_text = "serve a model through an OpenAI-compatible API, scores of a reward model, or environments"
    serve = add_command(commands, "serve", _serve, help_text)
    target_help = f"{EXPERIMENT_HELP}, model folder or id of a model on the Hugging Face hub; with "
    target_help += "`reward` before it, that of a reward model; with `env` before it, experiment file or "
    target_help += "name of an environment"
    serve.add_argument("target", type=Path, metavar="[reward|env] CONFIG_OR_MODEL", help=target_help)
    add_overrides(serve)
    for option, field in _ENDPOINT_OPTIONS.items():
        serve.add_argument(option, metavar="VALUE", help=f"sets {field}")
    sessions_help = f"episodes at a time of each environment (default: {MAX_SESSIONS}); others wait"
    serve.add_argument(
        "--sessions", type=positive_integer, default=MAX_SESSIONS, metavar="N", help=sessions_help
    )
    idle_help = f"seconds without a call after which an episode ends (default: {IDLE_SECONDS:g})"
    serve.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS, metavar="S", help=idle_help)


def _serve(arguments: Namespace) -> int:
    target, overrides = arguments.target, [*arguments.overrides]
    for option, field in _ENDPOINT_OPTIONS.items():
        if (value := getattr(arguments, option.removeprefix("--").replace("-", "_"))) is not None:
            overrides.append(f"{field}={value}")
    if str(target) == "env" and overrides and "=" not in overrides[0]:
        return _serve_environments(overrides[0], overrides[1:], arguments.sessions, arguments.idle_seconds)
    scores = str(target) == "reward" and bool(overrides) and "=" not in overrides[0]
    if scores:
        target, overrides = Path(overrides[0]), overrides[1:]
    if is_hub_id(target) and target.suffix not in SUFFIXES and not is_name(target):
        try:
            target = fetch_model(str(target))
        except HubError as error:
            raise ConfigError(str(target), [Problem("", str(target), str(error))]) from error
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
    from nemorl.session.endpoints import serve, serve_rewards  # aiohttp and Ray: not before the checks

    experiment = experiment.model_copy(update={"run_dir": experiment.run_dir / "serve"})
    run_to_end((serve_rewards if scores else serve)(experiment, _announce))
    return ExitCode.WELL


def _announce(at: "Listening") -> None:
    say(f"endpoint: {at.url}")
    if at.generated:
        say(f"key: {at.api_key}")


def _serve_environments(target: str, overrides: Sequence[str], max_sessions: int, idle_seconds: float) -> int:
    experiment = experiment_of(target, overrides)
    from nemorl.serve.environments import serve_environments  # aiohttp

    factories = {name: factory_of(one, here=True) for name, one in experiment.env.environments.items()}
    endpoint = experiment.generation.endpoint or EndpointConfig()
    run_to_end(serve_environments(factories, endpoint, max_sessions, idle_seconds, _announce))
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
