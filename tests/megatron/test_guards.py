"""What guards let through: the formula of a spike written with numpy, and real updates of a worker."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.policy import GuardsConfig
from nemorl.megatron.guards import UpdateGuards, guarded_values
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import LENGTHS, layout, policy_config, ragged_batch

ALL = partition(len(LENGTHS), 3)
LOUD = {"name": "sgd", "lr": 1e-6, "momentum": 0.0}  # whose updates change next to nothing


def guards(**sections: object) -> UpdateGuards:
    return UpdateGuards(GuardsConfig.model_validate(sections))


def is_spike(
    x: float, before: list[float], deviations: float, min_change: float, *, both_sides: bool
) -> bool:
    """By numpy's quantiles, and scipy's name for it: a normal-consistent MAD, 1 / 0.6745."""
    values = np.array(before)
    middle = np.quantile(values, 0.5)
    scale = np.quantile(np.abs(values - middle), 0.5) * 1.4826
    far = (x - middle) if not both_sides else np.abs(x - middle)
    return bool(far > deviations * scale and far > min_change)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "entropy", "logprob_gap"])
def test_spikes_are_those_of_the_formula(name: str) -> None:
    random = np.random.default_rng(0)
    judged = {True: 0, False: 0}
    for _ in range(300):
        deviations, min_change = random.uniform(0.5, 6), random.choice([0.0, 0.4])
        limits = {"max_deviations": deviations, "min_change": min_change}
        guard = guards(**{name: limits}, window=9, warmup=5)
        history: dict[str, list[float]] = {}
        accepted: list[float] = []
        for value in random.normal(1, 0.3, 30) * random.choice([1, 1, 1, 4, -3], 30):
            expected = len(accepted) >= 5 and is_spike(
                value, accepted[-9:], deviations, min_change, both_sides=name in ("loss", "entropy")
            )
            verdict = guard.judge({name: value}, history)
            assert (bool(verdict.reason), verdict.guards) == (expected, {name: expected})
            judged[expected] += 1
            if not expected:
                accepted.append(value)
                history = guard.accept(
                    {name: value}, json.loads(json.dumps(history))
                )  # as a checkpoint has it
    assert min(judged.values()) > 500


def test_limits_actions_and_values_that_are_not_finite() -> None:
    guard = guards(
        loss={"min_value": -1.0, "max_value": 2.0}, grad_norm={"max_value": 5.0, "action": "count"}
    )
    sound = {"loss": 1.0, "grad_norm": 1.0, "entropy": 0.5}
    assert guard.judge(sound, {}).guards == {"loss": False, "grad_norm": False}
    high = guard.judge({**sound, "loss": 2.5}, {})
    assert high.reason == "loss is 2.5, above guards.loss.max_value, 2"
    assert high.guards == {"loss": True, "grad_norm": False}
    assert "below guards.loss.min_value, -1" in guard.judge({**sound, "loss": -1.5}, {}).reason
    counted = guard.judge({**sound, "grad_norm": 9.0}, {})
    assert (counted.reason, counted.guards) == ("", {"loss": False, "grad_norm": True})
    # Also of quantities that only count, that have no limits, and without any guard.
    for name in sound:
        for value in (math.nan, math.inf, -math.inf):
            assert guard.judge({**sound, name: value}, {}).reason == f"{name} is {value}"
            assert guards().judge({**sound, name: value}, {}).reason
    assert guards().judge(sound, {}).guards == {}
    assert guards().accept(sound, {}) == {}


def test_values_are_means_over_tokens() -> None:
    sums = {"loss/total": 3.0, "loss/policy": 9.0, "tokens": 4.0, "entropy": 2.0, "logprob_gap/mean": 1.0}
    assert guarded_values(sums) == {"loss": 3.0, "entropy": 0.5, "logprob_gap": 0.25}
    assert guarded_values({"loss/sft": 2.0, "nll": 8.0, "tokens": 4.0}) == {"loss": 2.0}
    assert guarded_values({"loss/preference": 2.0, "rewards/accuracy": 1.0}) == {"loss": 2.0}


@dataclass(frozen=True)
class PoisonedLoss:
    """NaN in the sequence of 33 tokens, which one data-parallel rank has."""

    needs_entropy: bool = False

    def __call__(self, batch, logprobs, entropy):
        output = CrossEntropyLoss()(batch, logprobs, entropy)
        if 33 not in batch.lengths:
            return output
        return replace(output, loss=output.loss * math.nan)


def state_of(worker) -> dict[str, torch.Tensor]:
    optimizer = worker.optimizer
    moments = {
        f"{state} {name}": shard.values
        for state in optimizer.state_names
        for name, shard in optimizer.shards(state).items()
    }
    states = moments | dict(worker.parameters())
    return {name: values.detach().clone() for name, values in states.items()}


def train_over_a_nan(rank, world_size, rendezvous, config, poisoned):
    """Update, poisoned update, update; the states before and after the second, and the last one."""
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(ragged_batch(), rank, config)
    micro_batches = partition(mine.num_sequences, 3)
    worker.load_batch(mine)
    worker.train(micro_batches, CrossEntropyLoss())
    states, stats = [state_of(worker)], None
    if poisoned:
        stats = worker.train(micro_batches, PoisonedLoss())
        states.append(state_of(worker))
    last = worker.train(micro_batches, CrossEntropyLoss())
    states.append(state_of(worker))
    worker.close()
    return states, stats, last


@pytest.mark.parametrize("where", [layout(tp=2), layout(dp=2), layout(pp=2)])
def test_a_nan_of_one_rank_skips_the_update_of_all(pool, model, where) -> None:
    schedule = {"name": "linear", "decay_steps": 10}
    config = policy_config(model("llama")[1], layout=where, schedule=schedule)
    clean = pool.run(2, train_over_a_nan, config, False)
    for (states, stats, last), (others, _, other_last) in zip(
        pool.run(2, train_over_a_nan, config, True), clean, strict=True
    ):
        before, after, final = states
        assert stats.skipped
        assert (stats.skip_reason, stats.skipped_in_a_row) == ("grad_norm is nan", 1)
        assert all(torch.equal(after[name], before[name]) for name in before)
        # As if the batch had not been there: weights, moments, rate.
        assert all(torch.equal(final[name], others[-1][name]) for name in before)
        assert (last.lr, last.grad_norm, last.skipped_in_a_row) == (other_last.lr, other_last.grad_norm, 0)


@pytest.fixture
def worker(model, start_here):
    """A worker with a batch; call it with the fields of its config."""

    def start(**fields):
        policy = start_here(policy_config(model("llama")[1], **fields))
        policy.load_batch(ragged_batch())
        return policy

    return start


def test_limits_of_all_quantities_reach_the_update(worker) -> None:
    limits = {name: {"max_value": -1e9} for name in ("loss", "grad_norm", "entropy", "logprob_gap")}
    policy = worker(guards=limits | {"grad_norm": {"max_value": 1e9}})
    policy.compute_logprobs(ALL, old=True, reference=True)
    stats = policy.train(ALL, LOSS)
    assert stats.guards == {"loss": True, "entropy": True, "logprob_gap": True, "grad_norm": False}
    assert stats.skipped
    assert stats.skip_reason.startswith("loss is ")
    assert policy.optimizer.progress.updates == 0


def test_a_spike_is_recognized_after_a_resume(worker, tmp_path) -> None:
    limits = {"max_deviations": 5.0, "min_change": 0.01}
    config = {"optimizer": LOUD, "guards": {"grad_norm": limits, "window": 6, "warmup": 4}}
    policy = worker(**config)
    norms = [policy.train(ALL, CrossEntropyLoss()).grad_norm for _ in range(8)]
    assert policy.optimizer.progress.accepted == {"grad_norm": norms[-6:]}
    policy.save_checkpoint(tmp_path / "checkpoint")
    policy.close()

    batch = ragged_batch()
    spiking = replace(batch, weights=batch.weights * 3)
    policy = worker(**config)
    policy.load_batch(spiking)
    assert not policy.train(ALL, CrossEntropyLoss()).skipped  # there is nothing to compare it with
    policy.load_checkpoint(tmp_path / "checkpoint")
    stats = policy.train(ALL, CrossEntropyLoss())
    assert stats.skipped
    assert "the median of 6 updates; guards.grad_norm.max_deviations, 5, allows 0.01" in stats.skip_reason
    policy.load_batch(batch)
    stats = policy.train(ALL, CrossEntropyLoss())
    assert (stats.skipped, stats.guards) == (False, {"grad_norm": False})
