"""Do the layouts of NeMo-RL's performance table fit into 80 GB with nemorl, and is the memory plan right?

    python benchmarks/rehearsal.py [--only NAME ...] [--processes N]

A rank of the fullest and of the last pipeline stage (by the plan) of each layout runs on the pretended
accelerator: the policy's worker at the real size of the model, through load, logprobs, a training step and
refit. Not run on hardware. Layouts and lengths are those of NeMo-RL's performance-summary.md (v0.6), which
says neither how activations are recomputed nor how many of the GPUs of an asynchronous run train: here
`recompute` is `full`, and half of them train. Results are written after each rank.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import OUT, publish, table_of
from policies import grpo_experiment
from refit_models import DEEPSEEK_V3, QWEN3_30B, QWEN3_235B

from nemorl.config.experiment import Experiment
from nemorl.models.registry import load_shape
from nemorl.plan.memory import stage_memory
from nemorl.rehearsal.ranks import compare, faults, rehearse_all

Row = dict[str, Any]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_235B,
    "DeepSeek-V3": DEEPSEEK_V3,
}


@dataclass(frozen=True)
class Published:
    """A row of the table. Stages that differ are those that the number of layers requires."""

    name: str
    model: str
    gpus: int
    max_tokens: int
    tensor: int
    context: int
    experts: int
    stages: int
    data: int
    ends: tuple[int, int] | None = None  # layers of the first and of the last stage
    asynchronous: bool = False  # half of the GPUs train


PUBLISHED = (
    Published("qwen3-30b-sync", "Qwen3-30B-A3B", 32, 4096, 1, 1, 8, 1, 32),
    Published("qwen3-30b-1off", "Qwen3-30B-A3B", 32, 4096, 1, 1, 8, 2, 8, asynchronous=True),
    Published("qwen3-235b-sync-128", "Qwen3-235B-A22B", 128, 8192, 2, 2, 16, 8, 4, (11, 11)),
    Published("qwen3-235b-sync-256", "Qwen3-235B-A22B", 256, 8192, 2, 2, 16, 8, 8, (11, 11)),
    Published("qwen3-235b-1off", "Qwen3-235B-A22B", 256, 8192, 4, 1, 16, 8, 4, (11, 11), asynchronous=True),
    Published("deepseek-v3-sync-256", "DeepSeek-V3", 256, 1536, 1, 1, 16, 16, 16, (3, 2)),
    Published("deepseek-v3-sync-512", "DeepSeek-V3", 512, 1536, 1, 1, 16, 16, 32, (3, 2)),
    Published("deepseek-v3-1024", "DeepSeek-V3", 1024, 1536, 1, 1, 16, 16, 64, (3, 2)),
)
_GPU_BYTES = 85_520_000_000  # of an H100 with 80 GB, as its driver reports it


def experiment_of(published: Published, folder: Path) -> Experiment:
    layout: dict[str, Any] = {
        "tensor_parallel_size": published.tensor,
        "sequence_parallel": published.tensor > 1,
        "context_parallel_size": published.context,
        "pipeline_parallel_size": published.stages,
        "data_parallel_size": published.data,
        "expert_parallel_size": published.experts,
        "expert_tensor_parallel_size": 1,
    }
    if published.ends is not None:
        layout["layers_in_first_stage"], layout["layers_in_last_stage"] = published.ends
    policy = {
        "model_path": str(folder),
        "precision": "bfloat16",
        "max_sequence_length": published.max_tokens,
        "micro_batch_tokens": published.max_tokens,
        "recompute": {"name": "full"},
        "layout": layout,
    }
    sampled = {"num_prompts_per_step": 32, "num_generations_per_prompt": 16}
    return grpo_experiment(
        folder,
        policy,
        algorithm={"num_steps": 10, **sampled, "kl": {"coefficient": 0.01}},
        generation={"backend": "vllm", "max_new_tokens": 1024},
        cluster={"gpus_per_node": 8, "num_nodes": 1024},
    )


def rows_of(published: Published, processes: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(MODELS[published.model]), encoding="utf-8")
        for row in rehearsed_rows(experiment_of(published, folder), processes):
            yield {
                **asdict(published),
                **row,
                "fits_80_gb": row["peak_bytes"] <= _GPU_BYTES,
            }


def rehearsed_rows(
    experiment: Experiment, processes: int, stages: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """Of a rank of each of these stages; by default of the policy's fullest, by the plan, and of its last."""
    layout = experiment.policy.layout
    shape = load_shape(experiment.policy.model_path, experiment.policy.head)
    plans = [stage_memory(experiment, shape, stage) for stage in range(layout.pipeline_parallel_size)]
    fullest = max(range(len(plans)), key=lambda stage: plans[stage].on_device)
    ranks = [layout.stage_size * stage for stage in sorted(set(stages) or {fullest, len(plans) - 1})]
    for report in rehearse_all(experiment, ranks, processes):
        comparison = compare(report, experiment)
        yield {
            "policy_ranks": layout.world_size,
            "layout": layout.name,
            "recompute": experiment.policy.recompute.described,
            "rank": report.rank,
            "stage": report.stage,
            "peak_phase": comparison.phase,
            "peak_bytes": comparison.measured,
            "planned_bytes": comparison.planned,
            "plan_difference": comparison.difference,
            "parts_bytes": {
                part: {"measured": measured, "planned": planned}
                for part, (measured, planned) in comparison.parts.items()
            },
            "activations_on_host_bytes": report.activations_on_host,
            "planned_on_host_bytes": plans[report.stage].activations_on_host,
            "peaks_bytes": {phase: peak.num_bytes for phase, peak in report.peaks.items()},
            "waits_in_micro_batches": sum(n for e, n in report.synchronizations if e.in_micro_batch),
            "faults": len(faults(report)),
            "rehearsal_seconds": sum(report.seconds.values()),
        }


def _shown(row: dict[str, Any]) -> dict[str, object]:
    return {
        "model": row["model"],
        "GPUs": row["gpus"],
        "layout": row["layout"],
        "rank": row["rank"],
        "stage": row["stage"],
        "peak GB": round(row["peak_bytes"] / 1e9, 1),
        "plan GB": round(row["planned_bytes"] / 1e9, 1),
        "plan is": f"{row['plan_difference']:+.1%}",
        "fits": "yes" if row["fits_80_gb"] else "no",
        "faults": row["faults"],
    }


def report_rows(
    title: str,
    cases: Mapping[str, Callable[[int], Iterator[Row]]],
    result: str,
    shown: Callable[[Row], dict[str, object]],
    *,
    key: str = "name",
    heading: str = "Peaks, not run on hardware",
) -> None:
    """Rehearse all cases or some with a number of processes, and publish after each row.

    Rows of the others, by their `key`, are those of the earlier result.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), metavar="NAME")
    parser.add_argument("--processes", type=int, default=1, help="ranks at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file")
    arguments = parser.parse_args()
    file = arguments.out / f"{result}.json"
    earlier = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    rows = [row for row in earlier if row[key] in set(cases) - set(arguments.only)]
    order = list(cases)
    for name in order:
        if name in arguments.only:
            for row in cases[name](arguments.processes):
                rows = sorted([*rows, row], key=lambda one: (order.index(one[key]), one["rank"]))
                table = table_of(heading, [shown(row) for row in rows])
                publish(result, {"rows": rows}, table, arguments.out)


def main() -> None:
    cases = {published.name: partial(rows_of, published) for published in PUBLISHED}
    report_rows(__doc__.splitlines()[0], cases, "rehearsal", _shown)


if __name__ == "__main__":
    main()
