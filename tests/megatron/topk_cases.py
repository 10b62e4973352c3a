"""Runs in the processes of the pool: the head over ranks, and distillation under layouts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.algorithm.aligned import TeacherScore
from nemorl.config.generation import SamplingConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.megatron import head
from nemorl.megatron.head import VocabularyShard, token_logprobs, top_logprobs
from tests.megatron.cases import partition, share, start_worker


@contextmanager
def shard_of(
    rank: int, world_size: int, rendezvous: str, hidden: Tensor, weight: Tensor, vocabulary: int
) -> Iterator[tuple[VocabularyShard, Tensor, Tensor]]:
    """This rank's columns of the weight, which get a gradient as the hidden states do, among all ranks."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        columns = weight.shape[0] // world_size
        start = rank * columns
        real = min(max(vocabulary - start, 0), columns)
        shard = VocabularyShard(start, real, dist.group.WORLD if world_size > 1 else None)
        own = weight[start : start + columns].clone().requires_grad_()
        yield shard, own, hidden.clone().requires_grad_()
    finally:
        dist.destroy_process_group()


def heads_over_ranks(
    rank: int,
    world_size: int,
    rendezvous: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    grads: Tensor,
    vocabulary: int,
    k: int,
) -> dict[str, Tensor]:
    """Both functions of the head, with this rank's columns of the weight."""
    with shard_of(rank, world_size, rendezvous, hidden, weight, vocabulary) as (shard, own, mine):
        options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 4}
        found, entropies, collisions = token_logprobs(
            mine, own, ids, shard, **options, entropy=True, collision=True
        )
        (grads * found).sum().backward()
        top_ids, top = top_logprobs(hidden, own, k, shard, **options)
        assert mine.grad is not None
        assert own.grad is not None
        assert entropies is not None
        assert collisions is not None
        return {
            "logprobs": found.detach(),
            "entropies": entropies.detach(),
            "collisions": collisions,
            "hidden_grad": mine.grad,
            "weight_grad": own.grad,
            "top_ids": top_ids,
            "top": top,
        }


def distilled(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    per_micro_batch: int,
    k: int,
    losses: list[Loss],
) -> tuple[Tensor, Tensor, list[TrainStats]]:
    """The model's own likeliest tokens [n, k] with logprobs, and updates; the first moves it away."""
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(batch, rank, config)
    micro_batches = partition(mine.num_sequences, per_micro_batch)
    worker.load_batch(mine)
    worker.compute_top(micro_batches, k)
    told = worker.batch
    assert told.top_ids is not None
    assert told.top_logprobs is not None
    worker.load_batch(replace(told, reference_logprobs=torch.zeros(told.num_tokens)))
    steps = [worker.train(micro_batches, loss) for loss in losses]
    worker.close()
    return told.top_ids, told.top_logprobs, steps


def combined(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    per_micro_batch: int,
    k: int,
    losses: dict[TeacherScore, list[Loss]],
) -> dict[TeacherScore, list[TrainStats]]:
    """Updates by losses of each kind of score; the teachers are the model before them, moved once."""
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(batch, rank, config)
    micro_batches = partition(mine.num_sequences, per_micro_batch)
    worker.load_batch(mine)
    worker.train(micro_batches, CrossEntropyLoss())
    found = {}
    for score, of_score in losses.items():
        worker.load_batch(mine)
        worker.compute_top(micro_batches, k, score=score)
        found[score] = [worker.train(micro_batches, loss) for loss in of_score]
    worker.close()
    return found


def scores_of(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    per_micro_batch: int,
    k: int,
    scores: list[TeacherScore],
) -> list[Tensor]:
    """The scores [n] of each kind of the model as a teacher, whose temperature is another one."""
    worker = start_worker(rank, world_size, rendezvous, config, temperature=2.0)
    worker.load_batch(batch)
    found = []
    for score in scores:
        worker.compute_top(partition(batch.num_sequences, per_micro_batch), k, score=score)
        assert worker.batch.teacher_scores is not None
        found.append(worker.batch.teacher_scores)
    worker.close()
    return found


def taught_by(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    losses: Sequence[Loss],
) -> list[TrainStats]:
    """Updates on a batch that already has a teacher's likeliest tokens."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(share(batch, rank, config))
    steps = [worker.train(partition(worker.batch.num_sequences, 4), loss) for loss in losses]
    worker.close()
    return steps


def filtered_heads_over_ranks(
    rank: int,
    world_size: int,
    rendezvous: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    grads: Tensor,
    vocabulary: int,
    filters: SamplingConfig,
) -> dict[str, Tensor]:
    """The head of the filtered distribution; one candidate a rank at first, so that top-p takes more."""
    first, head._FIRST_CANDIDATES = head._FIRST_CANDIDATES, 1
    try:
        with shard_of(rank, world_size, rendezvous, hidden, weight, vocabulary) as (shard, own, mine):
            options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 16, "filters": filters}
            found, entropies, _ = token_logprobs(mine, own, ids, shard, **options, entropy=True)
            assert entropies is not None
            taken = found.masked_fill(found.isneginf(), 0.0)
            ((grads[0] * taken).sum() + (grads[1, :, 0] * entropies).sum()).backward()
            assert mine.grad is not None
            assert own.grad is not None
            return {
                "logprobs": found.detach(),
                "entropies": entropies.detach(),
                "hidden_grad": mine.grad,
                "weight_grad": own.grad,
            }
    finally:
        head._FIRST_CANDIDATES = first
