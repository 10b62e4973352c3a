"""Did the reward rise beyond noise? Mean and spread over the first and the last five steps of a run.

python benchmarks/reward_rise.py runs/grpo_smollm2_reasoning
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from common import publish, table_of

from nemorl.observe.metrics import StepMetrics, read_metrics

WINDOW = 5


def metrics(steps: list[StepMetrics], key: str) -> dict[str, float]:
    return rise_of([step.values[key] for step in steps])


def rise_of(curve: list[float]) -> dict[str, float]:
    """Mean and standard deviation over steps at both ends; the rise in standard errors of the difference."""
    first, last = curve[:WINDOW], curve[-WINDOW:]
    error = ((stdev(first) ** 2 + stdev(last) ** 2) / WINDOW) ** 0.5
    rise = fmean(last) - fmean(first)
    return {
        "first_mean": fmean(first),
        "first_stdev": stdev(first),
        "last_mean": fmean(last),
        "last_stdev": stdev(last),
        "rise": rise,
        "rise_in_standard_errors": rise / error if error else 0.0,
    }


def main() -> None:
    """Read a run and report each of its rewards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    steps = [s for s in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in s.values]
    if len(steps) < 2 * WINDOW:
        parser.error(f"{run_dir} has {len(steps)} steps with a reward; {2 * WINDOW} are required")
    keys = [k for k in steps[-1].values if k.startswith("reward/") and k != "reward/std"]
    found = {key: metrics(steps, key) for key in keys}
    rows: list[dict[str, object]] = [{"metric": key, **values} for key, values in found.items()]
    title = f"{run_dir.name}: first and last {WINDOW} of {len(steps)} steps"
    publish(f"reward_rise_{run_dir.name}", {"steps": len(steps), "metrics": found}, table_of(title, rows))


if __name__ == "__main__":
    main()
