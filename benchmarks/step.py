"""A GRPO step on SmolLM2: time and tokens per second of every stage, and TRL's step beside it.

    python benchmarks/step.py [--steps 5] [--rounds 2] [--without-trl] [--model models/smollm2]

Both trainers get the same model in float32, the same prompts (reasoning-gym sums in SmolLM2's chat template),
the same number of samples, the same limit on new tokens, temperature 1 and all cores of the machine. Rounds
alternate, each in processes of its own; the first step of a round warms up and is not counted. TRL comes
with the extra `bench`. Prints a table and writes JSON to `runs/bench/step.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from nemorl.observe.facts import installed_versions
from nemorl.observe.metrics import read_metrics

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 32
TASK = {"task": "chain_sum", "seed": 1, "options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
STAGES = ("generation", "environment", "logprobs", "training", "refit", "step")
OUT = Path("runs/bench")


def experiment(model: Path, run_dir: Path, steps: int, processes: int) -> dict[str, Any]:
    """Our side as an experiment file."""
    return {
        "run_dir": str(run_dir),
        "policy": {
            "model_path": str(model),
            "precision": "float32",
            "max_sequence_length": 128,
            "micro_batch_tokens": 2048,
            "layout": {"data_parallel_size": processes},
            "optimizer": {"name": "adam", "lr": 1e-6},
        },
        "generation": {"max_new_tokens": NEW_TOKENS, "max_batch_size": PROMPTS * SAMPLES},
        "data": {"train": {"name": "reasoning_gym", "size": 500, **TASK}, "shuffle": False},
        "env": {"name": "reasoning_gym", "answer_tag": None},
        "algorithm": {
            "name": "grpo",
            "num_steps": steps,
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": SAMPLES,
        },
        "checkpointing": {"enabled": False},
        "logger": {"console": "plain"},
    }


def run_nemorl(model: Path, number: int, steps: int) -> list[dict[str, float]]:
    """Figures of every counted step of one round."""
    processes = 2 if len(os.sched_getaffinity(0)) > 1 else 1
    run_dir = OUT / f"nemorl-{number}"
    subprocess.run(["rm", "-rf", str(run_dir)], check=True)
    config = OUT / f"nemorl-{number}.yaml"
    config.write_text(yaml.safe_dump(experiment(model, run_dir, steps + 1, processes)), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "nemorl.cli", "train", str(config)], check=True, stdout=sys.stderr)
    return [dict(m.values) for m in read_metrics(run_dir / "metrics.jsonl")[1:]]


def run_trl(model: Path, number: int, steps: int) -> list[dict[str, float]]:
    """Seconds and tokens of every counted step of one round of TRL."""
    out = OUT / f"trl-{number}.json"
    command = [
        sys.executable,
        __file__,
        "--trl-round",
        str(out),
        "--model",
        str(model),
        "--steps",
        str(steps),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def trl_round(model: Path, steps: int, out: Path) -> None:
    """One round of TRL, in this process."""
    import reasoning_gym
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tasks = reasoning_gym.create_dataset(TASK["task"], size=500, seed=TASK["seed"], **TASK["options"])
    rows = [{"prompt": [{"role": "user", "content": t["question"]}], "index": i} for i, t in enumerate(tasks)]

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        return [
            tasks.score_answer(c[0]["content"], tasks[i]) for c, i in zip(completions, index, strict=True)
        ]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps.append({"time/step": time.perf_counter() - self.began})

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                generated = logs["completions/mean_length"] * PROMPTS * SAMPLES
                self.steps[-1]["tokens/generated"] = generated

    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(OUT / "trl"),
            use_cpu=True,
            bf16=False,
            max_steps=steps + 1,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        callbacks=[clock],
    )
    trainer.train()
    out.write_text(json.dumps(clock.steps[1:]))


def median(rows: list[dict[str, float]], key: str) -> float:
    """Median over the steps that have the figure."""
    return statistics.median(row[key] for row in rows if key in row)


def summarize(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """All figures as medians over steps; ratios above 1 mean that ours is faster."""
    stages = {stage: median(ours, f"time/{stage}") for stage in STAGES}
    result: dict[str, Any] = {
        "samples_per_step": PROMPTS * SAMPLES,
        "new_tokens_at_most": NEW_TOKENS,
        "versions": installed_versions(),
        "nemorl": {
            "seconds": stages,
            "generated_tokens_per_second": median(ours, "throughput/generated_tokens_per_second"),
            "trained_tokens_per_training_second": statistics.median(
                row["tokens/trained"] / row["time/training"] for row in ours
            ),
            "generated_tokens": median(ours, "tokens/generated"),
            "steps_seconds": [round(row["time/step"], 3) for row in ours],
        },
    }
    if theirs:
        result["trl"] = {
            "seconds": {"step": median(theirs, "time/step")},
            "generated_tokens": median(theirs, "tokens/generated"),
            "steps_seconds": [round(row["time/step"], 3) for row in theirs],
        }
        result["step_ratio"] = result["trl"]["seconds"]["step"] / stages["step"]
    return result


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(
        "stage", "nemorl, s", "TRL, s", title=f"one GRPO step, {result['samples_per_step']} samples"
    )
    trl = result.get("trl", {}).get("seconds", {})
    for stage, seconds in result["nemorl"]["seconds"].items():
        table.add_row(stage, f"{seconds:.2f}", f"{trl[stage]:.2f}" if stage in trl else "")
    console = Console()
    console.print(table)
    if trl:
        console.print(f"TRL's step takes {result['step_ratio']:.2f} times as long as ours")


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--trl-round", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.trl_round:
        trl_round(arguments.model, arguments.steps, arguments.trl_round)
        return
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        ours += run_nemorl(arguments.model, number, arguments.steps)
        if not arguments.without_trl:
            theirs += run_trl(arguments.model, number, arguments.steps)
    result = summarize(ours, theirs)
    (OUT / "step.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
