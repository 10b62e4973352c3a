"""How long does a GRPO step on SmolLM2 take, stage by stage and compared with TRL's?

    python benchmarks/step.py [--steps 4] [--rounds 2] [--without-trl] [--model models/smollm2]

Both trainers get the same model in float32, the same prompts (reasoning-gym sums in SmolLM2's chat template),
as many samples, the same limit on new tokens, temperature 1 and all cores. Rounds take turns, each in
processes of its own; the first step of a round warms up and is not counted. TRL is in the extra `bench`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from common import OUT, Timing, publish, table_of
from trl_side import train_with_trl

from nemorl.observe.metrics import read_metrics

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 32
TASK, SEED, OPTIONS = "chain_sum", 1, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
STAGES = ("generation", "environment", "logprobs", "training", "refit", "step")
Steps = list[dict[str, float]]


def experiment(model: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """Our side: two data-parallel policy processes where there are two cores."""
    return {
        "run_dir": str(run_dir),
        "policy": {
            "model_path": str(model),
            "precision": "float32",
            "max_sequence_length": 128,
            "micro_batch_tokens": 2048,
            "layout": {"data_parallel_size": min(2, len(os.sched_getaffinity(0)))},
            "optimizer": {"name": "adam", "lr": 1e-6},
        },
        "generation": {"max_new_tokens": NEW_TOKENS, "max_batch_size": PROMPTS * SAMPLES},
        "data": {
            "train": {"name": "reasoning_gym", "task": TASK, "size": 500, "seed": SEED, "options": OPTIONS},
            "shuffle": False,
        },
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


def run_nemorl(model: Path, number: int, steps: int) -> Steps:
    """Metrics of every counted step of one round."""
    run_dir = OUT / f"nemorl-{number}"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = OUT / f"nemorl-{number}.yaml"
    config.write_text(yaml.safe_dump(experiment(model, run_dir, steps + 1)), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "nemorl.cli", "train", str(config)], check=True, stdout=sys.stderr)
    return [dict(line.values) for line in read_metrics(run_dir / "metrics.jsonl")[1:]]


def run_trl(model: Path, number: int, steps: int) -> Steps:
    """Seconds and generated tokens of every counted step of one round of TRL."""
    out = OUT / f"trl-{number}.json"
    options = ["--trl-round", str(out), "--model", str(model), "--steps", str(steps)]
    subprocess.run([sys.executable, __file__, *options], check=True, stdout=sys.stderr)
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def trl_round(model: Path, steps: int) -> Steps:
    """One round of TRL, in this process."""
    import reasoning_gym
    from transformers import TrainerCallback

    tasks = reasoning_gym.create_dataset(TASK, size=500, seed=SEED, **OPTIONS)
    rows = [{"prompt": [{"role": "user", "content": t["question"]}], "index": i} for i, t in enumerate(tasks)]
    measured: Steps = []

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [tasks.score_answer(text, tasks[i]) for text, i in zip(texts, index, strict=True)]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            measured.append({"time/step": time.perf_counter() - self.began})

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                measured[-1]["tokens/generated"] = logs["completions/mean_length"] * PROMPTS * SAMPLES

    train_with_trl(
        model,
        rows,
        reward,
        samples=SAMPLES,
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        callback=Clock(),
        output_dir=str(OUT / "trl"),
        max_steps=steps + 1,
        learning_rate=1e-6,
    )
    return measured[1:]


def median(steps: Steps, key: str) -> float:
    """Median over the steps."""
    return statistics.median(step[key] for step in steps)


def report(ours: list[Steps], theirs: list[Steps]) -> None:
    """Metrics as medians over all counted steps; the ratio is that of each round's own seconds."""
    steps = [step for steps in ours for step in steps]
    seconds = {stage: median(steps, f"time/{stage}") for stage in STAGES}
    metrics: dict[str, Any] = {
        "samples_per_step": PROMPTS * SAMPLES,
        "new_tokens_at_most": NEW_TOKENS,
        "nemorl": {
            "seconds": seconds,
            "step_seconds_by_round": [[step["time/step"] for step in round_] for round_ in ours],
            "generated_tokens": median(steps, "tokens/generated"),
            "generated_tokens_per_second": median(steps, "throughput/generated_tokens_per_second"),
            "trained_tokens_per_second": statistics.median(
                step["tokens/trained"] / step["time/training"] for step in steps
            ),
        },
    }
    rows: list[dict[str, object]] = [
        {"trainer and stage": f"nemorl {k}", "seconds": v} for k, v in seconds.items()
    ]
    if theirs:
        whole = [step for steps in theirs for step in steps]
        mine, other = (
            Timing(name, tuple(sum(s["time/step"] for s in round_) for round_ in rounds))
            for name, rounds in (("nemorl", ours), ("TRL", theirs))
        )
        metrics["trl"] = {
            "seconds": {"step": median(whole, "time/step")},
            "step_seconds_by_round": [[step["time/step"] for step in round_] for round_ in theirs],
            "generated_tokens": median(whole, "tokens/generated"),
        }
        metrics["trl_step_over_nemorl_step"] = other.ratio_to(mine)
        rows.append({"trainer and stage": "TRL step", "seconds": median(whole, "time/step")})
        rows.append({"trainer and stage": "TRL / nemorl", "seconds": other.ratio_to(mine)})
    publish("step", metrics, table_of(f"one GRPO step on SmolLM2, {PROMPTS * SAMPLES} samples", rows))


def main() -> None:
    """Measure in turns and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--trl-round", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.trl_round:
        arguments.trl_round.write_text(json.dumps(trl_round(arguments.model, arguments.steps)))
        return
    ours: list[Steps] = []
    theirs: list[Steps] = []
    for number in range(arguments.rounds):
        ours.append(run_nemorl(arguments.model, number, arguments.steps))
        if not arguments.without_trl:
            theirs.append(run_trl(arguments.model, number, arguments.steps))
    report(ours, theirs)


if __name__ == "__main__":
    main()
