"""Running micro-batches through the pipeline with Megatron's schedules.

Losses are plain sums (`PackedBatch.weights` carries the division by global counts), so gradients are sums
over micro-batches and data-parallel ranks: `calculate_per_token_loss` keeps Megatron from dividing, and
`model_config.finalize_sums` keeps it from dividing by a token count at the end.

Outputs of the current weights for a batch, token by token, and metrics of them over all ranks.

Metrics and logprobs are broadcast from the last stage to all ranks of the policy.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemorl.data.losses import CandidateLoss, LogprobStats, Loss, LossOutput, ValueStats
from nemorl.data.packed import PackedBatch

from .model import PolicyModel, PolicyParallel
from .packing import MicroBatch


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


def micro_batches_in_a_row(num_micro_batches: int, stages: int) -> int:
    """The number of micro-batches that an interleaved stage runs through a chunk before the next chunk.

    The fewest that Megatron's schedule takes: at least as many as there are stages, and so that the last
    group is whole or also has that many. Raises ValueError for fewer micro-batches than stages.
    """
    for group in range(stages, num_micro_batches + 1):
        left = num_micro_batches % group
        if left == 0 or left >= stages:
            return group
    raise ValueError(
        f"{num_micro_batches} micro-batches cannot keep {stages} interleaved pipeline stages busy: with "
        "policy.layout.virtual_pipeline_parallel_size above 1 there have to be as many as stages"
    )


def global_metrics(
    outputs: list[LossOutput], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima of the loss's metrics over micro-batches, data-parallel ranks and stages.

    Only ranks of the last stage have outputs; all ranks get the same metrics.
    """
    metrics: dict[str, dict[str, float]] = {}
    if parallel_state.is_pipeline_last_stage():
        sums = _over_data_parallel([o.sums for o in outputs], torch.sum, dist.ReduceOp.SUM)
        maxima = _over_data_parallel([o.maxima for o in outputs], torch.amax, dist.ReduceOp.MAX)
        metrics = {"sums": sums, "maxima": maxima}
    metrics = _broadcast_json(metrics, device)
    return metrics["sums"], metrics["maxima"]


def over_data_parallel(values: Tensor, device: torch.device) -> Tensor:
    """Values [n] of the data-parallel ranks, which may have differently many, end to end; on the CPU."""
    group = parallel_state.get_data_parallel_group()
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    counts[group.rank()] = len(values)
    dist.all_reduce(counts, group=group)
    padded = values.new_zeros(int(counts.max()), device=device)
    padded[: len(values)] = values.to(device)
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(gathered, counts.tolist(), strict=True)]).cpu()


def from_last_stage(values: Tensor) -> Tensor:
    """The last pipeline stage's tensor on all its stages; the others pass a tensor of the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, source, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def _over_data_parallel(
    metrics: list[dict[str, Tensor]], reduce: Any, op: dist.ReduceOp.RedOpType
) -> dict[str, float]:
    names = sorted(metrics[0])
    if not names:
        return {}
    values = reduce(torch.stack([torch.stack([f[name].double() for name in names]) for f in metrics]), dim=0)
    dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, values.tolist(), strict=True))


def _broadcast_json(value: Any, device: torch.device) -> Any:
    """A JSON value of the last stage on all stages; `broadcast_object_list` would pickle it."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    text = bytearray(json.dumps(value), "utf-8")
    length = from_last_stage(torch.tensor([len(text)], device=device))
    if parallel_state.is_pipeline_last_stage():
        encoded = torch.frombuffer(text, dtype=torch.uint8).to(device)
    else:
        encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    return json.loads(bytes(from_last_stage(encoded).tolist()))


def batch_outputs(
    chunks: Sequence[PolicyParallel],
    batch: PackedBatch,
    made: Sequence[MicroBatch],
    positions: Sequence[Tensor],
    *,
    temperature: float,
    device: torch.device,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of the head [N], on the CPU, at the given positions of each micro-batch; 0 elsewhere.

    Of a vocabulary, if requested, also the entropies [N].
    """
    outputs = run_outputs(chunks, made, temperature, entropy=entropy)
    places = torch.cat([micro.places[mine.cpu()] for micro, mine in zip(made, positions, strict=True)])

    def laid_out(of_micros: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(len(places), device=device)
        if of_micros:
            flat = torch.cat([of_micro[mine] for of_micro, mine in zip(of_micros, positions, strict=True)])
        values = torch.zeros(batch.num_tokens)
        values[places] = from_last_stage(flat).cpu()
        return values

    values = laid_out([given for given, _ in outputs])
    return values, laid_out([spread for _, spread in outputs if spread is not None]) if entropy else None


def batch_top(
    chunks: Sequence[PolicyParallel],
    batch: PackedBatch,
    made: Sequence[MicroBatch],
    k: int,
    *,
    temperature: float,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Ids [N, k] int32 and logprobs [N, k] of the likeliest tokens where the mask is set, on the CPU."""
    ids = torch.zeros((batch.num_tokens, k), dtype=torch.int32)
    logprobs = torch.zeros((batch.num_tokens, k))
    outputs = run_top(chunks, made, k, temperature)
    places = torch.cat([micro.places for micro in made])
    flat_ids = torch.zeros((len(places), k), dtype=torch.int32, device=device)
    flat = torch.zeros((len(places), k), device=device)
    if outputs:
        flat_ids = torch.cat([of_micro.int() for of_micro, _ in outputs])
        flat = torch.cat([of_micro for _, of_micro in outputs])
    ids[places] = from_last_stage(flat_ids).cpu()
    logprobs[places] = from_last_stage(flat).cpu()
    return ids, logprobs


def logprob_gap(batch: PackedBatch, trainer: Tensor | None, device: torch.device) -> LogprobStats:
    """Distance of the engine's logprobs from the trainer's [N], over all data-parallel ranks."""
    gaps = torch.zeros(0)
    if trainer is not None and batch.logprobs is not None:
        gaps = (trainer - batch.logprobs)[batch.loss_mask].abs()
    sums = torch.tensor([gaps.double().sum(), batch.loss_mask.sum()], dtype=torch.float64, device=device)
    largest = torch.tensor([gaps.max() if len(gaps) else 0.0], device=device)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total, count = sums.tolist()
    return LogprobStats(total / max(count, 1.0), float(largest), int(count))


def value_metrics(batch: PackedBatch, device: torch.device) -> ValueStats:
    """The mean of `values` where the loss mask is set, over all data-parallel ranks."""
    assert batch.values is not None
    mask = batch.loss_mask
    sums = torch.stack((batch.values[mask].double().sum(), mask.sum().double())).to(device)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    total, count = sums.tolist()
    return ValueStats(total / max(count, 1.0), int(count))
