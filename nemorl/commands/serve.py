"""`nemorl serve`: an OpenAI-compatible server over the engines of an experiment, or over a model."""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from nemorl.commands.arguments import add_overrides
from nemorl.commands.preflight import Ready, prepare
from nemorl.commands.terminal import say
from nemorl.errors import ConfigError, Violation
from nemorl.plan.machine import read_machine

HELP = "answer requests of OpenAI's API with the model of an experiment, or with a model folder"

LONGEST_SEQUENCE = 4096  # of a model folder, where nothing else is asked for


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "target", type=Path, metavar="CONFIG_OR_MODEL", help="experiment file (YAML), or a model's folder"
    )
    add_overrides(parser)


def run(arguments: Namespace) -> int:
    """Serves until the process is told to end. Raises NemorlError."""
    if arguments.target.is_dir():
        with tempfile.TemporaryDirectory(prefix="nemorl-serve-") as scratch:
            ready = _prepare(_experiment_of(arguments.target, Path(scratch)), arguments.overrides)
    else:
        ready = _prepare(arguments.target, arguments.overrides)
    from nemorl.serve.server import Listening  # aiohttp and Ray: not before the checks
    from nemorl.session.serving import serve

    def tell(at: Listening) -> None:
        say(f"endpoint: {at.url}")
        if at.generated:
            say(f"key: {at.api_key}")

    folder = ready.experiment.run_dir / "serve"
    serve(ready.experiment.model_copy(update={"run_dir": folder}), tell)
    return 0


def _prepare(path: Path, overrides: list[str]) -> Ready:
    ready = prepare(path, overrides, read_machine(), training=False, measuring=False, serving=True)
    generation = ready.experiment.generation
    if not generation.has_engines:
        mend = "a policy that samples by itself serves nobody else: name a back end that has engines"
        raise ConfigError(str(path), [Violation("generation.backend", generation.backend, mend)])
    return ready


def _experiment_of(model: Path, folder: Path) -> Path:
    """An experiment file with this model. What it says of data and algorithm is for form's sake."""
    config = model / "config.json"
    if not config.is_file():
        mend = "this folder has no config.json: name a model's folder, or an experiment file"
        raise ConfigError(str(model), [Violation("", str(model), mend)])
    known = json.loads(config.read_text(encoding="utf-8"))
    positions = known.get("max_position_embeddings", LONGEST_SEQUENCE)
    length = min(positions, LONGEST_SEQUENCE)
    kept = known.get("dtype", known.get("torch_dtype"))
    precision = {"precision": kept} if kept in ("float32", "bfloat16") else {}
    tree = {
        "run_dir": "runs/serve",
        "policy": {
            "model_path": str(model),
            "max_sequence_length": length,
            "micro_batch_tokens": length,
            **precision,
        },
        "generation": {"max_new_tokens": length - 1},
        "data": {"chat": False, "train": {"name": "arithmetic", "digits": 1, "size": 1}},
        "algorithm": {"name": "sft", "num_steps": 1, "batch_size": 1},
    }
    path = folder / f"{model.absolute().name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path
