"""What do quantized rollouts cost GRPO, and which settings bring the gap between engine and trainer back?

    python benchmarks/quantized.py [--parts runs sensitivity] [--model models/smollm2]

INT8 against float32, with vLLM on a CPU and truncated importance sampling by token: engines that quantize
weights and activations under a trainer in float32; a trainer that also rounds both; and a trainer with
rounded weights whose engine gets them. A tiny model learns sums, after supervised training that leaves
something to learn, and SmolLM2 takes a few steps (`nemorl models fetch smollm2 models/smollm2`).

`sensitivity` moves the embeddings of a text by a part in ten million, as two engines differ, and shows how
far SmolLM2's logprobs move with rounded weights, and with rounded inputs of layers.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import OUT, publish, table_of
from curves import train_in_processes
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics

FOLDER = OUT / "quantized"
SETTINGS = {
    "float32": "null",
    "int8 engine": "{format: int8}",
    "int8 engine and trainer": "{format: int8, train: fake, activations: true}",
    "int8 weights in both": "{format: int8, train: fake}",
}
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps until the next morning, when the sun "
    "comes up again over the hills and fields of the old farm."
)
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


@torch.no_grad()
def sensitivity(model: Path, moved: float = 1e-7) -> list[dict[str, Any]]:
    """Mean changes of logprobs when embeddings are multiplied by 1 + `moved` times a normal draw."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    embedded = network.get_input_embeddings()(tokens)
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0))
    layers = [layer for layer in network.model.modules() if isinstance(layer, torch.nn.Linear)]

    def logprobs(embedded: Tensor) -> Tensor:
        logits: Tensor = network(inputs_embeds=embedded).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])

    def gap(one: Tensor, other: Tensor) -> float:
        return (one - other).abs().mean().item()

    rows = []
    unrounded = logprobs(embedded)
    for rounded in ("nothing", "weights", "weights and inputs"):
        if rounded == "weights":
            for layer in layers:
                layer.weight.copy_(int8_rows(layer.weight))
        elif rounded == "weights and inputs":
            for layer in layers:
                layer.register_forward_pre_hook(lambda _, inputs: (int8_rows(inputs[0]),))
        still = logprobs(embedded)
        row = {"rounded": rounded, "gap_of_moved": gap(still, logprobs(embedded * (1 + moved * noise)))}
        rows.append(row | {"gap_to_unrounded": gap(still, unrounded)})
    return rows


def int8_rows(values: Tensor) -> Tensor:
    """Rounded to 8-bit integers with a scale for each row: a row of weights, or the inputs of a token."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of the tiny model")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--model-steps", type=int, default=3)
    parts = ("runs", "sensitivity")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        parser.error(f"{arguments.model} is no model: nemorl models fetch smollm2 {arguments.model}")
    load = os.getloadavg()
    if "sensitivity" in arguments.parts:
        rows = sensitivity(arguments.model)
        publish("quantized_sensitivity", {"rows": rows}, table_of("Embeddings moved by 1e-7", rows))
    if "runs" in arguments.parts:
        rows = both_models(arguments)
        loads = [load, os.getloadavg()]
        publish("quantized", {"load_before_and_after": loads, "rows": rows}, table_of("INT8 rollouts", rows))


def both_models(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the tiny model, then of SmolLM2."""
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
    return rows + rows_of(
        "SmolLM2",
        Path("configs/grpo_smollm2_vllm.yaml"),
        [
            f"policy.model_path={arguments.model}",
            "policy.layout.data_parallel_size=1",
            f"algorithm.num_steps={arguments.model_steps}",
        ],
    )


if __name__ == "__main__":
    main()
