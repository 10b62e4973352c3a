"""Micro-batches: which sequences run together, in the order and padding the model wants."""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.data.packed import PackedBatch
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape, Rope

from .device import DTYPES, AttentionKernel, packed_attention_kernel
from .kernels import Kernels
from .packing import PackedLayout, TokenRouting, packed_layout
from .parallel import ContextShare, context_share


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass, shortest first.

    A rank computes `tokens`: its share of every sequence, which is padded to cut into equal chunks under
    context parallelism, and then of a few tokens of padding, a sequence of its own that nothing looks at:
    sequence parallelism wants a multiple of the tensor-parallel size.
    """

    batch: PackedBatch  # [N] whole sequences
    places: Tensor  # [N] where each token stands in the whole batch of this rank
    tokens: Tensor  # [1, n]
    position_ids: Tensor  # [1, n], 0 for padding
    layout: PackedLayout
    scored: Tensor  # [M] places in `batch` whose logprob is wanted: those of the loss mask
    labels: Tensor  # [m] those of them whose logprob this rank computes; without context parallelism all
    predictors: Tensor  # [m] place in `tokens` of the token before each label
    own: Tensor  # [k] places in `batch` of the tokens that this rank computes
    local_positions: Tensor  # [k] places in `tokens` of the same

    @property
    def num_computed(self) -> int:
        """Tokens of all ranks that share the sequences, padding included."""
        return self.tokens.numel() * self.layout.share.size


@dataclass(frozen=True)
class MicroBatchMaker:
    """What micro-batches of one worker have in common."""

    rotary: RotaryTable
    local_rotary: RotaryTable | None  # of the layers with a window, where theirs is another
    kernel: AttentionKernel | None
    multiple: int  # the number of a rank's tokens is padded to a multiple of this
    share: ContextShare
    device: torch.device
    routes: bool = False  # the model has experts

    def make(self, batch: PackedBatch, sequences: list[int]) -> MicroBatch:
        """The named sequences of a batch that lies on the CPU."""
        starts = batch.cu_seqlens.tolist()
        lengths = [starts[s + 1] - starts[s] for s in sequences]
        order = sorted(range(len(sequences)), key=lengths.__getitem__)
        sequences, lengths = [sequences[i] for i in order], [lengths[i] for i in order]
        selected = batch.select(sequences)
        places = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        padded = self._padded(lengths)
        real = torch.cat(
            [
                torch.arange(n) + start
                for n, start in zip(lengths, accumulate(padded, initial=0), strict=False)
            ]
        )  # [N] where each token of the batch stands in the padded sequences
        held = self.share.places(padded)  # [n] where each of the rank's tokens stands there
        place_here = torch.full((sum(padded),), -1)
        place_here[held] = torch.arange(len(held))
        scored = selected.loss_mask.nonzero().squeeze(1)
        predictors = place_here[real[scored] - 1]
        own = (place_here[real] >= 0).nonzero().squeeze(1)
        mine = predictors >= 0
        positions = _spread(selected.position_ids, real, sum(padded))[held].to(self.device)
        layout = packed_layout(
            padded,
            self.rotary.at(positions),
            self.kernel,
            self.local_rotary.at(positions) if self.local_rotary else None,
            self.share,
        )
        if self.routes:
            layout.routing = _routing(selected, padded, real, held, self.device)
        return MicroBatch(
            batch=selected.to(self.device),
            places=places,
            tokens=_spread(selected.tokens, real, sum(padded))[held].to(self.device).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            layout=layout,
            scored=scored.to(self.device),
            labels=scored[mine].to(self.device),
            predictors=predictors[mine].to(self.device),
            own=own.to(self.device),
            local_positions=place_here[real[own]].to(self.device),
        )

    def _padded(self, lengths: list[int]) -> list[int]:
        """Tokens of each sequence with its padding, and of the last one, which is padding alone, if any."""
        chunks = self.share.num_chunks
        padded = [-(-length // chunks) * chunks for length in lengths]
        multiple = math.lcm(self.multiple, len(self.share.chunks))
        missing = -(sum(padded) // self.share.size) % multiple * self.share.size
        return padded + [missing] * (missing > 0)


def _routing(
    batch: PackedBatch, padded: list[int], real: Tensor, held: Tensor, device: torch.device
) -> TokenRouting:
    """For a rank's tokens `held`, [n] places in the padded sequences; `real` [N] are those of the batch."""
    size = sum(padded)
    lengths = torch.tensor([*batch.lengths, *[1] * (len(padded) - batch.num_sequences)])
    sequence = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded))
    is_learned = torch.zeros(len(padded)).index_add(0, sequence[real], batch.loss_mask.float()) > 0
    experts = None
    if batch.routed_experts is not None:
        nobody = torch.full((size, *batch.routed_experts.shape[1:]), -1, dtype=batch.routed_experts.dtype)
        experts = nobody.index_copy(0, real, batch.routed_experts)[held].to(device)
    return TokenRouting(
        is_real=_spread(torch.ones(batch.num_tokens, dtype=torch.bool), real, size)[held].to(device),
        sequence=sequence[held].to(device),
        balance=(is_learned / lengths.square()).to(device),
        experts=experts,
    )


def _spread(values: Tensor, places: Tensor, size: int) -> Tensor:
    """[size] with the values at their places and 0 elsewhere."""
    return values.new_zeros(size).index_copy(0, places, values)


def micro_batch_maker(
    shape: ModelShape, config: PolicyConfig, kernels: Kernels, device: torch.device
) -> MicroBatchMaker:
    """That of a policy process which has joined the others."""
    layout = config.layout

    def rotary(rope: Rope) -> RotaryTable:
        return RotaryTable(
            shape.rotary_dim,
            rope,
            max_positions=config.max_sequence_length,
            dtype=DTYPES[config.precision],
            device=device,
        )

    return MicroBatchMaker(
        rotary=rotary(shape.rope),
        local_rotary=rotary(shape.local_rope) if shape.local_rope else None,
        kernel=packed_attention_kernel(kernels.attention),
        multiple=layout.tensor_parallel_size if layout.sequence_parallel else 1,
        share=context_share(),
        device=device,
        routes=shape.moe is not None,
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
