"""Whole runs for tests: a tiny model, the command line in a process of its own, and what it leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics, read_metrics
from tests.clocks import without_clocks


def tiny_model(folder: Path, layers: int = 2, seed: int = 0) -> Path:
    """An untrained model that two tensor-parallel processes can share."""
    create_tiny_model(folder, hidden=32, ffn=64, layers=layers, heads=4, kv_heads=2, seed=seed)
    return folder


def write_experiment(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    """A small GRPO experiment over two policy processes, with `section={...}` changes; its run is `name`."""
    tree: dict[str, Any] = {
        "run_dir": str(folder / name),
        "policy": {
            "model_path": str(model),
            "precision": "float32",
            "max_sequence_length": 16,
            "micro_batch_tokens": 128,
            "layout": {"tensor_parallel_size": 2},
            "optimizer": {"name": "adam", "lr": 1e-3},
        },
        "generation": {"max_new_tokens": 6, "max_batch_size": 32},
        "data": {
            "chat": False,
            "train": {"name": "arithmetic", "digits": 1, "size": 60, "offset": 20},
            "validation": {"name": "arithmetic", "digits": 1, "size": 20},
        },
        # Rewarded for the first digit, so that an untrained model has something to learn from.
        "rewards": [{"function": "tests.run.rewards:starts_right"}],
        "algorithm": {
            "name": "grpo",
            "num_steps": 6,
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "kl": {"coefficient": 0.01},
            "validation": {"period": 3},
        },
        "checkpointing": {"period": 2},
        "logger": {"console": "plain"},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def start(*arguments: str | Path) -> "subprocess.Popen[str]":
    """`nemorl` with these arguments, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "nemorl.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: "subprocess.Popen[str]", seconds: float = 300) -> tuple[int, str]:
    """Exit status and everything it said."""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


@contextmanager
def served(model: Path, key_env: str) -> Iterator[dict[str, str]]:
    """`nemorl serve` over a model: address, name and key, which an environment variable holds meanwhile."""
    words = [sys.executable, "-m", "nemorl.cli", "serve", model.name, "generation.endpoint={port: 0}"]
    process = subprocess.Popen(
        words,
        cwd=model.parent,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    printed = dict(process.stdout.readline().strip().split(": ") for _ in range(2))
    os.environ[key_env] = printed["key"]
    try:
        yield {"base_url": printed["endpoint"], "model": model.name, "api_key_env": key_env}
    finally:
        del os.environ[key_env]
        process.terminate()
        process.communicate(timeout=60)


def lines(run: Path) -> list[StepMetrics]:
    """The steps that a run has recorded so far."""
    return read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def timeless(metrics: StepMetrics) -> dict[str, float]:
    """What must be the same in a run that was interrupted and in one that was not.

    The gap between engine and trainer is rounding, which depends on the requests that the engine happened to
    batch together: it has a limit of its own. The first batch of each start measures it before an update, and
    counts the operations for it.
    """
    left_out = ("logprob_gap/", "models/restarts", "flops/logprobs")
    return {k: v for k, v in without_clocks(metrics.values).items() if not k.startswith(left_out)}


def assert_same_run(ours: Sequence[StepMetrics], theirs: Sequence[StepMetrics]) -> None:
    """Two runs took the same steps. Metrics near 0, such as the policy's loss, are sums of logprobs' rounding
    errors (1e-6 in float32)."""
    for mine, its in zip(ours, theirs, strict=True):
        assert timeless(mine) == pytest.approx(timeless(its), rel=1e-5, abs=1e-6), f"step {mine.step}"
        gaps = mine.values.get("logprob_gap/max", 0.0), its.values.get("logprob_gap/max", 0.0)
        assert max(gaps) < 1e-4, f"step {mine.step}"


def known_figures(run: Path) -> frozenset[str]:
    """What `checkpointing.metric` of a run may name."""
    experiment = load_experiment(run / "config.yaml")
    return metric_names(experiment.algorithm, experiment.env, experiment.rewards)


def worker_pid(log: Path) -> int:
    """The process that a worker's log names in its first line."""
    return int(log.read_text().partition("process ")[2].split()[0])
