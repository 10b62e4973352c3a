"""Limits of concurrency in simulated runs: what a fixed one costs, and what an adaptive one finds."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.simulate.simulation import predict
from nemorl.simulate.workload import LogNormal, Workload
from tests.simulate.experiments import experiment
from tests.simulate.test_simulation import EVEN

SHORT = Workload(
    prompt_tokens=LogNormal(8),
    turn_tokens=LogNormal(64, sigma=1.0),
    decode_base=0.02,
    decode_each=0.002,
    prefill=0.0,
    training=1e-5,
    update=0.2,
    loading=0.2,
    refit=1.0,
)
PAUSING = replace(SHORT, turns=LogNormal(4), environment=LogNormal(2.0, sigma=1.0), refit=5.0)
READING = replace(SHORT, prompt_tokens=LogNormal(512), prefill=5e-4)


def test_a_fixed_limit_makes_rounds(tmp_path: Path) -> None:
    """24 trajectories of 32 tokens, at most 4 of them in the engine: six rounds."""
    one = experiment(tmp_path, prompts=6, samples=4, overrides=("generation.concurrency=4",))

    predicted = predict(one, replace(EVEN, decode_each=0.01), seed=0, num_steps=3)

    assert predicted.step_seconds == pytest.approx(6 * 32 * (0.5 + 4 * 0.01))
    assert predicted.sequences == pytest.approx(4)


@pytest.mark.parametrize("workload", [SHORT, PAUSING, READING], ids=["short", "pausing", "reading"])
def test_an_adaptive_limit_is_as_good_as_the_best_fixed_one(tmp_path: Path, workload: Workload) -> None:
    """From one trajectory for each engine, and from all; 4 would be far too few."""

    def throughput(concurrency: int, adaptive: str = "false") -> float:
        overrides = (f"generation.concurrency={concurrency}", f"generation.adaptive_concurrency={adaptive}")
        one = experiment(
            tmp_path,
            prompts=8,
            samples=8,
            staleness=2,
            max_new_tokens=512,
            max_batch_size=16,
            overrides=overrides,
        )
        return predict(one, workload, 1, 6).trained_per_second

    best = max(map(throughput, (16, 32)))

    assert throughput(4) < 0.8 * best
    assert throughput(1, "true") > 0.9 * best
    assert throughput(192, "true") > 0.9 * best
