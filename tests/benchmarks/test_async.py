"""The predictions next to the asynchronous benchmark's runs, for a run whose workload is known."""

import pytest

from nemorl.simulate.simulation import predict
from nemorl.simulate.workload import LogNormal, Workload
from tests.scripts import load_script
from tests.simulate.test_trace import write_run


def test_runs_are_predicted_from_each_other(tmp_path, monkeypatch):
    benchmark = load_script("benchmarks/async.py", "bench_async")
    monkeypatch.setattr(benchmark, "OUT", tmp_path)
    monkeypatch.setattr(benchmark, "SIMULATED_STEPS", 20)
    # As in paced.py: a decode step has its seconds whatever its batch, and training those of its tokens.
    workload = Workload(
        prompt_tokens=LogNormal(6),
        turn_tokens=LogNormal(32, sigma=0.8),
        decode_base=0.03,
        decode_each=0.0,
        training=0.03 / 16,
        update=0.0,
        loading=0.05,
        refit=0.1,
    )
    runs = []
    for staleness in (0, 4):
        config = benchmark.experiment(benchmark.folder_of(staleness), staleness, 12, 1.0)
        measured = predict(config, workload, seed=5, num_steps=20).generated_per_second
        runs.append({"staleness": staleness, "steps": 12, "tokens_per_second": measured})
        write_run(config, workload, tmp_path / f"async-{staleness}", 12)

    benchmark.add_predictions(runs, balance=1.0)

    ratios = {(run["staleness"], of): run[f"predicted_from_{of}"] for run in runs for of in (0, 4)}
    # The run ahead says nothing of engines with few sequences, which are slower here than assumed.
    assert ratios.pop((0, 4)) == pytest.approx(1.0, abs=0.4)
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.1)
