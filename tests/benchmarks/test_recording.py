"""What recording adds to a step, from runs whose seconds are known."""

from pathlib import Path

import pytest

from nemorl.config.load import examine
from nemorl.config.run import CheckpointingConfig
from nemorl.observe.metrics import StepMetrics
from tests.scripts import load_script


def test_each_round_is_compared_with_its_own_run_without_records() -> None:
    benchmark = load_script("benchmarks/recording.py", "bench_recording")

    def run(scale: float, recording: float) -> dict[str, float]:
        values = {"time/step": 2.0, "time/refit": 0.1, "time/recording": recording}
        steps = [StepMetrics(1, 1, {name: 10 * value for name, value in values.items()})]
        steps += [StepMetrics(n, n, {k: scale * value for k, value in values.items()}) for n in (2, 3)]
        seconds = benchmark.seconds_of(steps)
        assert seconds["step"] == 2 * scale
        return dict(seconds)

    rounds = [
        {"none": run(scale, 0.0), "sampled": run(scale, 0.01), "all": run(scale, 0.05)} for scale in (1, 3)
    ]
    rows = {row["trajectories"]: row for row in benchmark.compare(rounds)}
    assert rows["none"]["share_of_a_step"] == 0
    assert rows["sampled"]["share_of_a_step"] == pytest.approx(0.005)
    assert rows["all"]["share_of_a_step"] == pytest.approx(0.025)
    assert rows["all"]["steps_ratio"] == 1


def test_a_config_with_checkpoints_is_run_without_them() -> None:
    launch = load_script("benchmarks/launch.py", "bench_launch")
    loaded = examine(Path("quickstart/grpo"), launch.without_checkpoints())
    assert [one for one in loaded.problems if one.field.startswith("checkpointing")] == []
    checkpointing = loaded.sections["checkpointing"]
    assert isinstance(checkpointing, CheckpointingConfig)
    assert not checkpointing.enabled
    assert not checkpointing.save_hf
