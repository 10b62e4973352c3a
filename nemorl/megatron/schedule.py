"""Running micro-batches through the pipeline with Megatron's schedules.

Losses are plain sums (`PackedBatch.weights` carries the division by global counts), so gradients are sums
over micro-batches and data-parallel ranks: `calculate_per_token_loss` keeps Megatron from dividing, and
`model_config.finalize_sums` keeps it from dividing by a token count at the end.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemorl.data.losses import CandidateLoss, Loss, LossOutput

from .model import PolicyModel, PolicyParallel
from .packing import MicroBatch
from .parallel import micro_batches_in_a_row


def run_training(
    chunks: Sequence[PolicyParallel], micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float
) -> list[LossOutput]:
    """Forward and backward of all micro-batches; gradients are complete afterwards.

    Returns the outputs of the loss on ranks of the last pipeline stage, nothing elsewhere.
    """

    def forward_step(batches: Iterator[MicroBatch], model: PolicyParallel) -> Any:
        micro, policy = next(batches), model.module

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
            output = _apply(loss, policy, hidden, micro, temperature)
            # The count would divide the loss; see the module's docstring.
            return output.loss, torch.zeros((), dtype=torch.int, device=hidden.device), output

        return model(micro), loss_of

    return _run(chunks, forward_step, micro_batches, forward_only=False)


@torch.no_grad()
def run_evaluation(
    chunks: Sequence[PolicyParallel], micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float
) -> list[LossOutput]:
    """Results of a loss for each micro-batch, without backward; on ranks of the last pipeline stage."""

    def forward_step(batches: Iterator[MicroBatch], model: PolicyParallel) -> Any:
        micro, policy = next(batches), model.module

        def outputs_of(hidden: Tensor, non_loss_data: bool) -> LossOutput:
            return _apply(loss, policy, hidden, micro, temperature)

        return model(micro), outputs_of

    return _run(chunks, forward_step, micro_batches, forward_only=True)


@torch.no_grad()
def run_outputs(
    chunks: Sequence[PolicyParallel],
    micro_batches: Sequence[MicroBatch],
    temperature: float,
    *,
    entropy: bool = False,
) -> list[tuple[Tensor, Tensor | None]]:
    """Outputs of the head for each micro-batch: logprobs [N], or values [N] of a scalar head; entropies [N].

    On ranks of the last pipeline stage; nothing elsewhere.
    """

    def forward_step(batches: Iterator[MicroBatch], model: PolicyParallel) -> Any:
        micro, policy = next(batches), model.module

        def outputs_of(hidden: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor | None]:
            outputs, entropies = policy.score(hidden, micro, temperature=temperature, entropy=entropy)
            return outputs, entropies

        return model(micro), outputs_of

    return _run(chunks, forward_step, micro_batches, forward_only=True)


@torch.no_grad()
def run_top(
    chunks: Sequence[PolicyParallel], micro_batches: Sequence[MicroBatch], k: int, temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Ids [N, k] and logprobs [N, k] of the likeliest tokens at the places of each micro-batch.

    On ranks of the last pipeline stage; nothing elsewhere.
    """

    def forward_step(batches: Iterator[MicroBatch], model: PolicyParallel) -> Any:
        micro, policy = next(batches), model.module

        def outputs_of(hidden: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
            return policy.top(hidden, micro, k, temperature=temperature)  # type: ignore[no-any-return]

        return model(micro), outputs_of

    return _run(chunks, forward_step, micro_batches, forward_only=True)


def _apply(
    loss: Loss, policy: PolicyModel, hidden: Tensor, micro: MicroBatch, temperature: float
) -> LossOutput:
    outputs, entropy = policy.score(
        hidden,
        micro,
        temperature=temperature,
        entropy=loss.needs_entropy,
        candidates=loss.candidates(micro.batch) if isinstance(loss, CandidateLoss) else None,
    )
    return loss(micro.batch, outputs, entropy)


def _run(
    chunks: Sequence[PolicyParallel],
    forward_step: Any,
    micro_batches: Sequence[MicroBatch],
    *,
    forward_only: bool,
) -> list[Any]:
    config = chunks[0].config
    if len(chunks) > 1:
        config.microbatch_group_size_per_vp_stage = micro_batches_in_a_row(
            len(micro_batches), config.pipeline_model_parallel_size
        )
    iterators = [iter(micro_batches) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Stages exchange the real number of tokens (variable_seq_lengths).
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return list(outputs)
