"""Does a run without staleness give what it gave at an earlier commit, bit for bit?

    python benchmarks/unchanged.py [--since COMMIT] [--steps 8]

The quickstart's GRPO at `max_staleness: 0`, with the same seed, by the source of the earlier commit (default:
the one before asynchronous training) and by this one: sampled by one embedded engine, by two, and by the
policy's own processes. Compared are every metric that both record but times and the logprob gap, whose
rounding depends on the requests that an engine happens to batch together; the recorded samples; and the final
weights. Run `make quickstart` first, whose second half this is.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import OUT, publish, table_of

BEFORE_ASYNCHRONY = "4324b60"
CONFIG = "configs/quickstart/grpo.yaml"
MODEL = Path("runs/quickstart/sft/hf")
PLACEMENTS = {
    "one engine": [],
    "two engines": ["generation.replicas=2"],
    "policy processes": ["generation.backend=megatron"],
}
# Not compared: clocks, and rounding that depends on an engine's batches.
LEFT_OUT = (
    "time/",
    "throughput/",
    "tflops/",
    "mfu/",
    "refit/",
    "reward_seconds/",
    "reward_waiting/",
    "trajectory_seconds/",
    "idle/",
    "critical/",
    "logprob_gap/",
)


def source_of(commit: str) -> Path:
    """A folder with the source of a commit, importable from there."""
    source = (OUT / "unchanged" / "source").absolute()
    subprocess.run(["git", "worktree", "remove", "--force", source], check=False, capture_output=True)
    subprocess.run(["git", "worktree", "add", "--detach", source, commit], check=True, capture_output=True)
    for package in ("algorithms", "environments", "slurm"):  # which an installation maps
        (source / "nemorl" / package).symlink_to(Path("..") / package)
    return source


def train(source: Path, run: Path, overrides: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    cli = [sys.executable, "-m", "nemorl.cli", "train", CONFIG, f"run_dir={run.absolute()}", *overrides]
    shutil.rmtree(run, ignore_errors=True)
    subprocess.run(cli, check=True, cwd=source, env=environment, stdout=sys.stderr)


def steps_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def compare(earlier: Path, now: Path) -> dict[str, Any]:
    """The metrics that were compared, those that differ in any step, and whether files are equal."""
    before, after = steps_of(earlier), steps_of(now)
    compared: set[str] = set()
    different: set[str] = set()
    for old, new in zip(before, after, strict=True):
        common = {name for name in old.keys() & new.keys() if not name.startswith(LEFT_OUT)}
        compared |= common
        different |= {name for name in common if old[name] != new[name]}
    return {
        "steps": len(after),
        "metrics": sorted(compared),
        "different": sorted(different),
        "samples": _same(earlier, now, samples_of),
        "weights": _same(earlier, now, weights_of),
    }


def samples_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds_environment"} for line in lines]


def weights_of(run: Path) -> bytes:
    return (run / "hf/model.safetensors").read_bytes()


def _same(earlier: Path, now: Path, content_of: Callable[[Path], Any]) -> str:
    return "equal" if content_of(earlier) == content_of(now) else "different"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", default=BEFORE_ASYNCHRONY, metavar="COMMIT")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    if not MODEL.exists():
        parser.error(f"{MODEL} does not exist: run `make quickstart` first")
    here = Path().absolute()
    sources = {"earlier": source_of(arguments.since), "now": here}
    found = {}
    for placement, overrides in PLACEMENTS.items():
        runs = {side: OUT / "unchanged" / f"{placement.replace(' ', '_')}-{side}" for side in sources}
        for side, source in sources.items():
            train(
                source,
                runs[side],
                [
                    *overrides,
                    f"policy.model_path={here / MODEL}",
                    f"algorithm.num_steps={arguments.steps}",
                    "algorithm.max_staleness=0",
                    "logger.console=plain",
                ],
            )
        found[placement] = compare(runs["earlier"], runs["now"])
    rows = [
        {
            "sampled by": placement,
            **result,
            "metrics": len(result["metrics"]),
            "different": len(result["different"]),
        }
        for placement, result in found.items()
    ]
    table = table_of(f"runs of this commit and of {arguments.since}", rows)
    publish("unchanged", {"since": arguments.since, "placements": found}, table)


if __name__ == "__main__":
    main()
