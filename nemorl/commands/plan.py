"""`nemorl plan`: the possible layouts of an experiment, before anything starts."""

import json
import math
from argparse import Namespace
from dataclasses import asdict

from rich.table import Table

from nemorl.config.base import counted
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, UsageError
from nemorl.models.hub import with_local_models
from nemorl.models.registry import load_shape
from nemorl.plan.layouts import ORDER, LayoutChoice, list_layouts
from nemorl.plan.machine import read_machine
from nemorl.plan.memory import MEMORY_PARTS

from . import terminal
from .terminal import Commands, ExitCode, say

# The parts of the memory that have a column of their own, and the short headers of some.
_PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits")
_SHORT = {"gradients": "grads", "optimizer": "optim", "reference": "ref", "activations": "activ"}
_ROWS = 40
_WIDTH = 120  # a narrower terminal breaks the lines, which beats breaking words


def register(commands: Commands) -> None:
    group = terminal.add_group(commands, "plan", "estimate the memory of a model's parallel layouts")
    layouts = terminal.add_command(group, "layouts", _layouts, "list the policy's valid parallel layouts")
    layouts.description = f"list all valid parallel layouts of the policy on N devices. {ORDER}"
    terminal.add_experiment(layouts)
    gpus_help = "number of devices for the policy"
    layouts.add_argument("--gpus", type=terminal.positive_integer, required=True, metavar="N", help=gpus_help)
    memory_help = "available memory of a device in GB (10^9 bytes); default: this machine's smallest GPU"
    layouts.add_argument("--memory-gb", type=terminal.positive_number, metavar="GB", help=memory_help)
    layouts.add_argument("--json", action="store_true", help="print all values as JSON, with sizes in bytes")


def _layouts(arguments: Namespace) -> int:
    experiment, absent = with_local_models(load_experiment(arguments.config, arguments.overrides))
    if absent:
        raise ConfigError(str(arguments.config), absent)
    shape = load_shape(experiment.policy.model_path)
    memory_bytes = min((gpu.memory_bytes for gpu in read_machine().gpus), default=None)
    if arguments.memory_gb is not None:
        memory_bytes = int(arguments.memory_gb * 1e9)
    choices = list_layouts(experiment, shape, arguments.gpus, memory_bytes)
    if not choices:
        problem = f"no layout of {experiment.policy.model_path} takes {arguments.gpus} devices"
        heads = f"{shape.num_attention_heads} heads and {shape.num_key_value_heads} key-value heads"
        rules = f"tensor parallelism divides its {heads}, pipeline parallelism its {shape.num_layers} layers"
        data = "data parallelism the sequences of an optimizer step; try another number"
        raise UsageError(f"{problem}: {rules}, {data}")
    if arguments.json:
        say(json.dumps([_as_json(choice) for choice in choices], indent=2))
        return ExitCode.WELL
    console = terminal.output()
    console.width = max(console.width, _WIDTH)
    console.print(_table(choices[:_ROWS]))
    more = f", the first {_ROWS} are shown (--json gives all)" if len(choices) > _ROWS else ""
    unknown = "" if memory_bytes else " This machine has no GPU: give --memory-gb to see which fit."
    terminal.notes().print(f"{counted(len(choices), 'layout')}{more}. {ORDER}{unknown}", markup=False)
    return ExitCode.WELL


def _as_json(choice: LayoutChoice) -> dict[str, object]:
    memory = asdict(choice.memory)
    return {
        "layout": choice.layout.model_dump(exclude_defaults=True),
        "fits": choice.fits,
        "memory": {part: memory[part] for part in MEMORY_PARTS},
        "memory_on_device": choice.memory.on_device,
        "bytes_per_token": choice.bytes_per_token,
        "idle": round(choice.idle, 4),
    }


def _table(choices: list[LayoutChoice]) -> Table:
    parts = [part for part in _PARTS if any(getattr(choice.memory, part) for choice in choices)]
    title = "Layouts on GPUs; memory of the fullest in GB: weights exact, the rest estimated"
    headers = [_SHORT.get(part, part) for part in parts]
    result = terminal.table(title, ["layout", "fits", "in all", *headers, "other", "kB/token", "idle"])
    for column in result.columns:
        column.no_wrap = True
        column.justify = "left" if column is result.columns[0] else "right"
    for choice in choices:
        sizes = [getattr(choice.memory, part) for part in parts]
        whole = choice.memory.on_device
        fits = {True: "yes", False: "no", None: "?"}[choice.fits]
        memory = (_digits(size / 1e9) for size in (whole, *sizes, whole - sum(sizes)))
        traffic, idle = _digits(choice.bytes_per_token / 1000), f"{choice.idle:.0%}"
        result.add_row(choice.layout.name, fits, *memory, traffic, idle)
    return result


def _digits(number: float) -> str:
    """At least two significant digits, and one decimal: `1234.5`, `12.3`, `0.012`; `0` for none."""
    decimals = max(1, 1 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:.{decimals}f}"
