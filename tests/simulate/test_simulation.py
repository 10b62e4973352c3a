"""Simulated runs whose times follow from a formula, and what a simulation of many GPUs costs."""

import asyncio
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist

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


def test_an_engine_may_be_lost_more_often_in_a_step_than_it_is_restarted_in_a_row(tmp_path: Path) -> None:
    """A step of 12 rounds of 64 s, and a loss every 200 s, after which the engine works again."""
    one = experiment(tmp_path, prompts=6, samples=4, overrides=("generation.concurrency=2",))
    failing = replace(EVEN, decode_base=2.0, engine_failures=200.0, engine_start=1.0)

    predicted = predict(one, failing, seed=0, num_steps=1)

    assert predicted.lost_engines > 2 * (one.cluster.max_worker_restarts + 1)


def test_lost_rollout_workers_cost_time_and_no_groups(tmp_path: Path) -> None:
    two = ("cluster.rollout_workers=2",)
    even = experiment(tmp_path, prompts=4, samples=4, max_batch_size=16, overrides=two)
    failing = replace(EVEN, worker_failures=60.0, worker_start=10.0)

    sound, lossy = predict(even, EVEN, 1, 20), predict(even, failing, 1, 20)

    assert lossy.dropped["lost"] > 0 == sound.dropped["lost"]
    assert lossy.step_seconds > sound.step_seconds == pytest.approx(16.0)
    assert lossy.generated_per_second * lossy.step_seconds == pytest.approx(16 * 32)


@pytest.mark.parametrize(
    ("on_error", "problem"),
    [
        ("drop_group", "12 groups in a row were dropped"),
        ("skip", "all 16 trajectories of a step failed"),
        ("fail", "sample 0.* of task 0: the environment failed"),
    ],
)
def test_environments_that_always_fail_end_a_run(tmp_path: Path, on_error: str, problem: str) -> None:
    overrides = ("env={name: math}", f"env.on_error={on_error}")
    one = experiment(tmp_path, prompts=4, samples=4, overrides=overrides)

    with pytest.raises(Exception, match=problem):
        predict(one, replace(EVEN, environment_failures=1.0), 0, 1)


def test_environments_that_fail_are_repeated(tmp_path: Path) -> None:
    """With 3 repetitions one conversation in 16 of two turns, of which half fail, would fail in the end."""
    one = experiment(tmp_path, prompts=4, samples=4, overrides=("env={name: math}", "env.max_retries=3"))
    workload = replace(EVEN, environment_failures=0.25)

    sound, failing = predict(one, EVEN, 0, 10), predict(one, workload, 0, 10)

    assert failing.step_seconds > 1.5 * sound.step_seconds
    assert failing.trained_per_second * failing.step_seconds == pytest.approx(16 * 40, rel=0.02)


def test_engines_join_until_there_are_max_replicas(tmp_path: Path) -> None:
    """Of 64 sequences an engine decodes 16 together: one engine takes four rounds, and four engines one."""
    overrides = ("generation.max_replicas=4",)
    one = experiment(tmp_path, prompts=16, samples=4, max_batch_size=16, overrides=overrides)
    workload = replace(EVEN, engine_start=20.0)

    predicted = predict(one, workload, 0, 4)

    assert predicted.step_seconds == pytest.approx(16.0)
    assert predicted.shares["generation"]["decoding"] == pytest.approx(1.0)


def test_4096_gpus(tmp_path: Path) -> None:
    """512 engines of 8 GPUs and a long tail; docs/simulate.md has the seconds that it takes."""
    workers, limit = ("cluster.rollout_workers=16",), 8192
    large = experiment(
        tmp_path, prompts=256, samples=8, replicas=512, max_new_tokens=limit, overrides=workers
    )
    workload = replace(EVEN, turn_tokens=LogNormal(2048, 1.0), decode_base=0.02, decode_each=1e-3, refit=5.0)

    predicted = predict(large, workload, 0, num_steps=2)

    # One in 34 of the 2,048 answers of a step reaches the limit. Its engine has 1 to 8 sequences.
    assert limit * (0.02 + 1e-3) + 5 <= predicted.step_seconds <= limit * (0.02 + 8e-3) + 5
    # The mean of a log-normal distribution that is cut at the limit; its deviation is about as large.
    cut, normal = (log(limit / 2048) + 0.5) / 1.0, NormalDist()
    mean = 2048 * normal.cdf(cut - 1.0) + limit * (1 - normal.cdf(cut))
    tokens = predicted.generated_per_second * predicted.step_seconds
    assert tokens == pytest.approx(2048 * mean, rel=4 / sqrt(2 * 2048))
