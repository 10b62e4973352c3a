"""What the table of algorithms says follows from what runs wrote."""

import math
import sys
from importlib import util
from pathlib import Path

import pytest

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.load import load_experiment
from nemorl.config.schema import names, variants
from nemorl.observe.metrics import MetricsWriter, StepMetrics

FILE = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The script as a module, which `import algorithms` would not find; its runs lie in `tmp_path`."""
    spec = util.spec_from_file_location("bench_algorithms", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_algorithms", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RUNS", tmp_path)
    return module


def wrote(folder: Path, *lines: dict[str, float], last: int) -> None:
    """The metrics of a run: its first line, and its last."""
    folder.mkdir()
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step, values in zip((0, 1, last), lines, strict=True):
        writer.write(StepMetrics(step, step, values))
    writer.close()


def test_every_algorithm_is_trained(benchmark):
    trained = {load_experiment(file).algorithm.name for file in benchmark.experiments([]).values()}
    assert trained == {name for variant in variants(AlgorithmConfig) for name in names(variant)}


def test_an_accuracy_that_rises_has_moved_the_right_way(benchmark, tmp_path):
    start = {"validation/accuracy": 0.4, "validation/accuracy_low": 0.35, "validation/accuracy_high": 0.45}
    end = {"validation/accuracy": 0.7, "validation/accuracy_low": 0.66, "validation/accuracy_high": 0.74}
    wrote(tmp_path / "grpo", start | {"time/step": 1.0}, {"time/step": 2.0}, end | {"time/step": 5.0}, last=7)

    (one,) = benchmark.run("grpo", benchmark.experiments(["grpo"])["grpo"], steps=7)

    assert (one.before, one.after, one.better, one.steps) == (0.4, 0.7, True, 7)
    assert (one.seconds_of_a_step, one.seconds) == (2.0, 8.0)
    errors = 0.05 / 1.96, 0.04 / 1.96
    assert one.standard_errors == pytest.approx(errors)
    assert one.change_in_standard_errors == pytest.approx(0.3 / math.sqrt(errors[0] ** 2 + errors[1] ** 2))
    row = benchmark.row_of(one)
    assert (row["before"], row["after"]) == ("0.400 ± 0.026", "0.700 ± 0.020")
    assert row["moved the right way"] == "true"
    assert "| grpo | accuracy | 0.400 ± 0.026 |" in benchmark.markdown_of([row])


@pytest.mark.parametrize(("after", "better"), [(0.5, "true"), (2.0, "false")])
def test_a_divergence_is_to_fall_and_a_share_has_the_error_of_a_share(benchmark, tmp_path, after, better):
    file = benchmark.experiments(["off_policy"])["off_policy"]
    steps = load_experiment(file).algorithm.num_steps
    start = {"validation/accuracy": 0.0, "time/step": 1.0}
    end = {"validation/accuracy": 0.5, "distillation/forward_kl": after}
    wrote(tmp_path / "off_policy", start, {"distillation/forward_kl": 1.0}, end, last=steps)

    accuracy, divergence = benchmark.run("off_policy", file, steps=7)

    assert accuracy.standard_errors == (0.0, pytest.approx(0.025))  # 400 tasks
    assert divergence.standard_errors is None
    assert divergence.change_in_standard_errors is None
    assert benchmark.row_of(divergence)["moved the right way"] == better


def test_a_run_that_lacks_its_figure_failed(benchmark, tmp_path):
    wrote(tmp_path / "grpo", {}, {}, {"validation/accuracy": 0.4}, last=7)
    with pytest.raises(RuntimeError, match="grpo has not written validation/accuracy twice"):
        benchmark.run("grpo", benchmark.experiments(["grpo"])["grpo"], steps=7)
