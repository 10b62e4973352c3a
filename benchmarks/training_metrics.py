"""What `training.py` says of measured steps: ratios, bounds and the rows of its tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import Timing
from training_sides import Metrics
from training_work import Work

LIMITS = {"overhead": 0.05, "speed": 1.5}
RATIOS = ("seconds_over_ours", "best_seconds_over_our_best", "cpu_seconds_over_ours")


def summary(
    side: str, seen: Sequence[Metrics], ours: Sequence[Metrics], work: Work, flops: float, peak: float | None
) -> dict[str, Any]:
    """One side's metrics compared with ours; a ratio above 1 says that we are faster."""
    seconds, mine = (Timing("", tuple(f.span.seconds for f in metrics)) for metrics in (seen, ours))
    cpu, my_cpu = (Timing("", tuple(f.span.cpu_seconds for f in metrics)) for metrics in (seen, ours))
    ratios = [a / b for a, b in zip(seconds.seconds, mine.seconds, strict=True)]
    return {
        "side": side,
        "seconds": seconds.median,
        "seconds_by_round": seconds.seconds,
        "cpu_seconds": cpu.median,
        "optimizer_seconds": statistics.median(f.optimizer.seconds for f in seen),
        "tokens_computed": seen[0].num_computed,
        "tokens_computed_over_ours": seen[0].num_computed / ours[0].num_computed,
        "tokens_per_second": work.num_tokens / seconds.median,
        "flops_per_second": flops / seconds.median,
        "mfu": None if peak is None else flops / seconds.median / peak,
        "seconds_over_ours": seconds.ratio_to(mine),
        "seconds_over_ours_range": [min(ratios), max(ratios)],
        "median_seconds_over_our_median": seconds.median / mine.median,
        # Other work on the machine only ever adds: with much of it, the best rounds say most.
        "best_seconds_over_our_best": min(seconds.seconds) / min(mine.seconds),
        "cpu_seconds_over_ours": cpu.ratio_to(my_cpu),
        "before_bytes": max(f.memory.before_bytes for f in seen),
        "peak_bytes": max(f.memory.peak_bytes for f in seen),
        "work_bytes": max(f.memory.work_bytes for f in seen),
        "loss": seen[0].loss,
        "grad_norm": seen[0].grad_norm,
    }


def table_row(side: Mapping[str, Any]) -> dict[str, object]:
    """What of a summary people look at first."""
    low, high = side["seconds_over_ours_range"]
    return {
        "side": side["side"],
        "seconds": side["seconds"],
        "computed": side["tokens_computed"],
        "tokens/s": side["tokens_per_second"],
        **({} if side["mfu"] is None else {"MFU": side["mfu"]}),
        "over ours": f"{side['seconds_over_ours']:.3f} ({low:.3f} to {high:.3f})",
        "peak GB": side["peak_bytes"] / 1e9,
        "step GB": side["work_bytes"] / 1e9,
    }


def verdict(ragged: Mapping[str, Any], equal: Mapping[str, Any]) -> list[dict[str, object]]:
    """The bounds next to the results: by rounds, by the best rounds, and in CPU seconds."""
    sides = {
        (name, side["side"]): side
        for name, measured in (("ragged", ragged), ("equal", equal))
        for side in measured["sides"]
    }
    rows = []
    for name, side in (
        ("ragged", "megatron"),
        ("equal", "megatron"),
        ("equal", "megatron-stock"),
        ("ragged", "transformers"),
    ):
        seen = [sides[name, side][metric] for metric in RATIOS]
        what, bound = f"speed over {side}, {name} lengths", f">= {LIMITS['speed']}"
        if side != "transformers":
            what, bound = f"overhead over {side}, {name} lengths", f"<= {LIMITS['overhead']}"
            seen = [1 / ratio - 1 for ratio in seen]
        rows.append({"what": what, "bound": bound, "seen": seen[0], "best rounds": seen[1], "CPU": seen[2]})
    return rows
