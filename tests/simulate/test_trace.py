"""Workloads of finished runs: of simulated ones, whose workload is known."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.load import to_yaml
from nemorl.errors import UsageError
from nemorl.observe.files import JsonLinesWriter
from nemorl.observe.metrics import Sample, StepMetrics
from nemorl.observe.run_folder import RunPaths
from nemorl.simulate.simulation import Simulation, open_simulation, predict, run_in_virtual_time
from nemorl.simulate.trace import traced_workload
from nemorl.simulate.workload import LogNormal, Workload
from tests.selection import in_all
from tests.simulate.experiments import experiment

TRUE = Workload(
    prompt_tokens=LogNormal(24),
    turn_tokens=LogNormal(60, sigma=0.8),
    environment=LogNormal(3.0),
    decode_base=0.04,
    decode_each=2e-4,
    prefill=1e-4,
    training=2e-4,
    update=0.0,
    loading=0.25,
    refit=1.5,
)


def write_run(of: Experiment, workload: Workload, folder: Path, num_steps: int = 6) -> None:
    """The files of a run that had this workload."""
    paths = RunPaths(folder)
    folder.mkdir()
    paths.config.write_text(to_yaml(of), encoding="utf-8")
    metrics, samples = JsonLinesWriter(paths.metrics), JsonLinesWriter(paths.samples)

    async def main() -> None:
        async with open_simulation(of, workload, seed=7) as simulation:
            prepare = simulation.update.prepare
            simulation.update.prepare = lambda groups, number, *rest: (  # type: ignore[method-assign]
                [record(simulation, number, group.trajectories) for group in groups],
                prepare(groups, number, *rest),
            )[1]
            for number in range(1, num_steps + 1):
                before = simulation.snapshot()
                values = await simulation.step()
                after = simulation.snapshot()
                stages = {f"time/{n}": s - before.stages.get(n, 0) for n, s in after.stages.items()}
                seconds = {**stages, "time/step": after.seconds - before.seconds}
                metrics.append(StepMetrics(number, number, {**values, **seconds}).to_json())

    def record(_: Simulation, number: int, trajectories: tuple) -> None:
        t = trajectories[0]
        prompt = t.num_tokens - t.num_sampled
        stop, seconds = str(t.stop), t.seconds_environment
        sample = Sample(number, "training", 0, "", "", t.reward, {}, stop, prompt, t.num_sampled, seconds)
        samples.append(asdict(sample))

    run_in_virtual_time(main())


def test_a_trace_predicts_the_run_and_others_of_its_kind(tmp_path: Path) -> None:
    """The run itself within 5%, and a run ahead of training on more engines within 10%."""
    run = experiment(tmp_path, prompts=16, samples=8, replicas=2, max_new_tokens=256)
    write_run(run, TRUE, tmp_path / "run")

    workload = traced_workload(run, tmp_path / "run")

    expected, found = (predict(run, w, 1, 8) for w in (TRUE, workload))
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=0.05)
    assert found.stages["training"] == pytest.approx(expected.stages["training"], rel=0.05)
    assert workload.environment.mean == pytest.approx(3.0, rel=0.1)
    assert (workload.refit, workload.loading) == (pytest.approx(1.5), pytest.approx(0.25))
    ahead = experiment(tmp_path, prompts=16, samples=8, replicas=4, max_new_tokens=256, staleness=2)
    expected, found = (
        predict(ahead, TRUE, 1, 20),
        predict(ahead, traced_workload(ahead, tmp_path / "run"), 1, 20),
    )
    assert found.trained_per_second == pytest.approx(expected.trained_per_second, rel=0.1)


@pytest.mark.parametrize("training", [2e-4, *in_all(2e-5)])  # longer than sampling, and shorter
def test_a_run_ahead_of_training_predicts_itself_and_the_run_without_staleness(
    tmp_path: Path, training: float
) -> None:
    """Within 10%, and within 15% what depends on the longest of a step, of which it drops some."""
    true = replace(TRUE, training=training, turn_tokens=LogNormal(60, sigma=0.4))
    ahead = experiment(tmp_path, prompts=16, samples=8, replicas=2, max_new_tokens=256, staleness=2)
    write_run(ahead, true, tmp_path / "run", num_steps=12)

    workload = traced_workload(ahead, tmp_path / "run")

    assert workload.environment.mean == pytest.approx(3.0, rel=0.1)
    behind = experiment(tmp_path, prompts=16, samples=8, replicas=2, max_new_tokens=256)
    for run, tolerance in ((ahead, 0.1), (behind, 0.15)):
        expected, found = (predict(run, w, 1, 20) for w in (true, workload))
        assert found.step_seconds == pytest.approx(expected.step_seconds, rel=tolerance)


def test_a_run_that_dropped_its_long_answers_is_no_good_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = experiment(tmp_path, prompts=16, samples=8, replicas=2, max_new_tokens=256, staleness=2)
    write_run(ahead, replace(TRUE, training=2e-5), tmp_path / "run")

    traced_workload(ahead, tmp_path / "run")

    assert "of its groups, among which long answers are more frequent" in caplog.text


def test_training_scales_with_the_policy(tmp_path: Path) -> None:
    one = experiment(tmp_path, samples=8)
    write_run(one, TRUE, tmp_path / "run")
    four = experiment(tmp_path, samples=8, overrides=("policy.layout.data_parallel_size=4",))

    assert traced_workload(four, tmp_path / "run").training == pytest.approx(TRUE.training / 4, rel=1e-3)


def test_folders_that_say_too_little_are_refused(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    with pytest.raises(UsageError, match=r"expected the folder of a run"):
        traced_workload(one, tmp_path)
    write_run(one, TRUE, tmp_path / "empty", num_steps=0)
    with pytest.raises(UsageError, match=r"metrics.jsonl has no step of training"):
        traced_workload(one, tmp_path / "empty")
    write_run(one, TRUE, tmp_path / "silent", num_steps=1)
    RunPaths(tmp_path / "silent").samples.unlink()
    with pytest.raises(UsageError, match=r"samples.jsonl has no samples of training \(logger.samples_per"):
        traced_workload(one, tmp_path / "silent")


def test_a_trace_without_an_environment_has_none(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    write_run(one, replace(TRUE, environment=LogNormal(0)), tmp_path / "run")

    assert traced_workload(one, tmp_path / "run").environment.mean == 0
