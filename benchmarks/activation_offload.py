"""How much memory does a device need when saved activations wait in host memory, and is the plan right?

    python benchmarks/activation_offload.py [--only NAME ...] [--processes N]

A rank of the first and of the last pipeline stage runs on the pretended accelerator at the
real size of the model, with and without `policy.offload_activations`, through load, logprobs, a training step
and refit. Not run on hardware: no seconds are measured. Results are written after each rank.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from policies import grpo_experiment
from rehearsal import Row, rehearsed_rows, report_rows

from nemorl.config.experiment import Experiment

LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"  # of which the shape is known without its files
FULL = {"name": "full"}


@dataclass(frozen=True)
class Case:
    """A layout; `layers` are those of each stage that are offloaded."""

    name: str
    tokens: int  # of a sequence, and of a micro-batch
    layout: dict[str, Any]
    recompute: dict[str, Any]
    layers: int


_TP8_PP4 = {"tensor_parallel_size": 8, "sequence_parallel": True, "pipeline_parallel_size": 4}
_TP2_PP8 = {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 8}
CASES = (
    Case("70b-full", 65536, _TP2_PP8 | {"data_parallel_size": 4}, FULL, 10),
    Case("70b-none", 16384, _TP8_PP4 | {"data_parallel_size": 4}, {"name": "none"}, 20),
)


def experiment_of(case: Case, folder: Path, *, offloads: bool) -> Experiment:
    policy = {
        "model_path": LLAMA_70B,
        "precision": "bfloat16",
        "max_sequence_length": case.tokens,
        "micro_batch_tokens": case.tokens,
        "recompute": case.recompute,
        "layout": case.layout,
    }
    if offloads:
        policy["offload_activations"] = {"layers": case.layers}
    return grpo_experiment(
        folder,
        policy,
        algorithm={"num_steps": 10, "num_prompts_per_step": 32, "num_generations_per_prompt": 16},
        generation={"backend": "vllm", "max_new_tokens": 1024},
        cluster={"gpus_per_node": 8, "num_nodes": 64},
    )


def rows_of(case: Case, processes: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for offloads in (False, True):
            experiment = experiment_of(case, Path(folder), offloads=offloads)
            stages = {0, experiment.policy.layout.pipeline_parallel_size - 1}
            for row in rehearsed_rows(experiment, processes, sorted(stages)):
                yield {
                    "name": case.name,
                    "tokens": case.tokens,
                    "offloaded_layers": offloads * case.layers,
                    **row,
                }


def _shown(row: Row) -> dict[str, object]:
    activations = row["parts_bytes"]["activations"]["measured"]
    return {
        "case": row["name"],
        "layout": row["layout"],
        "recomputed": row["recompute"],
        "offloaded": row["offloaded_layers"] or "",
        "stage": row["stage"],
        "peak GB": round(row["peaks_bytes"]["train"] / 1e9, 1),
        "activations GB": round(activations / 1e9, 1),
        "plan is": f"{row['plan_difference']:+.1%}",
        "host GB": round(row["activations_on_host_bytes"] / 1e9, 1),
        "host plan GB": round(row["planned_on_host_bytes"] / 1e9, 1),
        "faults": row["faults"],
    }


def main() -> None:
    cases = {case.name: partial(rows_of, case) for case in CASES}
    heading = "Peaks in training, not run on hardware"
    report_rows(__doc__.splitlines()[0], cases, "activation_offload", _shown, heading=heading)


if __name__ == "__main__":
    main()
