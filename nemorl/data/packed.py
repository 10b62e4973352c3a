"""The batch that policy workers train on: sequences laid end to end, without padding."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """`S` sequences of together `N` tokens. Per-token fields speak of the token at their own position.

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
    likelihood_weights: Tensor | None = None  # [N] float32, as `weights`, of what a policy loss imitates
    old_logprobs: Tensor | None = None  # [N] float32, of the trainer before the first update of the step
    old_entropies: Tensor | None = None  # [N] float32, of its distribution before each token
    reference_logprobs: Tensor | None = None  # [N] float32
    top_ids: Tensor | None = None  # [N, k] int32, the likeliest tokens at each place by a teacher
    top_logprobs: Tensor | None = None  # [N, k] float32, the teacher's of these; both 0 outside the mask
    values: Tensor | None = None  # [N] float32, of a critic that has read up to and with each token
    turns: Tensor | None = None  # [N] int64, number of the turn that sampled each token, -1 elsewhere
    rewards: Tensor | None = None  # [N] float32, what was paid at each token; 0 where loss_mask is False
    returns: Tensor | None = None  # [N] float32, that a critic learns of the state before each token
    routed_experts: Tensor | None = None  # [N, MoE layers, top_k] int16, -1 where the router may choose
    # Of sequences that a loss compares, at each of their tokens (compared.py); labels of steps at their ends.
    units: Tensor | None = None  # [N] int64, sequences of one number are learnt together, as those of a pair
    labels: Tensor | None = None  # [N] float32: 1 chosen, desirable or right, -1 not, 0 neither
    margins: Tensor | None = None  # [N] float32, by how much the better one of the unit is better

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return torch.diff(self.cu_seqlens).tolist()

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on a device."""
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in fields(self)
            if getattr(self, f.name) is not None
        }
        return replace(self, **moved)

    def select(self, sequences: list[int]) -> "PackedBatch":
        """The named sequences, in the given order, with their weights as they are."""
        starts = self.cu_seqlens.tolist()
        index = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        lengths = torch.tensor([0] + [starts[s + 1] - starts[s] for s in sequences])
        per_token = {
            f.name: getattr(self, f.name)[index]
            for f in fields(self)
            if f.name != "cu_seqlens" and getattr(self, f.name) is not None
        }
        return replace(self, **per_token, cu_seqlens=lengths.cumsum(0).to(torch.int32))
