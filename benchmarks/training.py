"""How fast is our packed training step against raw Megatron and padded transformers, and how does it scale?

    python benchmarks/training.py [--model models/smollm2] [--rounds 5] [--json PATH]

Overhead: our step against Megatron's own forward and backward on the same tokens. Packing: our step against
transformers with padding, on sequences whose lengths vary as those of rollouts do. Groups: our step with the
prompt of a group computed once against both, over lengths of the prompt. Growth: our step over sequence
lengths and batch sizes. `training_sides.py` defines the sides; loss and gradient norm of all
must agree before anything is timed. Each side has its own process and they take turns. Times
cover forward and backward with everything around them, without the optimizer.

Without the model's folder a random one of the same width and fewer layers is made (`--layers`).
"""

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import publish, table_of
from meter import peak_flops
from processes import Processes
from rich.console import Console
from training_metrics import summary, table_row, verdict
from training_sides import Metrics, Setting, run_step, start
from training_work import (
    COMPLETION_LIMIT,
    COMPLETION_MEDIAN,
    COMPLETION_SIGMA,
    GROUP,
    PROMPT_TOKENS,
    Work,
    equal_work,
    group_work,
    growth,
    padding_waste,
    rollout_work,
    training_flops,
)

from nemorl.models.registry import load_shape

# Relative differences of loss and gradient norm that the sides may have. With random tokens the norm of a
# trained model differs by up to 1.3e-4 between divisions into micro-batches; bfloat16 keeps 8 bits.
TOLERANCE = {"float32": 3e-4, "bfloat16": 2e-2}
OURS = "nemorl"
GROWTH_ROUNDS = 3
GROUP_LIMIT = 128  # tokens of an answer in a group


@dataclass(frozen=True)
class Comparison:
    """Sides that train on the same work in turns, ours first."""

    title: str
    work: Work
    sides: tuple[str, ...]


def ready(setting: Setting, name: str) -> Callable[[Work, str], Metrics]:
    """A side's steps, for its process."""
    return partial(run_step, setting, start(name, setting))


def step(processes: Processes, side: str, work: Work) -> Metrics:
    """One step of a side; variants of it share a process."""
    name, _, variant = side.partition(":")
    return processes.call(name, work, variant)  # type: ignore[no-any-return]


def check_agreement(metrics: Mapping[str, Metrics], tolerance: float) -> None:
    """Raise RuntimeError unless loss and gradient norm of all sides are ours, within a relative tolerance."""
    ours = metrics[OURS]
    for side, theirs in metrics.items():
        for what, mine, other in (
            ("loss", ours.loss, theirs.loss),
            ("gradient norm", ours.grad_norm, theirs.grad_norm),
        ):
            if not abs(other - mine) <= tolerance * abs(mine):
                raise RuntimeError(
                    f"{side} has the {what} {other:.8g}, ours is {mine:.8g}: the sides do not compute the "
                    f"same (relative tolerance {tolerance:g}), so their times cannot be compared"
                )


def compare(
    processes: Processes, comparison: Comparison, rounds: int, tolerance: float
) -> dict[str, list[Metrics]]:
    """Metrics of every side and round; an uncounted first round warms up and must agree."""
    sides = comparison.sides
    check_agreement({side: step(processes, side, comparison.work) for side in sides}, tolerance)
    seen: dict[str, list[Metrics]] = {side: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            seen[side].append(step(processes, side, comparison.work))
    return seen


def measure_comparison(
    setting: Setting, comparison: Comparison, rounds: int, console: Console
) -> dict[str, Any]:
    """All sides of a comparison, with a table."""
    shape = load_shape(setting.model)
    work, peak = comparison.work, peak_flops(setting.device)
    flops = training_flops(shape, work)
    with ExitStack() as stack:
        seen = compare(
            Processes(partial(ready, setting), stack), comparison, rounds, TOLERANCE[setting.precision]
        )
    sides = [summary(side, metrics, seen[OURS], work, flops, peak) for side, metrics in seen.items()]
    console.print(table_of(comparison.title, [table_row(side) for side in sides]))
    count = len(work.packed(shape.hidden_size))
    return {
        "lengths": work.lengths,
        "tokens": work.num_tokens,
        "trained_tokens": work.num_trained,
        "micro_batches": count,
        "flops": flops,
        "padding_waste": padding_waste(work.lengths, work.chunks(count, by_length=False)),
        "padding_waste_sorted": padding_waste(work.lengths, work.chunks(count, by_length=True)),
        "sides": sides,
    }


def measure_growth(setting: Setting, title: str, works: Sequence[Work], console: Console) -> dict[str, Any]:
    """Our step on works that grow, in a process of its own; exponents of time and memory over tokens."""
    shape = load_shape(setting.model)
    with ExitStack() as stack:
        processes = Processes(partial(ready, setting), stack)
        step(processes, OURS, works[0])  # warms up
        # From small to large, so that memory which the process keeps from one step hides no larger peak.
        rounds = [[step(processes, OURS, work) for work in works] for _ in range(GROWTH_ROUNDS)]
    points = [
        {
            "sequences": len(work.lengths),
            "length": work.lengths[0],
            "tokens": work.num_tokens,
            "seconds": statistics.median(f.span.seconds for f in seen),
            "cpu_seconds": statistics.median(f.span.cpu_seconds for f in seen),
            "tokens_per_second": work.num_tokens / statistics.median(f.span.seconds for f in seen),
            "work_bytes": max(f.memory.work_bytes for f in seen),
            "peak_bytes": max(f.memory.peak_bytes for f in seen),
            "flops": training_flops(shape, work),
        }
        for work, seen in zip(works, zip(*rounds, strict=True), strict=True)
    ]
    tokens = [point["tokens"] for point in points]
    exponents = {
        what: growth(tokens, [point[what] for point in points])
        for what in ("seconds", "cpu_seconds", "work_bytes", "flops")
    }
    console.print(
        table_of(
            f"{title}: as tokens to the power of {exponents['seconds']:.2f} in seconds, "
            f"{exponents['cpu_seconds']:.2f} in CPU seconds, {exponents['flops']:.2f} in operations, "
            f"{exponents['work_bytes']:.2f} in memory of the step",
            [
                {
                    "sequences": point["sequences"],
                    "length": point["length"],
                    "seconds": point["seconds"],
                    "tokens/s": point["tokens_per_second"],
                    "peak GB": point["peak_bytes"] / 1e9,
                    "step GB": point["work_bytes"] / 1e9,
                }
                for point in points
            ],
        )
    )
    (first, *_, last) = points
    added = (last["work_bytes"] - first["work_bytes"]) / (last["tokens"] - first["tokens"])
    return {"points": points, "exponents_over_tokens": exponents, "work_bytes_of_another_token": added}


def smollm2_config(layers: int) -> Any:
    """SmolLM2-135M's, of transformers, with other layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def random_model(folder: Path, layers: int) -> None:
    """SmolLM2-135M's shape with fewer layers and random weights."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(smollm2_config(layers)).save_pretrained(folder)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--layers", type=int, default=8, help="of a random model, where --model is missing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each comparison")
    parser.add_argument("--sequences", type=int, default=16, help="with the lengths of rollouts")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 256, 1024], help="of groups")
    parser.add_argument("--group-tokens", type=int, default=4096, help="of a micro-batch of groups")
    parser.add_argument("--only-groups", action="store_true", help="skip the other comparisons")
    parser.add_argument("--length", type=int, default=128, help="of sequences of equal length")
    parser.add_argument("--growth", type=int, default=8, help="largest factor of length and batch")
    parser.add_argument("--json", type=Path, help="also write the metrics to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model
        if not model.exists():
            model = Path(temporary) / "model"
            random_model(model, arguments.layers)
        setting = Setting(
            model,
            arguments.device,
            "float32" if arguments.device == "cpu" else "bfloat16",
            arguments.threads,
            max(
                PROMPT_TOKENS[1] + COMPLETION_LIMIT,
                arguments.length * arguments.growth,
                *(prompt + GROUP_LIMIT for prompt in arguments.prompts),
            ),
        )
        report(setting, arguments)


def report(setting: Setting, arguments: argparse.Namespace) -> None:
    """All comparisons and growths in one file, and the bounds next to the results."""
    console = Console(width=max(100, Console().width))  # a pipe counts as 80 columns
    shape = load_shape(setting.model)
    budget, length, vocabulary = arguments.micro_batch_tokens, arguments.length, shape.vocab_size
    ragged = Comparison(
        "lengths of rollouts",
        rollout_work(arguments.sequences, budget, vocabulary),
        (OURS, "nemorl:grpo", "megatron", "transformers", "transformers:sorted"),
    )
    equal = Comparison(
        "equal lengths",
        equal_work(max(1, budget // length // 2), length, budget, vocabulary),
        (OURS, "megatron", "megatron-stock", "transformers"),
    )
    factors = [2**k for k in range(arguments.growth.bit_length())]
    grown = {
        "length": [equal_work(1, length * n, length * n, vocabulary) for n in factors],
        "batch": [equal_work(n, length, length * n, vocabulary) for n in factors],
        "batch_in_micro_batches": [equal_work(n, length, length, vocabulary) for n in factors],
    }
    load = os.getloadavg()
    groups = {
        f"prompts_of_{prompt}": measure_comparison(
            setting,
            Comparison(
                f"{num_groups} groups of {GROUP} with prompts of {prompt} tokens",
                group_work(num_groups, prompt, GROUP_LIMIT, arguments.group_tokens, vocabulary),
                (OURS, "nemorl:separate", "transformers:sorted"),
            ),
            arguments.rounds,
            console,
        )
        for prompt in arguments.prompts
        for num_groups in [max(1, 256 // prompt)]
    }
    if arguments.only_groups:
        facts = {**asdict(setting), "model": str(arguments.model), "layers": shape.num_layers}
        loads = [load, os.getloadavg()]
        rows = [
            {"prompts": name, "side": side["side"], "computed": side["tokens_computed"],
             "seconds": side["seconds"], "over ours": side["seconds_over_ours"],
             "tokens over ours": side["tokens_computed_over_ours"]}
            for name, measured in groups.items() for side in measured["sides"]
        ]  # fmt: skip
        publish(
            "training_groups",
            {"setting": facts, "load_before_and_after": loads, "groups": groups},
            table_of("groups", rows),
        )
        return
    measured = {
        "ragged": measure_comparison(setting, ragged, arguments.rounds, console),
        "equal": measure_comparison(setting, equal, arguments.rounds, console),
        "growth": {
            name: measure_growth(setting, f"growth of {name.replace('_', ' ')}", works, console)
            for name, works in grown.items()
        },
    }
    verdicts = verdict(measured["ragged"], measured["equal"])
    path = publish(
        "training",
        {
            "setting": {**asdict(setting), "model": str(arguments.model), "layers": shape.num_layers},
            "load_before_and_after": [load, os.getloadavg()],
            "rollout_lengths": {
                "prompt_tokens_uniform": PROMPT_TOKENS,
                "completion_log_normal": {"median": COMPLETION_MEDIAN, "sigma": COMPLETION_SIGMA},
                "completion_limit": COMPLETION_LIMIT,
            },
            "verdicts": verdicts,
            **measured,
        },
        table_of("bounds", verdicts),
    )
    if arguments.json:
        shutil.copy(path, arguments.json)


if __name__ == "__main__":
    main()
