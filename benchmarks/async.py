"""How much faster is a run whose sampling may be ahead of its training by 1 or 4 steps?

    python benchmarks/async.py [--staleness 0 1 4] [--steps 12] [--balance 1.0] [--simulate]

Real runs with injected seconds (`paced.py`): an engine at full batch samples a step's tokens in the time in
which the policy trains on them (times `--balance`), and completions have a long tail. The bound is the longer
of the two: the sampling of a step at full batch, and its training while nothing is sampled, which is
measured in the first run. Counted are steps in the middle of a run: before them the first groups are on their
way, and for the last steps nothing more is sampled.

With `--simulate` each run is compared with what `nemorl simulate --trace` predicts from it and from the
others. The lengths and times of the traced run are all that the prediction has of another.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import paced
from common import OUT, publish, table_of

from nemorl.config.experiment import Experiment
from nemorl.observe.metrics import read_metrics
from nemorl.run.train import train
from nemorl.simulate.simulation import predict
from nemorl.simulate.trace import traced_workload

PROMPTS, SAMPLES = 16, 4
WARM_UP = 6  # steps that are not counted, at the start; at the end as many as the staleness
SIMULATED_STEPS = 100
TRAINING = ("loading", "logprobs", "training", "refit")  # stages of a step that do not sample


def experiment(run_dir: Path, staleness: int, steps: int, balance: float) -> Experiment:
    checked = Experiment.model_validate(
        {
            "run_dir": str(run_dir),
            "policy": {
                "model_path": "models/arithmetic",
                "precision": "float32",
                "max_sequence_length": 128,
                "micro_batch_tokens": 1024,
                "optimizer": {"name": "adam", "lr": 1e-6},
            },
            "generation": {"max_new_tokens": paced.LONGEST, "max_batch_size": paced.BATCH, "threads": 1},
            "data": {"chat": False, "train": {"name": "arithmetic", "digits": 2, "size": 9000, "seed": 1}},
            "rewards": [{"function": "paced:reward"}],
            "algorithm": {
                "name": "grpo",
                "num_steps": steps,
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": SAMPLES,
                "max_staleness": staleness,
                "loss": {
                    "name": "custom",
                    "function": "paced:loss",
                    "arguments": {"seconds_per_token": balance / paced.TOKENS_PER_SECOND},
                },
            },
            "cluster": {"policy_threads": 1},
            "checkpointing": {"enabled": False},
            "logger": {"console": "plain", "samples_per_step": PROMPTS * SAMPLES},
        }
    )
    generation = paced.PacedConfig.model_validate(checked.generation.model_dump(exclude_unset=True))
    return checked.model_copy(update={"generation": generation})


def folder_of(staleness: int) -> Path:
    return OUT / f"async-{staleness}"


def add_predictions(runs: list[dict[str, Any]], balance: float) -> None:
    """What the simulator predicts for each run from each, over what was measured; tokens per second."""
    steps = max(run["steps"] for run in runs)
    configs = [experiment(folder_of(run["staleness"]), run["staleness"], steps, balance) for run in runs]
    for traced, its_config in zip(runs, configs, strict=True):
        workload = traced_workload(its_config, folder_of(traced["staleness"]))
        for run, config in zip(runs, configs, strict=True):
            prediction = predict(config, workload, seed=0, num_steps=SIMULATED_STEPS)
            ratio = prediction.generated_per_second / run["tokens_per_second"]
            run[f"predicted_from_{traced['staleness']}"] = ratio


def measure(staleness: int, steps: int, balance: float) -> dict[str, Any]:
    """Means over the counted steps of a run in processes of its own."""
    run_dir = folder_of(staleness)
    shutil.rmtree(run_dir, ignore_errors=True)
    options = ["--steps", str(steps), "--balance", str(balance), "--run", str(run_dir)]
    subprocess.run(
        [sys.executable, __file__, *options, "--staleness", str(staleness)], check=True, stdout=sys.stderr
    )
    lines = [line.values for line in read_metrics(run_dir / "metrics.jsonl") if line.step > WARM_UP]
    counted = lines[: len(lines) - staleness]
    mean = {name: statistics.fmean(line.get(name, 0.0) for line in counted) for name in counted[0]}
    return {
        "staleness": staleness,
        "steps": len(counted),
        "tokens": mean["tokens/generated"],
        "seconds": mean["time/step"],
        "tokens_per_second": mean["tokens/generated"] / mean["time/step"],
        "waiting_seconds": mean["time/generation"],
        "training_seconds": sum(mean.get(f"time/{stage}", 0.0) for stage in TRAINING),
        "lag": mean["version/lag"],
        "lag_max": max(line["version/lag_max"] for line in counted),
        "dropped": sum(line.get(f"dropped/{why}", 0.0) for line in lines for why in ("too_old", "aborted")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=12, help="that are counted (default 12)")
    parser.add_argument(
        "--balance", type=float, default=1.0, help="seconds of training over those of sampling"
    )
    parser.add_argument("--simulate", action="store_true", help="predict the runs from each other, too")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        (staleness,) = options.staleness
        train(experiment(options.run, staleness, options.steps + WARM_UP + staleness, options.balance))
        return
    if not Path("models/arithmetic").exists():
        create = [sys.executable, "-m", "nemorl.cli", "models", "create", "arithmetic", "models/arithmetic"]
        subprocess.run(create, check=True, stdout=sys.stderr)
    runs = [measure(staleness, options.steps, options.balance) for staleness in options.staleness]
    first = runs[0]
    for run in runs:
        sampling = run["tokens"] / paced.TOKENS_PER_SECOND
        training = first["training_seconds"] * run["tokens"] / first["tokens"]
        run["bound_seconds"] = max(sampling, training)
        run["share_of_bound"] = run["bound_seconds"] / run["seconds"]
        run["over_first"] = run["tokens_per_second"] / first["tokens_per_second"]
    if options.simulate:
        add_predictions(runs, options.balance)
    shown = {
        "tokens_per_second": "tokens/s",
        "share_of_bound": "share of bound",
        "over_first": "over the first",
    }
    if options.simulate:
        shown |= {f"predicted_from_{one}": f"predicted from {one}" for one in options.staleness}
    columns = [
        "staleness",
        "steps",
        "seconds",
        *shown,
        "waiting_seconds",
        "training_seconds",
        "lag",
        "dropped",
    ]
    rows = [{shown.get(name, name.replace("_", " ")): run[name] for name in columns} for run in runs]
    publish(
        "async", {"runs": runs, "balance": options.balance}, table_of("trained tokens by staleness", rows)
    )


if __name__ == "__main__":
    main()
