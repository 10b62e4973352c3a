"""`nemorl plan`: the possible layouts of an experiment, before anything starts."""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict

from rich.table import Table

from nemorl.commands.terminal import notes, output, say, table
from nemorl.config.load import load_experiment
from nemorl.errors import NemorlError
from nemorl.models.registry import load_shape
from nemorl.plan.layouts import ORDER, LayoutChoice, list_layouts
from nemorl.plan.machine import read_machine
from nemorl.plan.memory import memory_parts

from .terminal import add_experiment

HELP = "list the parallel layouts of a model with their memory"

# The parts of the memory that have a column of their own, and its header.
_PARTS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "reference": "ref",
    "activations": "activ",
    "logits": "logits",
}
_ROWS = 40
_WIDTH = 120  # a narrower terminal breaks the lines, which beats breaking words


def add_arguments(parser: ArgumentParser) -> None:
    """One sub-command for each thing that can be planned."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    help_text = f"list every valid layout of the policy on a number of devices. {ORDER}"
    layouts = commands.add_parser(
        "layouts", help="list the valid layouts of the policy", description=help_text
    )
    add_experiment(layouts)
    layouts.add_argument("--gpus", type=_devices, required=True, metavar="N", help="devices of the policy")
    layouts.add_argument(
        "--memory-gb",
        type=_size,
        metavar="GB",
        help="memory of a device in 10^9 bytes, less what must stay free; default: that of this "
        "machine's smallest GPU",
    )
    layouts.add_argument("--json", action="store_true", help="print all values as JSON, sizes in bytes")
    layouts.set_defaults(action=_layouts)


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    arguments.action(arguments)
    return 0


def _layouts(arguments: Namespace) -> None:
    experiment = load_experiment(arguments.config, arguments.overrides)
    shape = load_shape(experiment.policy.model_path)
    choices = list_layouts(experiment, shape, arguments.gpus, _memory_bytes(arguments))
    if not choices:
        raise NemorlError(
            f"no layout of {experiment.policy.model_path} takes {arguments.gpus} devices: tensor parallelism "
            f"divides its {shape.num_attention_heads} heads and {shape.num_key_value_heads} key-value heads, "
            f"pipeline parallelism its {shape.num_layers} layers, data parallelism the sequences of an "
            "optimizer step; try another number"
        )
    if arguments.json:
        say(json.dumps([_as_json(choice) for choice in choices], indent=2))
        return
    console = output()
    console.width = max(console.width, _WIDTH)
    console.print(_table(choices[:_ROWS]))
    more = f", the first {_ROWS} are shown (--json gives all)" if len(choices) > _ROWS else ""
    notes().print(f"{len(choices)} layouts{more}. {ORDER}", markup=False)


def _devices(text: str) -> int:
    """For argparse, which makes a wrong usage of the error."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ArgumentTypeError(f"{text!r}: a device has more than 0 GB")
    return size


def _memory_bytes(arguments: Namespace) -> int | None:
    if arguments.memory_gb is not None:
        return int(arguments.memory_gb * 1e9)
    return min((gpu.memory_bytes for gpu in read_machine().gpus), default=None)


def _as_json(choice: LayoutChoice) -> dict[str, object]:
    memory = asdict(choice.memory)
    return {
        "layout": choice.layout.model_dump(exclude_defaults=True),
        "fits": choice.fits,
        "memory": {part: memory[part] for part in memory_parts()},
        "memory_on_device": choice.memory.on_device,
        "bytes_per_token": choice.bytes_per_token,
        "idle": round(choice.idle, 4),
    }


def _table(choices: list[LayoutChoice]) -> Table:
    """A row for each layout."""
    parts = [part for part in _PARTS if any(getattr(choice.memory, part) for choice in choices)]
    title = "Layouts on GPUs; memory of the fullest in GB: weights exact, the rest estimated"
    result = table(
        title, ["layout", "fits", "in all", *(_PARTS[part] for part in parts), "other", "kB/token", "idle"]
    )
    for column in result.columns:
        column.no_wrap = True
        column.justify = "left" if column is result.columns[0] else "right"
    for choice in choices:
        sizes = [getattr(choice.memory, part) for part in parts]
        whole = choice.memory.on_device
        result.add_row(
            choice.layout.name,
            {True: "yes", False: "no", None: "?"}[choice.fits],
            *map(_gigabytes, (whole, *sizes, whole - sum(sizes))),
            f"{choice.bytes_per_token / 1000:.0f}",
            f"{choice.idle:.0%}",
        )
    return result


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"
