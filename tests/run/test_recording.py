"""What a run writes of its trajectories: tokens, what was trained, and a row for each, also after a kill."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from nemorl.data.trained import read_trained
from nemorl.observe.index import TrajectoryIndex
from nemorl.observe.live import read_live
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles
from tests.run.runs import finish, lines, start, tiny_model, write_experiment

pytestmark = pytest.mark.ci
STEPS, SAMPLES, TASKS = 16, 16, 20


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_each_trajectory_once_with_what_was_trained(tmp_path: Path) -> None:
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    config = write_experiment(
        tmp_path,
        model,
        "run",
        policy={"layout": {"data_parallel_size": 2}},
        algorithm={"num_steps": STEPS, "validation": {"period": 8}},
        checkpointing={"period": 1},
        logger={"trajectories": "all"},
        cluster={"rollout_workers": 2},
    )
    driver = start("train", config)
    live = None
    while live is None or not live.engines or not live.step:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.1)
        live = read_live(RunPaths(run).live)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    folder = RunPaths(run).trajectories
    assert live.end is None
    assert {worker.group for worker in live.workers} >= {"policy", "rollout", "generation"}
    assert [engine.state for engine in live.engines] == ["up"]
    columns, killed = TrajectoryIndex(folder).read()
    assert (killed["step"] >= 1).any()
    files = RolloutFiles(folder)
    for step in set(killed["step"][killed["stored"]].tolist()):
        assert len([group for at, group in files.summaries() if at == step]) == SAMPLES // 4

    status, output = finish(start("train", config, "--resume"))
    assert status == 0, output
    columns, index = TrajectoryIndex(folder).read()
    phases = np.array(columns.texts["phase"])[index["phase"]]
    trained = index[phases == "training"]
    assert np.array_equal(np.unique(trained["step"], return_counts=True)[1], [SAMPLES] * STEPS)
    validated = index[phases == "validation"]
    assert np.unique(validated["step"]).tolist() == [8, 16]
    assert len(validated) == 2 * TASKS
    assert validated["stored"].all()
    answers = RolloutFiles(folder, "validation")
    assert answers.steps() == [8, 16]
    assert [group.task_index for at, group in answers.summaries() if at == 8] == list(range(TASKS))
    assert np.isnan(answers.group(8, 0).advantages[0]).all()
    places = np.stack([trained["step"], trained["group"], trained["sample"]])
    assert len(np.unique(places, axis=1).T) == len(trained)

    metrics = {line.step: line.values for line in lines(run)}
    by_place = {(r["step"].item(), r["group"].item(), r["sample"].item()): r for r in trained}
    files, gaps = RolloutFiles(folder), {step: [0.0, 0.0] for step in range(1, STEPS + 1)}
    for step in files.steps():
        groups = [group for at, group in files.summaries() if at == step]
        for place, summary in enumerate(groups):
            stored = files.group(step, place)
            for sample, (t, sequence) in enumerate(zip(summary.trajectories, stored.sequences, strict=True)):
                row = by_place[step, summary.group, sample]
                assert row["reward"] == pytest.approx(t.reward)
                assert row["tokens"] == sequence.num_tokens
                assert row["stored"]
                arrays = read_trained(folder, step, f"{summary.group}/{t.row}")
                if not row["trains"]:
                    assert not arrays or not arrays["mask"].any()
                    continue
                assert np.array_equal(arrays["mask"], sequence.loss_mask)
                assert np.array_equal(arrays["advantages"], stored.advantages[t.row])
                gap = np.abs(arrays["logprobs"] - sequence.logprobs)[sequence.loss_mask]
                assert row["logprob_gap"] == pytest.approx(gap.mean(), abs=1e-6)
                assert row["advantage"] == pytest.approx(arrays["advantages"][sequence.loss_mask].mean())
                gaps[step][0] += float(gap.sum())
                gaps[step][1] += len(gap)
    for step, (total, count) in gaps.items():
        if "logprob_gap/mean" in metrics[step] and metrics[step]["group/zero_variance"] == 0:
            assert total / count == pytest.approx(metrics[step]["logprob_gap/mean"], abs=1e-6)
    end = read_live(RunPaths(run).live)
    assert end is not None
    assert end.end is not None
    assert (end.end.outcome, end.step) == ("complete", STEPS)


@pytest.mark.slow
def test_trajectories_that_cannot_be_written_cost_warnings(tmp_path: Path) -> None:
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    config = write_experiment(
        tmp_path,
        model,
        "run",
        policy={"layout": {}},
        algorithm={"num_steps": 2, "validation": {"period": None}},
    )
    driver = start("train", config)
    folder = RunPaths(run).trajectories
    while not (folder / "rollout.json").exists():
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    for step in (1, 2):  # in the place of the files
        (folder / f"step_{step:06d}-0.safetensors.tmp").mkdir()
    status, output = finish(driver)
    assert status == 0, output
    assert "Trajectories of step 2 were not stored" in output
    assert not TrajectoryIndex(folder).read()[1]["stored"].any()
