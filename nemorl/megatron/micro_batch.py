"""Micro-batches: which sequences run together, in the order and padding the model wants."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nemorl.data.packed import PackedBatch
from nemorl.models.rope import RotaryTable

from .attention import PackedLayout, packed_layout
from .device import AttentionKernel


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass, shortest first.

    `tokens` and `position_ids` may end in a few tokens of padding, a sequence of its own that nothing looks
    at: sequence parallelism wants a multiple of the tensor-parallel size.
    """

    batch: PackedBatch  # [N]
    places: Tensor  # [N] where each token stands in the whole batch of this rank
    tokens: Tensor  # [1, N + padding]
    position_ids: Tensor  # [1, N + padding]
    layout: PackedLayout
    scored: Tensor  # [M] places in `batch` whose logprob is wanted: those of the loss mask


@dataclass(frozen=True)
class MicroBatchMaker:
    """What micro-batches of one worker have in common."""

    rotary: RotaryTable
    local_rotary: RotaryTable | None  # of the layers with a window, where theirs is another
    kernel: AttentionKernel | None
    multiple: int  # the number of tokens is padded to a multiple of this
    device: torch.device

    def make(self, batch: PackedBatch, sequences: list[int]) -> MicroBatch:
        """The named sequences of a batch that lies on the CPU."""
        starts = batch.cu_seqlens.tolist()
        lengths = [starts[s + 1] - starts[s] for s in sequences]
        order = sorted(range(len(sequences)), key=lengths.__getitem__)
        sequences, lengths = [sequences[i] for i in order], [lengths[i] for i in order]
        selected = batch.select(sequences)
        places = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        padding = -selected.num_tokens % self.multiple
        positions = torch.cat((selected.position_ids, torch.arange(padding)))
        tokens = torch.nn.functional.pad(selected.tokens, (0, padding))
        positions = positions.to(self.device)
        layout = packed_layout(
            lengths + [padding] * (padding > 0),
            self.rotary.at(positions),
            self.kernel,
            self.local_rotary.at(positions) if self.local_rotary else None,
        )
        return MicroBatch(
            batch=selected.to(self.device),
            places=places,
            tokens=tokens.to(self.device).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            layout=layout,
            scored=selected.loss_mask.nonzero().squeeze(1).to(self.device),
        )


def check_batch(batch: PackedBatch, max_sequence_length: int) -> None:
    """Refuse what the model cannot take, with the sequence and the reason."""
    starts = batch.cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != batch.num_tokens:
        raise ValueError(
            f"cu_seqlens {starts} does not run from 0 to the {batch.num_tokens} tokens of the batch"
        )
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if not 0 < end - start <= max_sequence_length:
            raise ValueError(
                f"sequence {sequence} of the batch has {end - start} tokens; "
                f"policy.max_sequence_length allows 1 to {max_sequence_length}"
            )
    first = batch.cu_seqlens[:-1].long()
    if bool(batch.loss_mask[first].any()):
        raise ValueError("the first token of a sequence has no logprob, so its loss_mask must be False")
