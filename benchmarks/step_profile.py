"""What does a training step spend its time on besides matrix products, and what would a GPU execute?

    python benchmarks/step_profile.py [--parts cpu accelerator] [--rounds 3]

- cpu: torch's profiler over complete steps of the policy worker (GRPO loss, sequences with the lengths of
  rollouts, packing to optimizer) on SmolLM2-135M, or on a random model of its shape. An operator counts for
  the module that called it; in backward, for the module whose operator it differentiates. Matrix products are
  a group of their own in all modules. *Host* is time outside operators: Python, and the profiler's
  own cost.
- accelerator: a step of the same shape in bfloat16 on the pretended accelerator (docs/rehearsal.md), not run
  on hardware. Rehearsals of two depths give the operators of a layer and of what is around the layers. Most
  operators are one kernel, and views are none.
"""

import argparse
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from common import publish, table_of
from policies import grpo_experiment
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from training import random_model, smollm2_config
from training_sides import Nemorl, Setting, start
from training_work import Work, rollout_work

from nemorl.models.registry import load_shape
from nemorl.rehearsal.ranks import compare, faults, rehearse_all
from nemorl.rehearsal.worker import RankReport

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
SCOPE = "scope: "
HOST, OTHER = "host", "other"
MODULES = {  # groups of operators, by the class of the innermost module that calls them
    "LanguageModelEmbedding": "embedding",
    "RMSNorm": "norms",
    "SelfAttention": "attention",
    "PackedAttention": "attention",
    "MLP": "activations",
    "TransformerLayer": "residual",
}
FUNCTIONS = {"_Rotate": "rotary", "_Logprobs": "head and loss"}  # of autograd, by their names
BACKWARD = "autograd::engine::evaluate_function: "
SIZES = {"sequences": 16, "micro_batch_tokens": 1024}
DEPTHS = (4, 8)  # layers of the rehearsals that are compared
LAYERS = 30  # of SmolLM2-135M


def mark(side: Nemorl) -> None:
    """Name what the worker of a side does from now on: operators that a method calls count for a group."""
    worker = side._worker
    places: list[tuple[Any, str, str]] = [
        (worker._maker, "make", "packing"),
        (worker.optimizer, "step", "optimizer"),
    ]
    for chunk in worker._chunks:
        places.append((chunk, "zero_grad_buffer", "gradients"))
        groups = ((module, MODULES.get(type(module).__name__)) for module in chunk.modules())
        places += [(module, "forward", group) for module, group in groups if group]

    def scoped(method: Callable[..., Any], group: str) -> Callable[..., Any]:
        @wraps(method)
        def within(*args: Any, **kwargs: Any) -> Any:
            with record_function(SCOPE + group):
                return method(*args, **kwargs)

        return within

    for owner, name, group in places:
        setattr(owner, name, scoped(getattr(owner, name), group))


def groups_of(events: list[FunctionEvent]) -> dict[tuple[str, str], float]:
    """Seconds by group and operator."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    of_forward: dict[int, str] = {}
    in_backward: list[tuple[FunctionEvent, FunctionEvent]] = []

    def add(event: FunctionEvent, group: str) -> None:
        is_operator = "::" in event.name and not event.name.startswith((BACKWARD, SCOPE))
        group = "matrix products" if event.name in PRODUCTS else group if is_operator else HOST
        seconds[group, event.name if is_operator else ""] += event.self_cpu_time_total / 1e6

    for event in events:
        caller: FunctionEvent | None = event
        while caller is not None:
            if caller.name.startswith(BACKWARD):
                in_backward.append((event, caller))
                break
            group = FUNCTIONS.get(caller.name)
            if group is None and caller.name.startswith("c10d::"):
                group = "communication"
            if group is None and caller.name.startswith(SCOPE):
                group = caller.name.removeprefix(SCOPE)
            if group is not None:
                of_forward.setdefault(event.sequence_nr, group)
                add(event, group)
                break
            caller = caller.cpu_parent
        else:
            add(event, OTHER)
    for event, node in in_backward:
        is_leaf = "AccumulateGrad" in node.name
        group = "gradients" if is_leaf else of_forward.get(node.sequence_nr, OTHER)
        add(event, "communication" if event.name.startswith("c10d::") else group)
    return dict(seconds)


def measure_cpu(model: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Groups of operators with their share of a step, and the operators that take most of each."""
    setting = Setting(model, "cpu", "float32", threads, max_sequence_length=1024)
    side = start("nemorl", setting)
    assert isinstance(side, Nemorl)
    work = rollout_work(SIZES["sequences"], SIZES["micro_batch_tokens"], load_shape(model).vocab_size)
    with closing(side):
        side.prepare(work, "grpo")()  # memory pools are filled
        mark(side)
        measured = [_profiled(side, work) for _ in range(rounds)]
    shares: dict[str, list[float]] = {}
    operators: defaultdict[tuple[str, str], float] = defaultdict(float)
    for of_round in measured:
        total = sum(of_round.values())
        by_group: defaultdict[str, float] = defaultdict(float)
        for (group, operator), seconds in of_round.items():
            by_group[group] += seconds
            operators[group, operator] += 100 * seconds / total / rounds
        for group in {*shares, *by_group}:
            shares.setdefault(group, []).append(100 * by_group[group] / total)
    rows = []
    for group, values in sorted(shares.items(), key=lambda item: -statistics.median(item[1])):
        of_group = Counter({name: share for (own, name), share in operators.items() if own == group and name})
        rows.append(
            {
                "group": group,
                "percent": statistics.median(values),
                "percent_of_rounds": values,
                "operators_percent": dict(of_group.most_common()),
            }
        )
    return rows


def _profiled(side: Nemorl, work: Work) -> dict[tuple[str, str], float]:
    run: Callable[[], float] = side.prepare(work, "grpo")
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function(SCOPE + "step"):
        run()
    return groups_of(list(found.events()))


@dataclass(frozen=True)
class Step:
    """A rehearsed training step with one micro-batch."""

    operators: Mapping[bool, Counter[str]]  # forward and backward, by name
    report: RankReport

    @classmethod
    def of(cls, report: RankReport) -> "Step":
        found: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for kernel, count in report.kernels:
            if kernel.phase == "train":
                found[kernel.in_backward][kernel.operator] += count
        return cls(found, report)


def measure_accelerator() -> list[dict[str, Any]]:
    """Operators of a layer and of the rest of a step, synchronizations, and the peak of SmolLM2-135M."""
    with tempfile.TemporaryDirectory() as temporary:
        steps = {layers: _rehearsed(Path(temporary) / str(layers), layers) for layers in (*DEPTHS, LAYERS)}
        few, more, complete = (steps[layers][0] for layers in (*DEPTHS, LAYERS))
        comparison = compare(complete.report, steps[LAYERS][1], "train")
    rows: list[dict[str, Any]] = []
    for in_backward, name in ((False, "forward and around the step"), (True, "backward")):
        fewer, further = few.operators[in_backward], more.operators[in_backward]
        of_layer = {
            operator: (count - fewer[operator]) / (DEPTHS[1] - DEPTHS[0])
            for operator, count in further.most_common()
            if count > fewer[operator]
        }
        rows.append(
            {
                "pass": name,
                "operators_of_a_layer": sum(of_layer.values()),
                "operators_besides": fewer.total() - DEPTHS[0] * sum(of_layer.values()),
                "by_operator_of_a_layer": of_layer,
            }
        )
    waits = [(event, count) for event, count in complete.report.synchronizations if event.phase == "train"]
    rows[0] |= {
        "layers": LAYERS,
        "waits_in_micro_batch": sum(count for event, count in waits if event.in_micro_batch),
        "waits_of_a_step": sum(count for _, count in waits),
        "waits": {event.location: count for event, count in waits},
        "faults": len(faults(complete.report)),
        "peak_gigabytes": comparison.measured / 1e9,
        "planned_gigabytes": comparison.planned / 1e9,
        "parts_gigabytes": {name: size / 1e9 for name, (size, _) in comparison.parts.items()},
    }
    return rows


def _rehearsed(folder: Path, layers: int) -> tuple[Step, Any]:
    smollm2_config(layers).save_pretrained(folder)
    policy = {
        "model_path": str(folder),
        "precision": "bfloat16",
        "max_sequence_length": 2048,
        "micro_batch_tokens": 8192,
    }
    experiment = grpo_experiment(
        folder,
        policy,
        algorithm={"num_steps": 1, "num_prompts_per_step": 4, "num_generations_per_prompt": 16},
        generation={"backend": "vllm", "max_new_tokens": 1024},
        cluster={"gpus_per_node": 8},
    )
    (report,) = rehearse_all(experiment, [0])
    return Step.of(report), experiment


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=("cpu", "accelerator"), default=["cpu", "accelerator"])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="of a random model, where --model is missing"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "cpu" in options.parts:
        with tempfile.TemporaryDirectory() as temporary:
            model = options.model
            if not model.exists():
                model = Path(temporary) / "model"
                random_model(model, options.layers)
            rows = measure_cpu(model, options.threads, options.rounds)
        shown = [
            {
                "group": row["group"],
                "% of the step": row["percent"],
                "operators": ", ".join(
                    f"{name.removeprefix('aten::')} {share:.1f}"
                    for name, share in [*row["operators_percent"].items()][:6]
                    if share >= 0.1
                ),
            }
            for row in rows
        ]
        facts = {"rows": rows, **SIZES, "threads": options.threads, "load": os.getloadavg()}
        publish("step_profile_cpu", facts, table_of("CPU time of a training step", shown))
    if "accelerator" in options.parts:
        rows = measure_accelerator()
        names = ("pass", "operators_of_a_layer", "operators_besides")
        shown = [{name.replace("_", " "): row[name] for name in names} for row in rows]
        publish("step_profile_accelerator", {"rows": rows}, table_of("Operators, not run on hardware", shown))


if __name__ == "__main__":
    main()
