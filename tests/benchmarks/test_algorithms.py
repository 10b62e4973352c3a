"""What the table of algorithms says follows from what runs wrote."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.load import load_experiment
from nemorl.config.schema import names, variants
from nemorl.observe.files import JsonLinesWriter
from nemorl.observe.metrics import StepMetrics
from tests.scripts import load_script


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The script as a module, which `import algorithms` would not find; its runs lie in `tmp_path`."""
    module = load_script("benchmarks/algorithms.py", "bench_algorithms")
    monkeypatch.setattr(module, "RUNS", tmp_path)
    return module


def wrote(folder: Path, *lines: dict[str, float], last: int) -> None:
    """The metrics of a run: its first line, and its last."""
    folder.mkdir()
    writer = JsonLinesWriter(folder / "metrics.jsonl")
    for step, values in zip((0, 1, last), lines, strict=True):
        writer.append(StepMetrics(step, step, values).to_json())
    writer.close()


def test_every_algorithm_is_trained(benchmark):
    trained = {load_experiment(file).algorithm.name for file in benchmark.experiments([]).values()}
    assert trained == {name for variant in variants(AlgorithmConfig) for name in names(variant)}


def test_an_accuracy_that_rises_has_moved_the_right_way(benchmark, tmp_path):
    start = {"validation/accuracy": 0.4, "validation/accuracy_low": 0.35, "validation/accuracy_high": 0.45}
    end = {"validation/accuracy": 0.7, "validation/accuracy_low": 0.66, "validation/accuracy_high": 0.74}
    wrote(tmp_path / "grpo", start | {"time/step": 1.0}, {"time/step": 2.0}, end | {"time/step": 5.0}, last=7)

    (one,) = benchmark.run("grpo", benchmark.experiments(["grpo"])["grpo"], steps=7)

    assert (one.before, one.after, one.moved, one.steps) == (0.4, 0.7, "right", 7)
    assert (one.seconds_of_a_step, one.seconds) == (2.0, 8.0)
    errors = 0.05 / 1.96, 0.04 / 1.96
    assert one.standard_errors == pytest.approx(errors)
    assert one.change_in_standard_errors == pytest.approx(0.3 / math.sqrt(errors[0] ** 2 + errors[1] ** 2))
    row = benchmark.row_of(one)
    assert (row["before"], row["after"]) == ("0.400 ± 0.026", "0.700 ± 0.020")
    assert row["moved"] == "right"
    assert "| grpo | accuracy | 0.400 ± 0.026 |" in benchmark.markdown_of([row])


@pytest.mark.parametrize(
    ("after", "moved"), [(0.4, "within noise"), (0.45, "within noise"), (0.3, "wrong"), (0.48, "right")]
)
def test_less_than_two_standard_errors_are_noise(benchmark, after, moved):
    one = benchmark.Learned("gdpo", "reward", 0.4, after, (0.02, 0.03), 7, 1.0, 8.0, None)
    assert one.moved == moved


def test_rows_are_made_again_next_to_those_of_an_earlier_table(benchmark, tmp_path):
    def row(algorithm: str, after: float) -> Any:
        return benchmark.Learned(algorithm, "accuracy", 0.4, after, (0.02, 0.02), 7, 1.0, 8.0, None)

    earlier = tmp_path / "algorithms.json"
    rows = [row("grpo", 0.5), row("gspo", 0.6), row("no longer there", 0.7)]
    earlier.write_text(json.dumps({"rows": [asdict(one) for one in rows]}), encoding="utf-8")

    found = benchmark.with_kept_rows(earlier, [row("sft", 0.8), row("gspo", 0.9)])

    assert [(one.algorithm, one.after) for one in found] == [("grpo", 0.5), ("sft", 0.8), ("gspo", 0.9)]
    assert found[0].change_in_standard_errors == pytest.approx(0.1 / math.hypot(0.02, 0.02))


@pytest.mark.parametrize(("after", "moved"), [(0.5, "right"), (2.0, "wrong")])
def test_a_divergence_is_to_fall_and_a_share_has_the_error_of_a_share(benchmark, tmp_path, after, moved):
    file = benchmark.experiments(["off_policy"])["off_policy"]
    steps = load_experiment(file).algorithm.num_steps
    start = {"validation/accuracy": 0.0, "time/step": 1.0}
    end = {"validation/accuracy": 0.5, "distillation/forward_kl": after}
    wrote(tmp_path / "off_policy", start, {"distillation/forward_kl": 1.0}, end, last=steps)
    measured = tmp_path / "teachers" / "runs-quickstart-grpo-hf" / "eval" / "metrics.json"
    measured.parent.mkdir(parents=True)
    measured.write_text('{"metrics": {"validation/accuracy": 0.55}}', encoding="utf-8")

    accuracy, divergence = benchmark.run("off_policy", file, steps=7)

    assert accuracy.standard_errors == (0.0, pytest.approx(0.025))  # 400 tasks
    assert (accuracy.teacher, divergence.teacher) == (0.55, None)
    assert divergence.standard_errors is None
    assert divergence.change_in_standard_errors is None
    assert benchmark.row_of(divergence)["moved"] == moved


def test_a_run_that_lacks_its_metric_failed(benchmark, tmp_path):
    wrote(tmp_path / "grpo", {}, {}, {"validation/accuracy": 0.4}, last=7)
    with pytest.raises(RuntimeError, match="grpo has not written validation/accuracy twice"):
        benchmark.run("grpo", benchmark.experiments(["grpo"])["grpo"], steps=7)
