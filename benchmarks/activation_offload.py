"""How much memory does a device need when saved activations wait in host memory, and is the plan right?

    python benchmarks/activation_offload.py [--only NAME ...] [--processes N]

A rank of the first and of the last pipeline stage runs on the pretended accelerator at the
real size of the model, with and without `policy.offload_activations`, through load, logprobs, a training step
and refit. Not run on hardware: no seconds are measured. Results are written after each rank.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import publish, table_of
from policies import grpo_experiment
from rehearsal import begun, rehearsed_rows

from nemorl.config.experiment import Experiment

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 128009,
}
FULL = {"name": "full"}


@dataclass(frozen=True)
class Case:
    """A model in a layout; `layers` are those of each stage that are offloaded."""

    name: str
    model: dict[str, Any]
    tokens: int  # of a sequence, and of a micro-batch
    layout: dict[str, Any]
    recompute: dict[str, Any]
    layers: int


_TP8_PP4 = {"tensor_parallel_size": 8, "sequence_parallel": True, "pipeline_parallel_size": 4}
_TP2_PP8 = {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 8}
CASES = (
    Case("70b-full", LLAMA_70B, 65536, _TP2_PP8 | {"data_parallel_size": 4}, FULL, 10),
    Case("70b-none", LLAMA_70B, 16384, _TP8_PP4 | {"data_parallel_size": 4}, {"name": "none"}, 20),
)


def experiment_of(case: Case, folder: Path, *, offloads: bool) -> Experiment:
    policy = {
        "model_path": str(folder),
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


def rows_of(case: Case, processes: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = case.model | {"max_position_embeddings": 131072}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for offloads in (False, True):
            experiment = experiment_of(case, folder, offloads=offloads)
            stages = {0, experiment.policy.layout.pipeline_parallel_size - 1}
            for row in rehearsed_rows(experiment, processes, sorted(stages)):
                yield {
                    "name": case.name,
                    "tokens": case.tokens,
                    "offloaded_layers": offloads * case.layers,
                    **row,
                }


def _shown(row: dict[str, Any]) -> dict[str, object]:
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
    names = [case.name for case in CASES]
    arguments, rows = begun(__doc__.splitlines()[0], names, "activation_offload", "name")
    for case in CASES:
        if case.name in arguments.only:
            for row in rows_of(case, arguments.processes):
                rows.append(row)
                table = table_of("Peaks in training, not run on hardware", [_shown(row) for row in rows])
                publish("activation_offload", {"rows": rows}, table, arguments.out)


if __name__ == "__main__":
    main()
