"""A ragged batch for tests of losses: several turns, a single sampled token, prompts of no interest."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from nemorl.algorithms.objective import sequence_weights
from nemorl.data.packed import PackedBatch

# 1 where the policy sampled; the third sequence has two turns, the second one sampled token.
MASKS = ([0, 0, 1, 1, 1], [0, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1])
ADVANTAGES = (1.3, -0.7, -1.1, 0.4)


def ragged(
    seed: int, aggregation: str = "token-mean", *, length: int | None = None, per_token: bool = False
) -> PackedBatch:
    """Logprobs lie around -2 and differ by about 0.3; the rest outside the mask is far off."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor([bool(m) for sequence in MASKS for m in sequence])
    lengths = torch.tensor([len(sequence) for sequence in MASKS])
    n = len(mask)
    weights = sequence_weights([sum(m) for m in MASKS], aggregation, length)  # type: ignore[arg-type]
    old = torch.randn(n, generator=g) * 0.7 - 2
    advantages = torch.tensor(ADVANTAGES).repeat_interleave(lengths)
    if per_token:
        advantages = advantages + torch.randn(n, generator=g)
    batch = PackedBatch(
        tokens=torch.randint(0, 9, (n,), generator=g),
        cu_seqlens=torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(int(length)) for length in lengths]),
        loss_mask=mask,
        weights=weights.repeat_interleave(lengths) * mask,
        advantages=advantages,
        logprobs=old + 0.3 * torch.randn(n, generator=g),
        old_logprobs=old,
        reference_logprobs=old + 0.5 * torch.randn(n, generator=g),
    )
    spoilt = {
        name: torch.where(mask, getattr(batch, name), torch.full((n,), 55.0))
        for name in ("logprobs", "old_logprobs", "reference_logprobs")
    }
    return replace(batch, **spoilt)


def current(batch: PackedBatch, seed: int, width: float = 0.3) -> Tensor:
    """Logprobs [N] of the policy that learns, 0 outside the mask as workers give them."""
    assert batch.old_logprobs is not None
    g = torch.Generator().manual_seed(seed)
    drawn = batch.old_logprobs + width * torch.randn(batch.num_tokens, generator=g)
    return torch.where(batch.loss_mask, drawn, torch.zeros_like(drawn))


def by_sequence(batch: PackedBatch, values: Tensor) -> list[list[float]]:
    """The values of the sampled tokens, a list for each sequence."""
    starts = batch.cu_seqlens.tolist()
    return [
        [float(values[i].double()) for i in range(a, b) if batch.loss_mask[i]] for a, b in pairwise(starts)
    ]
