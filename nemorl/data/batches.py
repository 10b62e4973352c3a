"""From trajectories or examples to the packed batch a policy rank trains on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemorl.trajectories import BoolArray, Int32Array, Trajectory

from .examples import Example
from .packed import Compared, PackedBatch, with_compared

# What does not train keeps its place in the batch, since counts must be equal over ranks, and is not worth
# computing: a failed trajectory may have no tokens at all, or too many for a micro-batch. One token that is
# not trained replaces it.
PLACEHOLDER_TOKENS = 1

# Of a trajectory: one number for all its sampled tokens, or one for those of each turn.
Advantage = float | tuple[float, ...]


def pack_trajectories(
    trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], weights: Sequence[float]
) -> PackedBatch:
    """Trajectories end to end; `weights` [S] hold for every sampled token of a sequence, `advantages` [S] for
    every one or for those of a turn. A trajectory of weight 0 becomes a stand-in.
    """
    # Sequences and weights of different number are refused by `_pack`.
    training = [t.error is None and weight > 0 for t, weight in zip(trajectories, weights, strict=False)]
    trajectories = [t if trains else _stand_in(t) for t, trains in zip(trajectories, training, strict=False)]
    batch = _pack([t.tokens for t in trajectories], [t.loss_mask for t in trajectories], weights)
    spread = torch.cat([_per_token(t, a) for t, a in zip(trajectories, advantages, strict=True)])
    logprobs = torch.from_numpy(np.concatenate([t.logprobs for t in trajectories]).astype(np.float32))
    return PackedBatch(
        batch.tokens,
        batch.cu_seqlens,
        batch.position_ids,
        batch.loss_mask,
        batch.weights,
        advantages=spread * batch.loss_mask,
        logprobs=logprobs,
        routed_experts=_routed_experts(trajectories),
    )


def with_likelihood(batch: PackedBatch, weights: Sequence[float]) -> PackedBatch:
    """The batch with `likelihood_weights`: `weights` [S] hold for every trained token of a sequence."""
    lengths = torch.diff(batch.cu_seqlens).long()
    spread = torch.tensor(weights, dtype=torch.float32).repeat_interleave(lengths)
    return replace(batch, likelihood_weights=spread * batch.loss_mask)


def _per_token(trajectory: Trajectory, advantage: Advantage) -> Tensor:
    """An advantage at each token that it holds for: [T] float32."""
    if not isinstance(advantage, tuple):
        return torch.full((trajectory.num_tokens,), advantage, dtype=torch.float32)
    spread = torch.zeros(trajectory.num_tokens)
    for turn, value in zip(trajectory.turns, advantage, strict=True):
        spread[turn.start : turn.end] = value
    return spread


def _routed_experts(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """[N, layers, experts of a token] where any trajectory has them; -1 for those that do not."""
    known = next((t.routed_experts for t in trajectories if t.routed_experts is not None), None)
    if known is None:
        return None
    unknown = np.full((1, *known.shape[1:]), -1, dtype=np.int16)
    parts = [
        np.repeat(unknown, t.num_tokens, 0) if t.routed_experts is None else t.routed_experts
        for t in trajectories
    ]
    return torch.from_numpy(np.concatenate(parts))


def _stand_in(failed: Trajectory) -> Trajectory:
    return replace(
        failed,
        tokens=np.zeros(PLACEHOLDER_TOKENS, dtype=np.int32),
        loss_mask=np.zeros(PLACEHOLDER_TOKENS, dtype=np.bool_),
        logprobs=np.zeros(PLACEHOLDER_TOKENS, dtype=np.float32),
        versions=np.full(PLACEHOLDER_TOKENS, -1, dtype=np.int32),
        turns=(),
        routed_experts=None,
    )


def pack_examples(
    examples: Sequence[Example], weights: Sequence[float], compared: Sequence[Compared] | None = None
) -> PackedBatch:
    """Examples end to end; `weights` [S] are those of every trained token of a sequence."""
    batch = _pack([e.tokens for e in examples], [e.loss_mask for e in examples], weights)
    if any(e.labels is not None for e in examples):
        batch = replace(batch, labels=_flat([e.token_labels for e in examples], np.float32))
    return batch if compared is None else with_compared(batch, compared)


def _pack(tokens: Sequence[Int32Array], masks: Sequence[BoolArray], weights: Sequence[float]) -> PackedBatch:
    if not len(tokens) == len(masks) == len(weights):
        raise ValueError(f"{len(tokens)} sequences with {len(weights)} weights")
    for number, mask in enumerate(masks):
        if not len(mask) or mask[0]:
            raise ValueError(f"sequence {number} starts with a trained token, which has no logprob")
    lengths = [len(sequence) for sequence in tokens]
    loss_mask = _flat(masks, np.bool_)  # [N]
    per_sequence = torch.tensor(weights, dtype=torch.float32)
    return PackedBatch(
        tokens=_flat(tokens, np.int64),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=loss_mask,
        weights=per_sequence.repeat_interleave(torch.tensor(lengths)) * loss_mask,
    )


def _flat(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
