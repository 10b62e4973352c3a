"""Does GRPO learn here as it does under TRL: the same model, tasks, seeds and settings?

    python benchmarks/learning_curves.py [--steps 40] [--seeds 1 2 3]

Both sides begin with the model that the first half of `make quickstart` leaves, and train on the same sums in
the same order: 64 tasks with 8 answers each a step, one update with Adam at 2e-4 after ten steps of warm-up,
no divergence from a reference, the loss a mean over all tokens, advantages divided by the standard deviation
of the group. Answers are drawn by each side's own generator, so that curves differ as those of two seeds do.
The reward of a step is the share of right answers among its 512. TRL is in the extra `bench`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import OUT, publish, table_of
from curves import Curves, plot, train_in_processes
from trl_side import train_with_trl

from nemorl.config.base import counted
from nemorl.config.load import load_experiment
from nemorl.data.datasets import load_tasks
from nemorl.rollout.order import TaskOrder

CONFIG = Path("configs/quickstart/grpo.yaml")
MODEL = Path("runs/quickstart/sft/hf")
PROMPTS, SAMPLES, NEW_TOKENS, LEARNING_RATE, WARMUP = 64, 8, 6, 2e-4, 10
LAST = 5  # steps whose mean is compared


def nemorl_curve(seed: int, steps: int) -> list[float]:
    overrides = [
        f"seed={seed}",
        f"algorithm.num_steps={steps}",
        "algorithm.validation={at_start: false, at_end: false, period: null}",
        f"checkpointing.period={steps}",
    ]
    lines = train_in_processes(CONFIG, OUT / f"curve-{seed}", overrides)
    return [line.values["reward/mean"] for line in lines if line.step]


def trl_curve(seed: int, steps: int) -> list[float]:
    """A run of TRL, in a process of its own."""
    out = OUT / f"trl-curve-{seed}.json"
    options = ["--trl", str(out), "--seeds", str(seed), "--steps", str(steps)]
    subprocess.run([sys.executable, __file__, *options], check=True, stdout=sys.stderr)
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def trl_rewards(seed: int, steps: int) -> list[float]:
    """One run of TRL, in this process."""
    from transformers import TrainerCallback

    experiment = load_experiment(CONFIG, [f"seed={seed}"])
    tasks = load_tasks(experiment.data.train, experiment.data)
    order = TaskOrder(len(tasks), seed, experiment.data.shuffle)
    chosen = [tasks[order.task_index(position)] for position in range(steps * PROMPTS)]
    rows = [{"prompt": task.messages[-1].content, "answer": task.answer} for task in chosen]
    rewards: list[float] = []

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **__: Any) -> None:
            if "reward" in logs:
                rewards.append(float(logs["reward"]))

    train_with_trl(
        MODEL,
        rows,
        right,
        samples=SAMPLES,
        answers=PROMPTS * SAMPLES,
        new_tokens=NEW_TOKENS,
        callback=Listener(),
        output_dir=str(OUT / "trl-curve"),
        seed=seed,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
    )
    return rewards


def ends(curves: Curves) -> list[float]:
    """By seed, the mean reward of the last steps."""
    return [statistics.fmean(curve[-LAST:]) for curve in curves.values()]


def main() -> None:
    """Train on both sides, in turns, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.trl:
        curve = trl_rewards(arguments.seeds[0], arguments.steps)
        arguments.trl.write_text(json.dumps(curve), encoding="utf-8")
        return
    sides: dict[str, Curves] = {"nemorl": {}, "TRL": {}}
    for seed in arguments.seeds:
        sides["nemorl"][seed] = nemorl_curve(seed, arguments.steps)
        sides["TRL"][seed] = trl_curve(seed, arguments.steps)
    rows: list[dict[str, object]] = [
        {
            "trainer": name,
            "first": statistics.fmean(curve[0] for curve in curves.values()),
            f"last {LAST}": statistics.fmean(ends(curves)),
            "lowest seed": min(ends(curves)),
            "highest seed": max(ends(curves)),
        }
        for name, curves in sides.items()
    ]
    plot(
        sides,
        f"GRPO on sums of two digits, {counted(len(arguments.seeds), 'seed')}",
        OUT / "learning_curves.png",
    )
    title = f"share of right answers over {arguments.steps} steps, {len(arguments.seeds)} seeds"
    publish("learning_curves", {"curves": sides}, table_of(title, rows))


if __name__ == "__main__":
    main()
