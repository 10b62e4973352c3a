"""How long does a refit of a very large model take on 256 to 4,096 policy ranks, and what does the driver do?

    python benchmarks/refit_scale.py [--models qwen3-235b deepseek-v3] [--ranks 256 1024]

Real: the layouts of both sides, the plan, and the driver's part of a refit with plan, parts of all ranks,
comparison of fingerprints and commit. Simulated: the links (refit_links.py), and the ranks, which answer at
once. Not run on hardware.

Policies have the layouts of slime's recipes run-qwen3-235B-A22B.sh (TP4 PP4 CP2 EP16) and run-deepseek-r1.sh
(TP8 PP4 CP4 EP32), with more copies as ranks are added. Half as many ranks generate, in bfloat16: engines of
16 ranks with TP4 and EP16 for Qwen3-235B, and of 32 ranks with EP32 and the attention on each rank for
DeepSeek-V3, as the prefill units of its technical report have. Policy and engines are on separate machines.

- *refit* is the simulated time from the start until all ranks have all bytes in their weights.
- *gather* and *broadcast* are the usual way over the same links: rank 0 receives every tensor from its
  holders (by a real plan, with rank 0 as the only receiver) and sends it to all engine ranks by a tree
  without contention. *Ratio* is that of their sum to the refit.
- *bytes/link* is the time in which the NIC of the engine rank with the most bytes could bring them. A refit
  can be faster: what several ranks of a machine require may enter it once and be passed on by NVLink.
- *bound* is that of the machine whose ranks require the most distinct bytes, by all of its NICs: no way is
  faster.

CPU seconds are those of the driver: *layouts* to unpickle the layouts of all ranks, *plan* for plan and
parts, *parts* to pickle the parts (16 on each side are measured), and *commit* for every refit after the
first one. Memory is what the first refit adds to the driver's process, layouts and reports included.
"""

import argparse
import asyncio
import multiprocessing
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from common import publish, table_of
from meter import measured
from refit_links import Links, broadcast_seconds, simulate
from refit_models import DEEPSEEK_V3, DTYPE, QWEN3_235B, layouts_of, shape_of
from rich.console import Console

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import (
    ITEM_BYTES,
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitSession,
    SenderLayout,
    SendReport,
)
from nemorl.weights.plan import TransferPlan, plan_transfers

BUCKET_BYTES = 64 * 2**20  # the default of `generation.bucket_megabytes`
CHECK_ONE_IN = 16  # the default on GPUs
RANKS = (256, 512, 1024, 2048, 4096)
LINKS_SHOWN = {
    "model": "model",
    "senders": "policy",
    "receivers": "engines",
    "refit_seconds": "refit, s",
    "bytes_over_link_seconds": "bytes/link",
    "bound_seconds": "bound",
    "gather_seconds": "gather",
    "broadcast_seconds": "broadcast",
    "gather_and_broadcast_over_refit": "ratio",
}
DRIVER_SHOWN = {
    "model": "model",
    "senders": "policy",
    "receivers": "engines",
    "layouts_cpu_seconds": "layouts, s",
    "plan_cpu_seconds": "plan",
    "parts_cpu_seconds": "parts",
    "commit_cpu_seconds": "commit",
    "memory_gigabytes": "GB",
    "buckets_of_a_sender": "buckets",
    "buckets_of_a_receiver": "of an engine",
}


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    policy: LayoutConfig  # with the fewest copies
    engine: LayoutConfig


CASES = (
    Case(
        "qwen3-235b",
        QWEN3_235B,
        LayoutConfig(
            tensor_parallel_size=4,
            sequence_parallel=True,
            pipeline_parallel_size=4,
            layers_in_last_stage=22,
            context_parallel_size=2,
            expert_parallel_size=16,
        ),
        LayoutConfig(tensor_parallel_size=4, data_parallel_size=4, expert_parallel_size=16),
    ),
    Case(
        "deepseek-v3",
        DEEPSEEK_V3,
        LayoutConfig(
            tensor_parallel_size=8,
            sequence_parallel=True,
            pipeline_parallel_size=4,
            layers_in_last_stage=13,
            context_parallel_size=4,
            expert_parallel_size=32,
        ),
        LayoutConfig(data_parallel_size=32, expert_parallel_size=32),
    ),
)


def bytes_of(part: TensorSlice) -> int:
    return part.num_elements * ITEM_BYTES[DTYPE]


def link_seconds(receivers: Sequence[ReceiverLayout], links: Links) -> float:
    """Bytes of the rank with the most, by its NIC."""
    return max(sum(map(bytes_of, layout.slices)) for layout in receivers) / links.nic_rate


def bound_seconds(receivers: Sequence[ReceiverLayout], links: Links) -> float:
    """Distinct bytes of the machine with the most, by all of its NICs. Boxes must be equal or apart."""
    boxes: dict[str, dict[tuple[object, ...], int]] = {}
    ranks = Counter(layout.node for layout in receivers)
    for layout in receivers:
        found = boxes.setdefault(layout.node, {})
        found.update(((part.name, part.start, part.size), bytes_of(part)) for part in layout.slices)
    rates = {node: -(-count // links.ranks_per_nic) * links.nic_rate for node, count in ranks.items()}
    return max(sum(found.values()) / rates[node] for node, found in boxes.items())


def gather_plan(senders: Sequence[SenderLayout], shape: ModelShape) -> TransferPlan:
    """Every tensor to policy rank 0, from ranks of its machine if they hold it."""
    whole = tuple(TensorSlice.whole(name, size) for name, size in hf_tensors(shape).items())
    rank_0 = ReceiverLayout(whole, (DTYPE,) * len(whole), senders[0].node)
    return plan_transfers(senders, [rank_0], BUCKET_BYTES)


@dataclass
class Answers:
    """CPU seconds of the simulated ranks, which are not the driver's."""

    cpu_seconds: float = 0.0
    unpickle_seconds: float = 0.0


@dataclass
class SimulatedSide:
    """All ranks of one side. Their layouts arrive pickled; they report a refit without errors."""

    layouts: Sequence[Any]
    answers: Answers
    parts: Sequence[Part] = field(default_factory=tuple)

    async def describe(self) -> list[Any]:
        began = time.process_time()
        messages = {id(layout): pickle.dumps(layout) for layout in self.layouts}
        pickled = time.process_time()
        found = [pickle.loads(messages[id(layout)]) for layout in self.layouts]  # noqa: S301 - own bytes
        self.answers.cpu_seconds += pickled - began
        self.answers.unpickle_seconds += time.process_time() - pickled
        return found

    async def prepare(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    async def send(self, session: RefitSession) -> list[SendReport]:
        return self._answer(session, of_sender=True)

    async def receive(self, session: RefitSession) -> list[ReceiveReport]:
        return self._answer(session, of_sender=False)

    async def commit(self, version: int) -> None: ...

    async def abandon(self) -> None: ...

    def _answer(self, session: RefitSession, *, of_sender: bool) -> list[Any]:
        """Fingerprints in which each piece counts 1."""
        began = time.process_time()
        checked: dict[str, bool] = {}
        reports: list[Any] = []
        for part in self.parts:
            sums: Counter[Any] = Counter()
            for bucket in part.buckets:
                for piece in bucket.slices:
                    name = piece.name
                    if name not in checked:
                        checked[name] = session.checks(name)
                    if checked[name]:
                        sums.update([(r, name) for r in bucket.receivers] if of_sender else [name])
            num_bytes = sum(bucket.num_bytes for bucket in part.buckets)
            reports.append(
                SendReport(dict(sums), 0, num_bytes=num_bytes)
                if of_sender
                else ReceiveReport(dict(sums), num_bytes)
            )
        self.answers.cpu_seconds += time.process_time() - began
        return reports


def measure_driver(senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout]) -> dict[str, Any]:
    """CPU seconds and memory of the driver in its first refit and in a later one."""
    answers = Answers()
    sides = SimulatedSide(senders, answers), SimulatedSide(receivers, answers)
    options = TransportOptions("gloo", check_one_in=CHECK_ONE_IN)
    exchange = WeightExchange(*sides, BUCKET_BYTES, 600.0, options)

    def refit() -> float:
        others = answers.cpu_seconds
        _, span, _ = measured("cpu", lambda: asyncio.run(exchange.refit(1)))
        return span.cpu_seconds - (answers.cpu_seconds - others)

    _, _, memory = measured("cpu", refit)  # the plan is made
    later = refit()
    sampled = [side.parts[:: max(1, len(side.parts) // 16)][:16] for side in sides]
    began = time.process_time()
    sizes = [[len(pickle.dumps(part)) for part in parts] for parts in sampled]
    seconds_of_one = (time.process_time() - began) / sum(map(len, sampled))
    return {
        "layouts_cpu_seconds": answers.unpickle_seconds,
        "parts_cpu_seconds": seconds_of_one * (len(senders) + len(receivers)),
        "commit_cpu_seconds": later,
        "memory_gigabytes": memory.work_bytes / 1e9,
        "kilobytes_of_a_sender_part": fmean(sizes[0]) / 1e3,
        "kilobytes_of_a_receiver_part": fmean(sizes[1]) / 1e3,
        "buckets_of_a_sender": fmean(len(part.buckets) for part in sides[0].parts),
        "buckets_of_a_receiver": fmean(len(part.buckets) for part in sides[1].parts),
    }


def measure(case: Case, num_senders: int, links: Links) -> dict[str, Any]:
    """A row, in a process of its own."""
    shape = shape_of(case.config)
    fields = case.policy.model_dump() | {"data_parallel_size": num_senders // case.policy.world_size}
    num_replicas = num_senders // 2 // case.engine.world_size
    policy = LayoutConfig(**fields)
    senders, receivers = layouts_of(shape, policy, case.engine, num_replicas)
    driver = measure_driver(senders, receivers)
    nodes = [*(layout.node for layout in senders), *(layout.node for layout in receivers)]
    began = time.process_time()
    plan = plan_transfers(senders, receivers, BUCKET_BYTES)
    parts = plan.sender_parts(len(senders)), plan.receiver_parts(len(receivers))
    plan_cpu = time.process_time() - began
    del parts
    found = simulate(plan, nodes, len(senders), links)
    whole = ITEM_BYTES[DTYPE] * sum(part.num_elements for b in plan.buckets for part in b.sources)
    gathered = simulate(gather_plan(senders, shape), [*nodes[:num_senders], nodes[0]], num_senders, links)
    model_bytes = sum(bytes_of(TensorSlice.whole(*tensor)) for tensor in hf_tensors(shape).items())
    broadcast = broadcast_seconds(model_bytes, len(receivers), BUCKET_BYTES, links)
    return {
        "model": case.name,
        "policy": policy.name,
        "engine": case.engine.name,
        "senders": len(senders),
        "receivers": len(receivers),
        "model_gigabytes": model_bytes / 1e9,
        "receiver_gigabytes": max(sum(map(bytes_of, layout.slices)) for layout in receivers) / 1e9,
        "sent_gigabytes": whole / 1e9,
        "received_gigabytes": plan.num_bytes / 1e9,
        "buckets": len(plan.buckets),
        "refit_seconds": found.seconds,
        "bytes_over_link_seconds": link_seconds(receivers, links),
        "bound_seconds": bound_seconds(receivers, links),
        "gather_seconds": gathered.seconds,
        "broadcast_seconds": broadcast,
        "gather_and_broadcast_over_refit": (gathered.seconds + broadcast) / found.seconds,
        "max_gigabytes_out_of_a_sender": max(found.nic_bytes_out[:num_senders]) / 1e9,
        "max_gigabytes_into_a_nic": max(found.nic_bytes_in) / 1e9,
        "nvlink_gigabytes": found.nvlink_bytes / 1e9,
        "plan_cpu_seconds": plan_cpu,
        **driver,
    }


def main() -> None:
    """Measure and publish after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS, help="of the policy")
    parser.add_argument("--ranks-per-nic", type=int, default=1)
    parser.add_argument("--nic-gigabits", type=float, default=400.0, help="a second, in each direction")
    options = parser.parse_args()
    links = Links(ranks_per_nic=options.ranks_per_nic, nic_rate=options.nic_gigabits * 1e9 / 8)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        for count in options.ranks if case.name in options.models else ():
            with ProcessPoolExecutor(1, mp_context=context) as process:
                rows.append(process.submit(measure, case, count, links).result())
            of_links, of_driver = (
                [{title: row[name] for name, title in shown.items()} for row in rows]
                for shown in (LINKS_SHOWN, DRIVER_SHOWN)
            )
            metrics = {"bucket_bytes": BUCKET_BYTES, "links": asdict(links), "rows": rows}
            publish("refit_scale", metrics, table_of("Refit over simulated links", of_links))
            Console().print(table_of("CPU seconds of the driver", of_driver))


if __name__ == "__main__":
    main()
