"""Simulated runs whose times follow from a formula, and what a simulation of many GPUs costs."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.simulate.simulation import Deadlock, Prediction, predict, run_in_virtual_time
from nemorl.simulate.workload import LogNormal, Workload
from tests.simulate.experiments import experiment

# Every turn has 32 tokens, so that an entry of an array is a token; nothing else takes time.
EVEN = Workload(
    prompt_tokens=LogNormal(8),
    turn_tokens=LogNormal(32),
    decode_base=0.5,
    decode_each=0.0,
    prefill=0.0,
    training=0.0,
    update=0.0,
    loading=0.0,
    refit=0.0,
)


def test_the_clock_jumps_and_ends_in_an_error_where_nothing_is_scheduled() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(asyncio.sleep(86400), asyncio.sleep(3600.25))
        return began, loop.time()

    assert run_in_virtual_time(main()) == (0.0, 86400.0)

    async def forever() -> None:
        await asyncio.sleep(1)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_in_virtual_time(forever())


def test_one_engine_decodes_in_rounds_of_its_batch(tmp_path: Path) -> None:
    """24 sequences in an engine of 16: two rounds of 32 steps, which depend on the sequences in them."""
    one = experiment(tmp_path, prompts=6, samples=4, max_batch_size=16)
    workload = replace(EVEN, decode_each=0.01)

    predicted = predict(one, workload, seed=0, num_steps=3)

    expected = 32 * (0.5 + 16 * 0.01) + 32 * (0.5 + 8 * 0.01)
    assert predicted.step_seconds == pytest.approx(expected)
    assert predicted.generated_per_second == pytest.approx(24 * 32 / expected)
    assert predicted.trained_per_second == pytest.approx(24 * (32 + 8) / expected)
    assert predicted.shares["generation"]["decoding"] == pytest.approx(1.0)
    assert predicted.shares["policy"]["idle"] == pytest.approx(1.0)
    assert predicted.bottleneck == "generation"


def test_prompts_delay_all_sequences_of_an_engine(tmp_path: Path) -> None:
    one = experiment(tmp_path, prompts=4, samples=4, max_batch_size=16)
    workload = replace(EVEN, prefill=0.25)

    assert predict(one, workload, 0, 2).step_seconds == pytest.approx(32 * 0.5 + 16 * 8 * 0.25)


# A step samples for 16 s, trains for 12 s (16 trajectories of 40 tokens, and an update), and refits for 4 s.
STEP = replace(EVEN, training=10 / (16 * 40), update=1.0, loading=1.0, refit=4.0)


@pytest.mark.parametrize(("staleness", "seconds"), [(0, 16 + 12 + 4), (1, 16 + 4), (4, 16 + 4)])
def test_staleness_hides_the_shorter_of_two_stages(tmp_path: Path, staleness: int, seconds: float) -> None:
    """In turns a step takes all stages; ahead of training the longer one, while engines pause for refits."""
    even = experiment(tmp_path, prompts=4, samples=4, max_batch_size=16, staleness=staleness)

    predicted = predict(even, STEP, 0, 8)

    assert predicted.step_seconds == pytest.approx(seconds, rel=0.02)
    assert predicted.shares["policy"]["training"] == pytest.approx(11 / seconds, rel=0.02)


def test_a_slow_policy_is_the_bottleneck(tmp_path: Path) -> None:
    slow = experiment(tmp_path, prompts=4, samples=4, max_batch_size=16, staleness=2)

    predicted = predict(slow, replace(STEP, update=40.0), 0, 8)

    assert predicted.bottleneck == "policy"
    assert predicted.step_seconds == pytest.approx(10 + 40 + 1 + 4, rel=0.02)
    assert predicted.shares["policy"]["idle"] == pytest.approx(0, abs=0.02)


def test_what_an_update_costs(tmp_path: Path) -> None:
    """`continue` pauses for the update alone, `restart` reads again, `finish` waits for what runs."""

    def predicted(on_update: str) -> Prediction:
        overrides = (f"generation.on_update={on_update}",)
        one = experiment(tmp_path, prompts=4, samples=4, staleness=2, overrides=overrides)
        return predict(one, replace(EVEN, update=8.0, refit=4.0, prefill=0.05), 0, 8)

    kept, read_again, ended = map(predicted, ("continue", "restart", "finish"))

    assert kept.stages["refit"] == read_again.stages["refit"] == pytest.approx(4)
    assert kept.step_seconds < read_again.step_seconds
    assert ended.stages["refit"] > 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ages_are_within_the_bound(tmp_path: Path, staleness: int) -> None:
    tailed = experiment(tmp_path, prompts=8, samples=4, staleness=staleness, max_new_tokens=512)
    workload = replace(STEP, turn_tokens=LogNormal(64, sigma=1.0))

    predicted = predict(tailed, workload, 1, 10)

    assert max(predicted.ages) == staleness
    assert sum(predicted.ages.values()) == pytest.approx(1)


def test_the_environment_delays_a_conversation(tmp_path: Path) -> None:
    one = experiment(tmp_path, prompts=4, samples=4, max_batch_size=16)
    workload = replace(EVEN, turns=LogNormal(3), environment=LogNormal(7.0))

    predicted = predict(one, workload, 0, 2)

    assert predicted.step_seconds == pytest.approx(3 * (16 + 7))
    assert predicted.stages["environment"] == pytest.approx(3 * 7)


def test_a_seed_decides_on_everything(tmp_path: Path) -> None:
    unsteady = experiment(tmp_path, prompts=8, samples=4, replicas=4, staleness=2, max_new_tokens=512)
    workload = replace(
        STEP, turn_tokens=LogNormal(64, sigma=1.0), environment=LogNormal(2, 1.0), engine_failures=900.0
    )

    first, again, other = (predict(unsteady, workload, seed, 10) for seed in (3, 3, 4))

    assert first == again
    assert first != other
    assert first.lost_engines > 0


def test_lost_engines_cost_throughput(tmp_path: Path) -> None:
    even = experiment(tmp_path, prompts=8, samples=8, replicas=4, max_batch_size=16)
    failing = replace(EVEN, engine_failures=400.0, engine_start=60.0)

    sound, lossy = predict(even, EVEN, 2, 20), predict(even, failing, 2, 20)

    assert lossy.lost_engines > 0
    assert lossy.shares["generation"]["lost"] > 0
    assert lossy.step_seconds > sound.step_seconds == pytest.approx(16.0)


def test_4096_gpus(tmp_path: Path) -> None:
    """512 engines of 8 GPUs; docs/simulate.md has the seconds that it takes."""
    workers = ("cluster.rollout_workers=16",)
    large = experiment(tmp_path, prompts=256, samples=8, replicas=512, max_new_tokens=8192, overrides=workers)
    workload = replace(EVEN, turn_tokens=LogNormal(2048), decode_base=0.02, decode_each=1e-3, refit=5.0)

    predicted = predict(large, workload, 0, num_steps=2)

    # Four sequences in each engine, and a few more in some: a router knows only its own requests.
    assert predicted.step_seconds >= 2048 * (0.02 + 4 * 1e-3) + 5
    assert predicted.generated_per_second == pytest.approx(2048 * 2048 / predicted.step_seconds, rel=1e-3)
