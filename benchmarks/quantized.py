"""What do quantized rollouts cost GRPO, and which settings bring the gap between engine and trainer back?

    python benchmarks/quantized.py [--steps 20] [--model models/smollm2] [--model-steps 3]

INT8 against float32, with vLLM on a CPU and truncated importance sampling by token: engines that quantize
weights and activations under a trainer in float32; a trainer that also rounds both; and a trainer with
rounded weights whose engine gets them. A tiny model learns sums, after supervised training that leaves
something to learn, and SmolLM2 takes a few steps (`nemorl models fetch smollm2 models/smollm2`).
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import OUT, publish, table_of
from curves import train_in_processes

from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics

FOLDER = OUT / "quantized"
SETTINGS = {
    "float32": "null",
    "int8 engine": "{format: int8}",
    "int8 engine and trainer": "{format: int8, train: fake, activations: true}",
    "int8 weights in both": "{format: int8, train: fake}",
}
COMMON = [
    "algorithm.correction={name: tis}",
    "algorithm.max_logprob_gap=1.0",
    "algorithm.validation={at_start: false, at_end: false, period: null}",
    "checkpointing.save_hf=false",
]


def tiny_model(steps: int) -> Path:
    """A model for sums, with heads that vLLM's attention has on a CPU, after supervised training."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    create_tiny_model(FOLDER / "untrained", heads=6, kv_heads=6)
    run = FOLDER / "sft"
    overrides = [
        f"policy.model_path={FOLDER / 'untrained'}",
        "policy.layout.tensor_parallel_size=1",
        f"policy.schedule.decay_steps={steps}",
        f"algorithm.num_steps={steps}",
        f"checkpointing.period={steps}",
    ]
    train_in_processes(Path("configs/quickstart/sft.yaml"), run, overrides)
    return run / "hf"


def rows_of(model: str, config: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a run in each setting."""
    rows = []
    for setting, quantization in SETTINGS.items():
        run = FOLDER / f"{model}-{setting.replace(' ', '_')}"
        chosen = [*COMMON, *overrides, f"policy.quantization={quantization}"]
        lines = [line for line in train_in_processes(config, run, chosen) if line.step]
        rows.append({"model": model, "setting": setting, **_summary(lines)})
    return rows


def _summary(lines: Sequence[StepMetrics]) -> dict[str, float]:
    def mean(name: str) -> float:
        return fmean(line.values[name] for line in lines)

    last = lines[-5:]
    return {
        "steps": len(lines),
        "gap_mean": mean("logprob_gap/mean"),
        "gap_max": max(line.values["logprob_gap/max"] for line in lines),
        "effective_samples": mean("correction/ess"),
        "reward_first": lines[0].values["reward/mean"],
        "reward_last": fmean(line.values["reward/mean"] for line in last),
        "generation_seconds": mean("time/generation"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of the tiny model")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--model-steps", type=int, default=3)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        parser.error(f"{arguments.model} is no model: nemorl models fetch smollm2 {arguments.model}")
    load = os.getloadavg()
    rows = rows_of(
        "tiny",
        Path("configs/quickstart/grpo.yaml"),
        [
            f"policy.model_path={tiny_model(150)}",
            "policy.layout.tensor_parallel_size=1",
            "generation={backend: vllm, max_new_tokens: 6, max_num_seqs: 512}",
            f"algorithm.num_steps={arguments.steps}",
        ],
    )
    rows += rows_of(
        "SmolLM2",
        Path("configs/grpo_smollm2_vllm.yaml"),
        [
            f"policy.model_path={arguments.model}",
            "policy.layout.data_parallel_size=1",
            f"algorithm.num_steps={arguments.model_steps}",
        ],
    )
    publish(
        "quantized",
        {"load_before_and_after": [load, os.getloadavg()], "rows": rows},
        table_of("INT8 rollouts", rows),
    )


if __name__ == "__main__":
    main()
