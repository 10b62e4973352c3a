"""Does self-play win against a fixed opponent? The first and the last validation of runs, such as

nemorl train configs/grpo_tictactoe_self_play.yaml seed=1 run_dir=runs/tictactoe-1
python benchmarks/self_play.py runs/tictactoe-*
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from common import publish, table_of

from nemorl.observe.metrics import read_metrics
from nemorl.run.validation import QUANTILE

REWARD = "validation/reward"


def standard_error(values: Mapping[str, float]) -> float:
    """Of the mean reward over the tasks of a validation."""
    return (values[f"{REWARD}_high"] - values[f"{REWARD}_low"]) / (2 * QUANTILE)


def main() -> None:
    """Read each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dirs", type=Path, nargs="+")
    rows: list[dict[str, object]] = []
    curves: dict[str, dict[int, float]] = {}
    for run_dir in parser.parse_args().run_dirs:
        steps = [step for step in read_metrics(run_dir / "metrics.jsonl") if REWARD in step.values]
        if len(steps) < 2:
            parser.error(f"{run_dir} has {len(steps)} validations; two are required")
        first, last = steps[0].values, steps[-1].values
        before, after = standard_error(first), standard_error(last)
        curves[run_dir.name] = {step.step: step.values[REWARD] for step in steps}
        rows.append(
            {
                "run": run_dir.name,
                "steps": steps[-1].step,
                "first": first[REWARD],
                "last": last[REWARD],
                "last_error": after,
                "rise_in_standard_errors": (last[REWARD] - first[REWARD]) / (before**2 + after**2) ** 0.5,
                **{name: value for name, value in last.items() if "/players/" in name},
            }
        )
    publish("self_play", {"validations": curves, "runs": rows}, table_of("reward in validations", rows))


if __name__ == "__main__":
    main()
