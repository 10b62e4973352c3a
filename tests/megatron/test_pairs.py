"""Pairs over layouts: the same loss, gradient, reference sums and held-out loss as in one process."""

from dataclasses import dataclass

import numpy as np
import pytest

from nemorl.algorithms.pair_losses import PreferenceLoss
from nemorl.config.algorithm.pair_losses import LogisticLossConfig
from nemorl.data.examples import PLACEHOLDER, Example
from nemorl.data.losses import Evaluation, TrainStats
from nemorl.data.packed import Compared, pack_examples
from nemorl.data.shards import plan_batch
from tests.megatron.cases import start_worker
from tests.megatron.examples import VOCABULARY, layout, policy_config

PAIRS = [((7, 20), 3), ((33, 9), 8), ((5, 6), 2), ((24, 24), 10)]  # tokens of both, tokens of the prompt
LOSS = PreferenceLoss(LogisticLossConfig(beta=0.5), len(PAIRS), sft_coefficient=0.2)
STEPS = 2


@dataclass(frozen=True)
class Seen:
    """By one rank."""

    reference: list[float]  # of its own sequences
    steps: list[TrainStats]
    evaluation: Evaluation


def sequences() -> tuple[list[Example], list[Compared]]:
    """Four pairs, and one that fills up."""
    drawn = np.random.default_rng(4)
    examples, compared = [], []
    for unit, (lengths, prompt) in enumerate(PAIRS):
        opening = drawn.integers(0, VOCABULARY, prompt).astype(np.int32)
        for length, label in zip(lengths, (1.0, -1.0), strict=True):
            rest = drawn.integers(0, VOCABULARY, length - prompt).astype(np.int32)
            tokens = np.concatenate([opening, rest])
            examples.append(Example(tokens, np.arange(length) >= prompt))
            compared.append(Compared(unit, label))
    for unit in (4, 5):
        examples.append(PLACEHOLDER)
        compared.append(Compared(unit))
    return examples, compared


def imported(rank, world_size, rendezvous):
    """Nothing, once this module is imported, for which a rank that is ready would wait in vain."""


def learn(rank, world_size, rendezvous, config, micro_batch_tokens):
    examples, compared = sequences()
    chosen = sum(e.num_trained for e, c in zip(examples, compared, strict=True) if c.label > 0)
    sizes = config.layout
    plan = plan_batch(
        [e.num_tokens for e in examples],
        sizes.data_parallel_size,
        1,
        micro_batch_tokens,
        64,
        units=[c.unit for c in compared],
    )
    copy = rank // (sizes.tensor_parallel_size * sizes.context_parallel_size) % sizes.data_parallel_size
    mine = plan.ranks[copy]
    batch = pack_examples([examples[i] for i in mine], [1 / chosen] * len(mine), [compared[i] for i in mine])
    micro_batches = plan.minibatches[0][copy]
    worker = start_worker(rank, world_size, rendezvous, config)
    steps = []
    for _ in range(STEPS):
        worker.load_batch(batch)
        worker.compute_logprobs(micro_batches, old=False, reference=True)
        steps.append(worker.train(micro_batches, LOSS))
    reference = worker.sequence_logprobs(micro_batches, reference=True)
    evaluation = worker.evaluate(micro_batches, LOSS)
    worker.close()
    return mine, Seen(reference, steps, evaluation)


@pytest.fixture(scope="module")
def alone(pool, model):
    """All pairs in one micro-batch of one process."""
    pool.run(4, imported)
    ((mine, seen),) = pool.run(1, learn, policy_config(model("llama-tied")[1]), 200)
    return dict(zip(mine, seen.reference, strict=True)), seen


LAYOUTS = {
    "micro-batches of a pair": layout(),
    "DP2": layout(dp=2),
    "TP2-SP-CP2": layout(tp=2, sp=True, cp=2),
    "PP2": layout(pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_micro_batches_do_not_show(pool, model, alone, name):
    references, expected = alone
    config = policy_config(model("llama-tied")[1], layout=LAYOUTS[name])
    found: dict[int, float] = {}
    for mine, seen in pool.run(config.layout.world_size, learn, config, 50):
        found |= dict(zip(mine, seen.reference, strict=True))
        for ours, theirs in zip(seen.steps, expected.steps, strict=True):
            assert ours.sums == pytest.approx(theirs.sums, rel=2e-4, abs=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert seen.evaluation.sums == pytest.approx(expected.evaluation.sums, rel=2e-4, abs=1e-4)
    assert found == pytest.approx(references, rel=1e-5)
    assert expected.steps[0].sums["pairs"] == len(PAIRS)
    assert expected.evaluation.sums["loss/total"] < expected.steps[0].sums["loss/total"]
