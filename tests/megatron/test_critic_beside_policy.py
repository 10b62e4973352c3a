"""A critic in another layout than the policy: what it says and what it learns are those of one process."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nemorl.algorithms.policy_losses import ValueLoss
from nemorl.algorithms.token_advantages import TokenEstimator
from nemorl.config.algorithm.advantages import GaeConfig
from nemorl.config.algorithm.losses import CriticLearningConfig
from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.data.losses import TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.data.shards import BatchPlan, Column, plan_batch, rows_of
from nemorl.megatron.worker import PolicyWorker
from tests.megatron.examples import layout, policy_config, ragged_batch, random_model

ESTIMATOR = TokenEstimator(GaeConfig(name="gae", gamma=0.99, lam=0.9), None)
LOSS = ValueLoss(CriticLearningConfig(value_clip=0.1))


class Stored(list):
    """A stand-in for the object store: a list that is known on its own, as a reference is."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def host(rank: int, world_size: int, rendezvous: str, config: PolicyConfig) -> PolicyWorker:
    return PolicyWorker(
        config,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        device="cpu",
        threads=1,
        temperature=1.0,
        keep_reference=False,
        deadline_seconds=60,
        load=True,
    )


def paid_batch() -> PackedBatch:
    """Every sequence is rewarded at its last sampled token."""
    batch = ragged_batch()
    rewards = torch.zeros(batch.num_tokens)
    for number, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        sampled = batch.loss_mask[start:end].nonzero()
        if len(sampled):
            rewards[start + int(sampled[-1])] = 1.0 - 0.3 * number
    return replace(batch, rewards=rewards)


def plan_of(config: PolicyConfig, batch: PackedBatch) -> BatchPlan:
    copies = config.layout.data_parallel_size
    return plan_batch(batch.lengths, copies, 1, config.micro_batch_tokens, 64)


def rows_by_rank(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    plan: BatchPlan,
    method: str,
    column: Column | None,
) -> tuple[list, TrainStats | None]:
    """One part of a step on a rank: `values`, `estimate`, or `learn`; rows of what came of it."""
    worker = host(rank, world_size, rendezvous, config)
    sharing = config.layout.tensor_parallel_size * config.layout.context_parallel_size
    copy = rank // sharing % config.layout.data_parallel_size
    (minibatch,) = plan.minibatches
    worker.load_batch(paid_batch().select(plan.ranks[copy]))
    shard = None if column is None else plan.column_shards(column)[copy]
    stats = None
    if method != "estimate":
        worker.compute_values(minibatch[copy])
    if method == "estimate":
        worker.take(shard, "values")
        worker.estimate(ESTIMATOR)
    if method == "learn":
        worker.take(shard, "returns")
        stats = worker.train(minibatch[copy], LOSS)
    rows = rows_of(worker.batch, "returns" if method == "estimate" else "values")
    worker.close()
    return rows, stats


def step(pool, critic: PolicyConfig, policy: PolicyConfig) -> tuple[list, list, TrainStats]:
    """Values and returns of each sequence, and the critic's step, as two groups make them."""
    batch = paid_batch()

    def part(config: PolicyConfig, method: str, column: Column | None = None) -> tuple[Column, TrainStats]:
        plan, size = plan_of(config, batch), config.layout.world_size
        found = pool.run(size, rows_by_rank, config, plan, method, column)
        copies = found[:: size // config.layout.data_parallel_size]
        return plan.column([Stored(rows) for rows, _ in copies]), found[-1][1]

    values, _ = part(critic, "values")
    returns, _ = part(policy, "estimate", values)
    _, stats = part(critic, "learn", returns)
    return *([store[row] for store, row in column.places] for column in (values, returns)), stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic with a head that says something, on the weights of a language model."""
    config = random_model("llama").config
    config.num_labels, config.pad_token_id = 1, None
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("critic")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def group(folder: Path, where: LayoutConfig, tokens: int, **fields: str) -> PolicyConfig:
    return policy_config(folder, layout=where, micro_batch_tokens=tokens, **fields)


def test_values_advantages_and_the_critics_step_are_those_of_one_process(pool, model, folder):
    alone, lm = layout(), model("llama")[1]
    values, returns, trained = step(pool, group(folder, alone, 160, head="scalar"), group(lm, alone, 160))
    split = step(pool, group(folder, layout(tp=2, sp=True), 64, head="scalar"), group(lm, layout(dp=2), 48))
    for ours, theirs in zip((values, returns), split[:2], strict=True):
        for row, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(its), torch.tensor(row), atol=1e-5, rtol=1e-5)
    assert torch.cat([torch.tensor(row) for row in values]).std() > 0.1
    assert split[2].grad_norm == pytest.approx(trained.grad_norm, rel=1e-4)
    assert split[2].sums == pytest.approx(trained.sums, rel=1e-4)
    assert trained.sums["clip_fraction"] == 0  # the values of a first update are the old ones
    assert trained.grad_norm > 0.01
