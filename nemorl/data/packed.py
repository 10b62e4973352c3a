"""The batch that policy workers train on: sequences laid end to end, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemorl.trajectories import BoolArray, Int32Array, Trajectory

from .examples import Example


@dataclass(frozen=True)
class PackedBatch:
    """`S` sequences of together `N` tokens. Per-token fields describe the token at their position.

    `logprobs[i]` is the logprob of `tokens[i]` given the tokens before it in its sequence, so the first token
    of a sequence has none (0, and its `loss_mask` is False). `weights` carries the aggregation: the loss is
    the plain sum of `weights * token_loss`, already divided by counts of the global batch, so that neither
    micro-batches nor data parallelism change it.
    """

    tokens: Tensor  # [N] int64
    cu_seqlens: Tensor  # [S+1] int32, starts of the sequences, then N
    position_ids: Tensor  # [N] int64, from 0 in each sequence
    loss_mask: Tensor  # [N] bool
    weights: Tensor  # [N] float32, 0 where loss_mask is False
    advantages: Tensor | None = None  # [N] float32
    logprobs: Tensor | None = None  # [N] float32, of the engine that sampled
    versions: Tensor | None = None  # [N] int32, of the weights that sampled, -1 elsewhere
    likelihood_weights: Tensor | None = None  # [N] float32, as `weights`, of what a policy loss imitates
    old_logprobs: Tensor | None = None  # [N] float32, of the trainer before the first update of the step
    old_entropies: Tensor | None = None  # [N] float32, of its distribution before each token
    old_collisions: Tensor | None = None  # [N] float32, the sum of the squared probabilities of that one
    reference_logprobs: Tensor | None = None  # [N] float32
    top_ids: Tensor | None = None  # [N, k] int32, the likeliest tokens at each place by a teacher
    top_logprobs: Tensor | None = None  # [N, k] float32, the teacher's of these; both 0 outside the mask
    values: Tensor | None = None  # [N] float32, of a critic that has read up to and with each token
    turns: Tensor | None = None  # [N] int64, number of the turn that sampled each token, -1 elsewhere
    rewards: Tensor | None = None  # [N] float32, reward at each token; 0 where loss_mask is False
    returns: Tensor | None = None  # [N] float32, that a critic learns of the state before each token
    groups: Tensor | None = None  # [N] int64, number of the group whose members an estimator compares
    routed_experts: Tensor | None = None  # [N, MoE layers, top_k] int16, -1 where the router may choose
    # Of sequences that a loss compares, at each of their tokens; labels of steps at their ends.
    # [N] int64, sequences with the same number are trained on together, as those of a pair
    units: Tensor | None = None
    labels: Tensor | None = None  # [N] float32: 1 chosen, desirable or right, -1 not, 0 neither
    margins: Tensor | None = None  # [N] float32, by how much the better one of the unit is better
    # Of sequences that are aligned with a teacher of other tokens (aligned.py): `top_ids` and `top_logprobs`
    # are then of chunks, at the last token of each; -1 where the teacher has fewer tokens.
    chunks: Tensor | None = None  # [N] int64, the chunk of each token in its sequence, -1 in none
    teachers: Tensor | None = None  # [N] int64, number of the sequence's teacher
    # [N] float32, at the ends of chunks the score of the teacher for the sequence (`TeacherScore`)
    teacher_scores: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def chunk_numbers(self) -> Tensor:
        """[N] the chunk of each token, counted over all sequences; -1 in none."""
        assert self.chunks is not None, "the batch is of aligned examples"
        inside = self.chunks >= 0
        # The first token of a sequence is never trained, so it is in no chunk.
        begins = inside & (self.chunks != self.chunks.roll(1))
        return torch.where(inside, begins.cumsum(0) - 1, -1)

    def chunk_ends(self) -> Tensor:
        """[chunks] places of their last tokens."""
        numbers = self.chunk_numbers()
        return ((numbers >= 0) & (numbers != numbers.roll(-1))).nonzero().squeeze(1)

    @property
    def lengths(self) -> list[int]:
        return torch.diff(self.cu_seqlens).tolist()

    def to(self, device: torch.device) -> "PackedBatch":
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def select(self, sequences: list[int]) -> "PackedBatch":
        starts = self.cu_seqlens.tolist()
        index = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        lengths = torch.tensor([0] + [starts[s + 1] - starts[s] for s in sequences])
        selected = {name: tensor[index] for name, tensor in self._tensors().items() if name != "cu_seqlens"}
        return replace(self, **selected, cu_seqlens=lengths.cumsum(0).to(torch.int32))

    def spread(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """[N] from a value [S] of each sequence."""
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(self.lengths))

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def chunk_means(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """[count, V] means over the tokens of each chunk, of values [N, V]; `numbers` [N] are of the chunks."""
    inside = numbers >= 0
    own = numbers[inside]
    sums = values.new_zeros(count, values.shape[1]).index_add(0, own, values[inside])
    return sums / torch.bincount(own, minlength=count).to(values.dtype).unsqueeze(1)


def with_turns(
    batch: PackedBatch, trajectories: Sequence[Trajectory], rewards: Sequence[tuple[float, ...]]
) -> PackedBatch:
    """The batch with `turns` and `rewards`; a reward is at the turn's last token, or at the one before it.

    Rewards of steps, which are parts of their turn's, are at the last token of the step.
    """
    turns, per_token = torch.full((batch.num_tokens,), -1), torch.zeros(batch.num_tokens)
    borders = pairwise(batch.cu_seqlens.tolist())
    for (start, end), trajectory, by_turn in zip(borders, trajectories, rewards, strict=True):
        if not bool(batch.loss_mask[start:end].any()):
            continue
        number, last = -1, None
        for turn, reward in zip(trajectory.turns, by_turn, strict=True):
            if turn.end > turn.start:
                number, last = number + 1, start + turn.end - 1
                turns[start + turn.start : start + turn.end] = number
            if last is not None:
                per_token[last] += reward
            for token, earned in turn.steps:
                per_token[start + token] += earned
                per_token[last] -= earned
    return replace(batch, turns=turns, rewards=per_token)


@dataclass(frozen=True)
class Compared:
    unit: int  # sequences of one number go into one micro-batch
    label: float = 0.0  # 1 chosen or desirable, -1 rejected or not, 0 neither
    margin: float = 0.0  # by how much the better sequence of the unit is better
    reference: float | None = None  # sum of the reference's logprobs of its trained tokens, if known


def with_compared(batch: PackedBatch, compared: Sequence[Compared]) -> PackedBatch:
    batch = replace(batch, units=batch.spread([c.unit for c in compared], torch.int64))
    if batch.labels is None:  # else those of steps are kept
        batch = replace(batch, labels=batch.spread([c.label for c in compared]))
    if any(c.margin for c in compared):
        batch = replace(batch, margins=batch.spread([c.margin for c in compared]))
    known = [c.reference for c in compared if c.reference is not None]
    if len(known) < len(compared):
        return batch
    # a sum is spread evenly over the trained tokens, since losses use sums and means only
    trained = [max(int(mask.sum()), 1) for mask in batch.loss_mask.split(batch.lengths)]
    means = batch.spread([total / count for total, count in zip(known, trained, strict=True)])
    return replace(batch, reference_logprobs=means * batch.loss_mask)


# One token that is not trained replaces what does not train (and may have no tokens, or too many for a
# micro-batch): counts must be equal over ranks.
PLACEHOLDER_TOKENS = 1

# Of a trajectory: one number for all its sampled tokens, or one for those of each turn.
Advantage = float | tuple[float, ...]


def pack_trajectories(
    trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], weights: Sequence[float]
) -> PackedBatch:
    """Trajectories end to end, those of weight 0 as placeholders; `weights` [S] are of each sampled token."""
    # Sequences and weights of different number are refused by `_pack`.
    weighted = zip(trajectories, weights, strict=False)
    trajectories = [t if t.error is None and weight > 0 else _placeholder(t) for t, weight in weighted]
    batch = _pack([t.tokens for t in trajectories], [t.loss_mask for t in trajectories], weights)
    spread = torch.zeros(batch.num_tokens)
    for part, trajectory, advantage in zip(
        spread.split(batch.lengths), trajectories, advantages, strict=True
    ):
        if not isinstance(advantage, tuple):
            part.fill_(advantage)
            continue
        for turn, value in zip(trajectory.turns, advantage, strict=True):
            part[turn.start : turn.end] = value
    return replace(
        batch,
        advantages=spread * batch.loss_mask,
        logprobs=_flat([t.logprobs for t in trajectories], np.float32),
        versions=_flat([t.versions for t in trajectories], np.int32),
        routed_experts=_routed_experts(trajectories),
    )


def with_likelihood(batch: PackedBatch, weights: Sequence[float]) -> PackedBatch:
    return replace(batch, likelihood_weights=batch.spread(weights) * batch.loss_mask)


def _routed_experts(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """[N, layers, experts of a token] where any trajectory has them; -1 for those that do not."""
    known = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not known:
        return None
    unknown = np.full((1, *known[0].shape[1:]), -1, dtype=np.int16)
    found = ((t.num_tokens, t.routed_experts) for t in trajectories)
    return _flat([unknown.repeat(n, 0) if experts is None else experts for n, experts in found], np.int16)


def _placeholder(failed: Trajectory) -> Trajectory:
    ints = np.zeros(PLACEHOLDER_TOKENS, dtype=np.int32)
    mask, floats = ints.astype(np.bool_), ints.astype(np.float32)
    return replace(
        failed, tokens=ints, loss_mask=mask, logprobs=floats, versions=ints - 1, turns=(), routed_experts=None
    )


def pack_examples(
    examples: Sequence[Example], weights: Sequence[float], compared: Sequence[Compared] | None = None
) -> PackedBatch:
    batch = _pack([e.tokens for e in examples], [e.loss_mask for e in examples], weights)
    if any(e.labels is not None for e in examples):
        labels = [np.zeros(e.num_tokens, np.float32) if e.labels is None else e.labels for e in examples]
        batch = replace(batch, labels=_flat(labels, np.float32))
    if any(e.chunks is not None for e in examples):
        chunks = [np.full(e.num_tokens, -1) if e.chunks is None else e.chunks for e in examples]
        teachers = batch.spread([e.teacher for e in examples], torch.int64)
        batch = replace(batch, chunks=_flat(chunks, np.int64), teachers=teachers)
    return batch if compared is None else with_compared(batch, compared)


def _pack(tokens: Sequence[Int32Array], masks: Sequence[BoolArray], weights: Sequence[float]) -> PackedBatch:
    if not len(tokens) == len(masks) == len(weights):
        raise ValueError(f"{len(tokens)} sequences with {len(weights)} weights")
    for number, mask in enumerate(masks):
        if not len(mask) or mask[0]:
            raise ValueError(f"sequence {number} starts with a trained token, which has no logprob")
    lengths = [len(sequence) for sequence in tokens]
    loss_mask = _flat(masks, np.bool_)  # [N]
    per_token = torch.tensor(weights, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return PackedBatch(_flat(tokens, np.int64), starts, positions, loss_mask, per_token * loss_mask)


def _flat(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
