"""What does a refit cost: bytes, seconds and memory against a broadcast, with changes only, and the plan?

Five parts:

- ways: the same processes hand over the same bfloat16 weights by our exchange (shared memory, gloo, files),
  and by gathering each HF tensor on policy rank 0 and broadcasting it whole to every engine rank (gloo).
- stages: what an update of the embedded engine with SmolLM2 consists of, through shared memory.
- overlap: what overlapping a refit with the optimizer step before it can save at most, with SmolLM2.
- delta: refits that carry only what changed, after AdamW's steps on a language model's loss.
- plan: the transfer plan of DeepSeek-V3 from 1,024 policy ranks to 512 engine ranks, from metadata alone.
"""

import argparse
import asyncio
import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import publish, table_of, time_in_turns
from refit_models import DEEPSEEK_V3, DENSE, DTYPE, MOE, layouts_of, shape_of
from refit_overlap import RANKS as OVERLAP_RANKS
from refit_overlap import WAYS, Way
from refit_ranks import CHECKED_ON_GPUS, LESS_CHECKED, TRANSPORTS, Gathering, Ranks, Side
from safetensors.torch import save_file

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, hf_tensors, policy_rank
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.exchange import RefitStats, TransportOptions, WeightExchange
from nemorl.weights.messages import ITEM_BYTES, ReceiverLayout, Transport
from nemorl.weights.plan import plan_files, plan_transfers

BUCKET_BYTES = 8 * 2**20
PLAN_BUCKET_BYTES = 64 * 2**20  # what runs have when nothing is said
GATHER, SAVE = "gather and broadcast", "gather and save"
Row = dict[str, Any]  # of a table
SHOWN = {  # columns of each part's table, by key
    "ways": {
        "case": "case",
        "way": "way",
        "megabytes_sent": "MB",
        "bytes_over_shards": "of shards",
        "median_seconds": "s",
        "over_gather_and_broadcast": "ratio",
        "over_gather_and_save": "to saving",
        "cpu_seconds": "CPU s",
        "peak_megabytes_of_a_sender": "policy",
        "peak_megabytes_of_a_receiver": "engine",
    },
    "stages": {"stage": "stage", "median_seconds": "s"},
    "overlap": {"way": "way", "median_seconds": "s", "over_after": "ratio", "step_seconds": "step s"},
    "delta": {
        "type": "type",
        "way": "way",
        "step": "step",
        "changed_percent": "changed %",
        "megabytes_sent": "MB",
        "of_whole_percent": "of whole %",
        "refit_seconds": "s",
        "megabytes_kept": "MB kept",
    },
    "plan": {
        "receivers": "engine ranks",
        "transfers": "boxes",
        "buckets": "buckets",
        "plan_seconds": "s",
        "plan_cpu_seconds": "CPU s",
        "with_parts_seconds": "parts, s",
        "with_parts_cpu_seconds": "CPU s too",
        "boxes_in_files": "boxes, files",
        "files_plan_cpu_seconds": "files, CPU s",
    },
}
PARTS = tuple(SHOWN)


@dataclass(frozen=True)
class Case:
    """A policy's layout, and the layouts of an engine's replicas."""

    name: str
    shape: ModelShape
    policy: LayoutConfig
    replicas: Sequence[LayoutConfig]


CASES = (
    Case(
        "TP2 x PP2 to TP2",
        shape_of(DENSE),
        LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
        [LayoutConfig(tensor_parallel_size=2)],
    ),
    Case(
        "EP2 to 2 x TP1",
        shape_of(MOE),
        LayoutConfig(data_parallel_size=2, expert_parallel_size=2),
        [LayoutConfig()] * 2,
    ),
)
DELTA_CASE = CASES[0]


def write_random(shape: ModelShape, folder: Path) -> None:
    """An HF folder of a model's weights."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {n: 0.02 * torch.randn(size, generator=generator) for n, size in hf_tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors")


def settle(case: Case, policy: Ranks, engines: Ranks, dtype: str) -> None:
    """Give every process its place."""
    policy.active = case.policy.world_size
    places = [policy_rank(of, rank) for of in case.replicas for rank in range(of.world_size)]
    engines.active = len(places)
    policy.each("become_sender", [(case.shape, policy_rank(case.policy, n)) for n in range(policy.active)])
    engines.each("become_receiver", [(case.shape, place, dtype) for place in places])


def gathering_of(policy: Ranks, engines: Ranks) -> Gathering:
    """Who brings which box of each tensor to rank 0, each element once."""
    held, needed = (asyncio.run(Side(ranks, "files").describe()) for ranks in (policy, engines))
    shapes = {part.name: part.shape for layout in needed for part in layout.slices}
    rank_0 = ReceiverLayout(
        tuple(TensorSlice.whole(name, shape) for name, shape in shapes.items()), (DTYPE,) * len(shapes)
    )
    plan = plan_transfers(held, [rank_0], bucket_bytes=2**40)  # type: ignore[arg-type]
    tensors: dict[str, list[Any]] = {}
    for part in plan.sender_parts(policy.active):
        for bucket in part.buckets:
            for piece in bucket.slices:
                tensors.setdefault(piece.name, []).append((part.rank, piece))
    return list(tensors.items())


def measure_ways(case: Case, policy: Ranks, engines: Ranks, folder: Path, rounds: int) -> list[Row]:
    """Rows of one case."""
    settle(case, policy, engines, DTYPE)
    write_random(case.shape, folder / "model")
    policy.all("load", folder / "model")
    gathering = gathering_of(policy, engines)
    with ThreadPoolExecutor(2) as at_once:
        ways = usual_ways(case, gathering, policy, engines, folder, at_once)
        stats: dict[str, RefitStats] = {}
        for transport in TRANSPORTS:
            options = TransportOptions(transport, str(folder / f"versions, {case.name}"))
            ways[transport] = exchange_by(options, policy, engines, stats, transport)
        for name, transport in LESS_CHECKED.items():
            options = TransportOptions(transport, check_one_in=CHECKED_ON_GPUS)
            ways[name] = exchange_by(options, policy, engines, stats, name)
        peaks, cpu = {}, dict.fromkeys(ways, 0.0)
        expected = None
        for name, way in ways.items():
            engines.all("clear")
            way()  # plans are made, memory pools are filled
            expected = expected or engines.all("sums")
            assert engines.all("sums") == expected, f"{name} brings other weights"
            for side in (policy, engines):
                side.all("begin_peak")
            way()
            peaks[name] = [max(side.all("peak_bytes")) / 1e6 for side in (policy, engines)]

        def counted(name: str, way: Callable[[], object]) -> None:
            before = sum(policy.all("cpu_seconds") + engines.all("cpu_seconds"))
            way()
            cpu[name] += sum(policy.all("cpu_seconds") + engines.all("cpu_seconds")) - before

        alternatives = {name: functools.partial(counted, name, way) for name, way in ways.items()}
        timings = time_in_turns(alternatives, rounds=rounds, warm_up=0)
    whole = ITEM_BYTES[DTYPE] * sum(math.prod(shape) for shape in hf_tensors(case.shape).values())
    gathered = ITEM_BYTES[DTYPE] * sum(p.num_elements for _, pieces in gathering for r, p in pieces if r)
    sent = {name: found.num_bytes / 1e6 for name, found in stats.items()}
    sent[GATHER] = (gathered + whole * engines.active) / 1e6
    sent[SAVE] = gathered / 1e6 + sum(engines.all("shard_bytes")) / 1e6
    shards = sum(engines.all("shard_bytes")) / 1e6
    return [
        {
            "case": case.name,
            "way": name,
            "megabytes_sent": sent[name],
            "bytes_over_shards": sent[name] / shards,
            "median_seconds": timing.median,
            "over_gather_and_broadcast": timing.ratio_to(timings[GATHER]),
            "over_gather_and_save": timing.ratio_to(timings[SAVE]),
            "cpu_seconds": cpu[name] / rounds,
            "seconds": timing.seconds,
            "seconds_of_stages": dict(stats[name].seconds_of_stages) if name in stats else {},
            "peak_megabytes_of_a_sender": peaks[name][0],
            "peak_megabytes_of_a_receiver": peaks[name][1],
        }
        for name, timing in timings.items()
    ]


def usual_ways(
    case: Case,
    gathering: Gathering,
    policy: Ranks,
    engines: Ranks,
    folder: Path,
    at_once: ThreadPoolExecutor,
) -> dict[str, Callable[[], object]]:
    """Through rank 0, by a process group of all ranks, which are connected here: broadcast, or in a file."""

    def both(method: str, given: Sequence[tuple[Any, ...]]) -> None:
        calls = [
            at_once.submit(policy.each, method, given[: policy.active]),
            at_once.submit(engines.each, method, given[policy.active :]),
        ]
        for call in calls:
            call.result()

    size = policy.active + engines.active
    rendezvous = folder / f"meeting of {case.name}"
    both("join", [(rendezvous, rank, size, range(policy.active, size)) for rank in range(size)])
    saved = folder / f"saved, {case.name}"
    saved.mkdir()
    return {
        GATHER: lambda: both("gather_and_broadcast", [(gathering, DTYPE)] * size),
        SAVE: lambda: both("gather_and_save", [(gathering, DTYPE, saved)] * size),
    }


def exchange_by(
    options: TransportOptions, policy: Ranks, engines: Ranks, stats: dict[str, RefitStats], name: str
) -> Callable[[], None]:
    """Our way, which each process has by `name`, as `stats` have the last one's."""
    sides = Side(policy, name), Side(engines, name)
    exchange = WeightExchange(*sides, BUCKET_BYTES, 300.0, options)  # type: ignore[arg-type]
    versions = itertools.count(1)

    def refit() -> None:
        stats[name] = asyncio.run(exchange.refit(next(versions)))

    return refit


def measure_stages(policy: Ranks, engines: Ranks, model: Path, rounds: int) -> list[Row]:
    """Seconds of each stage with one process on each side, and of the update."""
    policy.active = engines.active = 1
    policy.all("become_sender", load_shape(model), PolicyRank())
    policy.all("load", model)
    engines.all("become_embedded_engine", model)
    stats: dict[str, RefitStats] = {}
    refit = exchange_by(TransportOptions("shared_memory"), policy, engines, stats, "shared_memory")
    refit()  # the plan is made, memory pools are filled
    measured = []
    for _ in range(rounds):
        refit()
        measured.append(stats["shared_memory"])
    seconds = {
        stage: [one.seconds_of_stages[stage] for one in measured] for stage in measured[0].seconds_of_stages
    }
    seconds["update"] = [one.seconds for one in measured]
    return [
        {
            "stage": stage,
            "median_seconds": statistics.median(values),
            "seconds": values,
            "megabytes_sent": measured[0].num_bytes / 1e6,
        }
        for stage, values in seconds.items()
    ]


def measure_overlap(policy: Ranks, engines: Ranks, model: Path, rounds: int, folder: Path) -> list[Row]:
    """Seconds of an optimizer step with the refit after it, and with all of both at the same time.

    By processes that are in no process group yet.
    """
    place = f"file://{folder / 'meeting of stepping ranks'}"
    policy.each("become_stepping_sender", [(model, rank, place) for rank in range(OVERLAP_RANKS)])
    engines.all("become_embedded_engine", model)
    refit = exchange_by(TransportOptions("shared_memory"), policy, engines, {}, "shared_memory")
    steps: dict[str, list[float]] = {way: [] for way in WAYS}

    def measured(way: Way) -> None:
        policy.all("choose", way)
        refit()
        steps[way].append(max(policy.all("step_seconds")))

    ways: dict[str, Callable[[], object]] = {way: functools.partial(measured, way) for way in WAYS}
    timings = time_in_turns(ways, rounds=rounds)
    return [
        {
            "way": way,
            "median_seconds": timing.median,
            "over_after": timing.ratio_to(timings["after the step"]),
            "step_seconds": statistics.median(steps[way][1:]),
            "seconds": timing.seconds,
        }
        for way, timing in timings.items()
    ]


def measure_delta(policy: Ranks, engines: Ranks, folder: Path, steps: int) -> list[Row]:
    """Bytes of refits after each of AdamW's steps; with files, the engines read what was written."""
    rows = []
    trained = list(_trained(folder, steps))
    cases: list[tuple[str, Transport]]
    cases = [("bfloat16", "shared_memory"), ("bfloat16", "files"), ("float32", "shared_memory")]
    for dtype, way in cases:
        settle(DELTA_CASE, policy, engines, dtype)
        url = str(folder / "versions of changes")
        options = TransportOptions(way, url, delta=True, full_version_every=steps + 1)
        sides = Side(policy, way), Side(engines, way)
        exchange = WeightExchange(*sides, BUCKET_BYTES, 300.0, options)  # type: ignore[arg-type]
        for version, (step_folder, learning_rate, changed) in enumerate(trained):
            policy.all("load", step_folder)
            stats = asyncio.run(exchange.refit(version))
            if version:
                rows.append(
                    {
                        "type": dtype,
                        "way": way.replace("_", " "),
                        "step": version,
                        "learning_rate": learning_rate,
                        "changed_percent": 100 * changed[dtype],
                        "megabytes_sent": stats.num_bytes / 1e6,
                        "of_whole_percent": 100 * stats.num_bytes / stats.num_bytes_whole,
                        "refit_seconds": stats.seconds,
                        "megabytes_kept": stats.kept_bytes / 1e6,
                    }
                )
    return rows


def _trained(folder: Path, steps: int) -> Iterator[tuple[Path, float, dict[str, float]]]:
    """Folders of weights before and after each step, the learning rate, and the changed share by type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {k: v for k, v in DENSE.items() if k not in ("architectures", "torch_dtype")}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    learning_rate = 1e-6
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    before: dict[str, Any] = {}
    for step in range(steps + 1):
        if step:
            tokens = torch.randint(0, DENSE["vocab_size"], (2, 64))
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = {name: value.detach().clone() for name, value in model.named_parameters()}
        path = folder / f"step {step}"
        path.mkdir()
        save_file(now, path / "model.safetensors")
        changed = {}
        for dtype in ("bfloat16", "float32"):
            wire = getattr(torch, dtype)
            differ = (
                sum(int((before[n].to(wire) != v.to(wire)).sum()) for n, v in now.items()) if before else 0
            )
            changed[dtype] = differ / sum(value.numel() for value in now.values())
        before = now
        yield path, learning_rate, changed


def measure_plan() -> list[Row]:
    """Seconds of the plan and of all ranks' parts, for more and more engines."""
    shape = shape_of(DEEPSEEK_V3)
    policy = LayoutConfig(
        tensor_parallel_size=4,
        sequence_parallel=True,
        pipeline_parallel_size=16,
        layers_in_first_stage=3,
        layers_in_last_stage=2,
        data_parallel_size=16,
        expert_parallel_size=16,
    )
    engine = LayoutConfig(data_parallel_size=32, expert_parallel_size=32)
    most = 16
    senders, of_all = layouts_of(shape, policy, engine, most)
    rows = []
    for replicas in (4, 8, most):
        receivers = of_all[: replicas * engine.world_size]
        began, cpu = time.perf_counter(), time.process_time()
        plan = plan_transfers(senders, receivers, PLAN_BUCKET_BYTES)
        planned, planned_cpu = time.perf_counter() - began, time.process_time() - cpu
        parts = [*plan.sender_parts(len(senders)), *plan.receiver_parts(len(receivers))]
        seconds, seconds_cpu = time.perf_counter() - began, time.process_time() - cpu
        sent = [sum(bucket.num_bytes for bucket in part.buckets) for part in parts[: len(senders)]]
        cpu = time.process_time()
        of_files = plan_files(senders, receivers, PLAN_BUCKET_BYTES)
        files_cpu = time.process_time() - cpu
        rows.append(
            {
                "parameters_billion": sum(map(math.prod, hf_tensors(shape).values())) / 1e9,
                "senders": len(senders),
                "receivers": len(receivers),
                "transfers": sum(len(b.sources) * len(b.receivers) for b in plan.buckets),
                "buckets": len(plan.buckets),
                "plan_seconds": planned,
                "plan_cpu_seconds": planned_cpu,
                "with_parts_seconds": seconds,
                "with_parts_cpu_seconds": seconds_cpu,
                "boxes_in_files": sum(len(bucket.sources) for bucket in of_files.buckets),
                "files_plan_cpu_seconds": files_cpu,
                "gigabytes_of_the_least_sender": min(sent) / 1e9,
                "gigabytes_of_the_most_sender": max(sent) / 1e9,
            }
        )
        del plan, parts, of_files
    return rows


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="refits of each way that count")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="for the stages")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, with a delta refit after each")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")
    arguments = parser.parse_args()
    if {"stages", "overlap"} & set(arguments.parts) and not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} is no model: nemorl models fetch smollm2 {arguments.model}")
    found: dict[str, list[Row]] = {}
    if {"ways", "stages", "delta"} & set(arguments.parts):
        with tempfile.TemporaryDirectory() as name:
            policy, engines = Ranks(4), Ranks(2)
            try:
                if "ways" in arguments.parts:
                    measured = (measure_ways(c, policy, engines, Path(name), arguments.rounds) for c in CASES)
                    found["ways"] = [row for rows in measured for row in rows]
                if "stages" in arguments.parts:
                    found["stages"] = measure_stages(policy, engines, arguments.model, arguments.rounds)
                if "delta" in arguments.parts:
                    found["delta"] = measure_delta(policy, engines, Path(name), arguments.steps)
            finally:
                policy.stop()
                engines.stop()
    if "overlap" in arguments.parts:
        with tempfile.TemporaryDirectory() as name:
            policy, engines = Ranks(OVERLAP_RANKS), Ranks(1)
            try:
                rounds = arguments.rounds
                found["overlap"] = measure_overlap(policy, engines, arguments.model, rounds, Path(name))
            finally:
                policy.stop()
                engines.stop()
    if "plan" in arguments.parts:
        found["plan"] = measure_plan()
    for part, rows in found.items():
        shown = [{short: row[key] for key, short in SHOWN[part].items()} for row in rows]
        size = PLAN_BUCKET_BYTES if part == "plan" else BUCKET_BYTES
        publish(f"refit_{part}", {"bucket_bytes": size, "rows": rows}, table_of(f"refit: {part}", shown))


if __name__ == "__main__":
    main()
