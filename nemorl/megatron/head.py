"""From hidden states to logprobs and entropies, vocab-parallel and in chunks: a batch's logits never exist.

With logits `z`, divided by the temperature, whose columns are spread over the TP ranks:

    logprob of token i:  z_i - lse(z)      d/dz_j of sum_i g_i logprob_i: sum_i g_i 1[j = i] - p_j sum_i g_i
    entropy:             lse(z) - sum_j p_j z_j                   d/dz_j: -p_j (z_j - lse(z) + entropy)

One chunk keeps its logits for backward; of several, each is computed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.device import has_float32_products

# Logit of a column that pads the vocabulary: exp gives 0, and 0 times it is 0 (infinity would give NaN).
PADDING_LOGIT = -1e30


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank's output weight holds, and who holds the others."""

    start: int  # first column
    num_real: int  # columns that are tokens; the rest pad the vocabulary
    group: dist.ProcessGroup | None  # tensor-parallel ranks; None when this rank holds all columns


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `ids` [M, C], a token once or more in a row, and, if asked for, entropies [M], in float32.

    Equal on all tensor-parallel ranks. `hidden` [M, H] predicts the ids; `weight` [V / TP, H]. Of `hidden`
    each rank gets the gradient of its own columns only: the caller sums it over the tensor-parallel ranks.
    """
    logprobs, entropies = _Logprobs.apply(hidden, weight, ids, shard, temperature, chunk_tokens, entropy)
    return logprobs, entropies if entropy else None


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, weight: Tensor, k: int, shard: VocabularyShard, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Ids [M, k] int64 of the likeliest tokens after each hidden state [M, H], and logprobs [M, k] float32.

    Likeliest first, equal on all tensor-parallel ranks. `weight` [V / TP, H]; k is at most V without padding.
    """
    ids = hidden.new_zeros((hidden.shape[0], k), dtype=torch.int64)
    logprobs = torch.zeros_like(ids, dtype=torch.float32)
    for rows in _chunks(hidden.shape[0], chunk_tokens):
        shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
        log_sum = _sum_over_ranks(shifted.exp().sum(-1), shard).log()
        values, columns = shifted.topk(min(k, shifted.shape[1]), dim=-1)
        values = columns_of_all_ranks(values, shard)
        columns = columns_of_all_ranks(columns + shard.start, shard)
        values, places = values.topk(k, dim=-1)
        ids[rows] = columns.gather(1, places)
        logprobs[rows] = values - log_sum.unsqueeze(1)
    return ids, logprobs


class _Logprobs(torch.autograd.Function):
    """Logprobs [M, C] of `ids` [M, C], and entropies [M], 0 unless needed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        shard: VocabularyShard,
        temperature: float,
        chunk_tokens: int,
        needs_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        entropies = logprobs.new_zeros(ids.shape[0])
        kept: list[tuple[Tensor, Tensor]] = []
        keeps = ids.shape[0] <= chunk_tokens and (hidden.requires_grad or weight.requires_grad)
        for rows in _chunks(ids.shape[0], chunk_tokens):
            shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
            log_sum, logprobs[rows], entropies[rows] = _reduce(shifted, ids[rows], shard, needs_entropy)
            if keeps:
                kept.append((shifted, log_sum))
            del shifted  # before the next one takes memory
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, ids, entropies)
        ctx.options = (shard, temperature, chunk_tokens, kept)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, entropies = ctx.saved_tensors
        shard, temperature, chunk_tokens, kept = ctx.options
        grad_logprobs, grad_entropies = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(ids, dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden)
        # In float32, so that it does not show in how many chunks the sum was taken; None when frozen.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(ids.shape[0], chunk_tokens):
            if kept:
                shifted, log_sum = kept.pop()
            else:
                shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
                log_sum = _sum_over_ranks(shifted.exp().sum(-1), shard).log()
            of_entropies = None if grad_entropies is None else (entropies[rows], grad_entropies[rows])
            grad = _grad_logits(shifted, log_sum, ids[rows], grad_logprobs[rows], of_entropies, shard)
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[rows])
                elif has_float32_products(weight.device):
                    grad_weight.add_(torch.mm(grad.t(), hidden[rows], out_dtype=torch.float32))
                else:
                    grad_weight.add_(grad.t() @ hidden[rows])
            del shifted, grad
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _shifted_logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float) -> Tensor:
    """Logits [m, V / TP] of this rank's columns in float32, less the largest of the row over all ranks."""
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    logits[:, shard.num_real :] = PADDING_LOGIT
    largest = logits.amax(-1)
    if shard.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    return logits.sub_(largest.unsqueeze(1))


def _reduce(shifted: Tensor, ids: Tensor, shard: VocabularyShard, needs_entropy: bool) -> tuple[Tensor, ...]:
    """Log of the sum of the exponentials [m], logprobs [m, C] and entropies [m] (0 unless needed)."""
    exponentials = shifted.exp()
    column, is_mine = _local_columns(ids, shard)
    logits = shifted.gather(1, column) * is_mine
    total = exponentials.sum(-1)
    weighted = exponentials.mul_(shifted).sum(-1) if needs_entropy else torch.zeros_like(total)
    sums = _sum_over_ranks(torch.cat((logits, total.unsqueeze(1), weighted.unsqueeze(1)), dim=1), shard)
    logits, total, weighted = sums[:, :-2], sums[:, -2], sums[:, -1]
    log_sum = total.log()
    entropies = log_sum - weighted / total if needs_entropy else weighted
    return log_sum, logits - log_sum.unsqueeze(1), entropies


def _grad_logits(
    shifted: Tensor,
    log_sum: Tensor,
    ids: Tensor,
    grad_logprobs: Tensor,
    of_entropies: tuple[Tensor, Tensor] | None,
    shard: VocabularyShard,
) -> Tensor:
    """Gradient [m, V / TP] of the logits, in the memory of `shifted`; entropies come with their gradient."""
    log_p = shifted.sub_(log_sum.unsqueeze(1))
    of_all = grad_logprobs.sum(-1, keepdim=True)
    if of_entropies is None:
        grad = log_p.exp_().mul_(-of_all)
    else:
        entropies, grad_entropies = of_entropies
        p = log_p.exp()
        grad = log_p.add_(entropies.unsqueeze(1)).mul_(grad_entropies.unsqueeze(1))
        grad = grad.add_(of_all).mul_(p).neg_()
    column, is_mine = _local_columns(ids, shard)
    return grad.scatter_add_(1, column, grad_logprobs * is_mine)


def _sum_over_ranks(values: Tensor, shard: VocabularyShard) -> Tensor:
    """`values` itself, changed."""
    if shard.group is not None:
        dist.all_reduce(values, group=shard.group)
    return values


def _local_columns(ids: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Column of each id in this rank's shard, 0 where it is another's, and whether it is there."""
    local = ids - shard.start
    is_mine = (local >= 0) & (local < shard.num_real)
    return torch.where(is_mine, local, 0), is_mine


def columns_of_all_ranks(values: Tensor, shard: VocabularyShard) -> Tensor:
    """[m, n * TP] from the [m, n] of each rank."""
    if shard.group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(shard.group.size())]
    dist.all_gather(parts, values.contiguous(), group=shard.group)
    return torch.cat(parts, dim=1)
