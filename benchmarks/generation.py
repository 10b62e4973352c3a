"""How many tokens per second does each engine sample, compared with transformers' `generate`?

    python benchmarks/generation.py [--model models/smollm2] [--engines torch vllm] [--rounds 3] [--json PATH]

The same prompts, greedy, at several batch sizes: all completions of one length, and with stops as ragged as
those of rollouts; and prompts that repeat a phrase, of those tried the ones whose phrase the model
continues. Only requested tokens count; what a padded batch computes beyond a row's stop does not.
Each engine has its own process with all threads, and they take turns. Before anything is timed the first
tokens of every completion must be those of transformers.
"""

import argparse
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import publish, table_of
from generation_sides import (
    Sampled,
    Setting,
    Work,
    equal_work,
    phrase_work,
    ragged_work,
    repetitive_work,
    start,
)
from processes import Processes
from rich.console import Console

from nemorl.models.registry import load_shape

BASE = "transformers"
ENGINES = ["transformers-batching", "torch", "torch+lookup", "vllm", "vllm-bare", "megatron"]
# Of the tokens compared; logits of equal height to the last bit may fall either way.
AGREEMENT = 0.95
# Candidates for each repetitive prompt; those with the most repetitive completions are taken.
_CANDIDATES = 4


def agreement(ours: Sampled, theirs: Sampled) -> float:
    """Share of rows whose first eight tokens are the same."""
    equal = [a[:8] == b[:8] for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    return sum(equal) / len(equal)


def check_agreement(seen: Mapping[str, Sampled], work: Work) -> None:
    """Raise RuntimeError unless all engines sample as many tokens as asked for, and the same ones."""
    for engine, sampled in seen.items():
        if [len(row) for row in sampled.tokens] != list(work.lengths):
            raise RuntimeError(f"{engine} sampled other numbers of tokens than it was asked for")
        if (share := agreement(sampled, seen[BASE])) < AGREEMENT:
            raise RuntimeError(
                f"{engine} begins {1 - share:.0%} of its completions otherwise than transformers, so its "
                "times cannot be compared"
            )


def measure(processes: Processes, engines: Sequence[str], work: Work, rounds: int) -> list[dict[str, Any]]:
    """A row of metrics for each engine; an uncounted first round warms up and must agree."""
    check_agreement({engine: processes.call(engine, work) for engine in engines}, work)
    seen: dict[str, list[float]] = {engine: [] for engine in engines}
    for number in range(rounds):
        first = number % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            seen[engine].append(processes.call(engine, work).seconds)
    return [
        {
            "engine": engine,
            "batch": len(work.lengths),
            "stops": work.name,
            "tokens": work.num_tokens,
            "seconds": statistics.median(seconds),
            "tokens_per_second": work.num_tokens / statistics.median(seconds),
            "speed_over_transformers": statistics.median(
                theirs / ours for ours, theirs in zip(seconds, seen[BASE], strict=True)
            ),
        }
        for engine, seconds in seen.items()
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    engines_help = "torch, vllm, megatron, with +lookup for drafts; transformers-batching; vllm-bare"
    parser.add_argument("--engines", nargs="+", default=ENGINES, help=engines_help)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=32, help="of a completion; the median where ragged")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--json", type=Path, help="also write the metrics to this file")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        parser.error(f"{arguments.model} is no model: nemorl models fetch smollm2 {arguments.model}")
    setting = Setting(
        arguments.model,
        arguments.device,
        "float32" if arguments.device == "cpu" else "bfloat16",
        arguments.threads,
        max(arguments.batches),
    )
    vocabulary = load_shape(setting.model).vocab_size
    engines = [BASE, *arguments.engines]
    load = os.getloadavg()
    rows = []
    with ExitStack() as stack:
        processes = Processes(partial(start, setting), stack)
        for batch in arguments.batches:
            sizes = batch, arguments.tokens, vocabulary
            candidates = phrase_work(_CANDIDATES * batch, *sizes[1:])
            repetitive = repetitive_work(candidates, processes.call(BASE, candidates), batch)
            for work in (equal_work(*sizes), ragged_work(*sizes), repetitive):
                rows += measure(processes, engines, work, arguments.rounds)
                Console().print(f"{work.name} stops, batch of {batch}: done")
    path = publish(
        "generation",
        {
            "setting": {"precision": setting.precision, "threads": setting.threads},
            "load_before_and_after": [load, os.getloadavg()],
            "rows": rows,
        },
        table_of("sampling, greedy", rows),
    )
    if arguments.json:
        shutil.copy(path, arguments.json)


if __name__ == "__main__":
    main()
