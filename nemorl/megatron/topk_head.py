"""From hidden states to the likeliest tokens, and to logprobs of several given tokens at each place.

Vocab-parallel and in chunks as in `head.py`. With logits `z` (already divided by the temperature):

    logprob of token i:  z_i - lse(z)      d/dz_j of sum_i g_i logprob_i: sum_i g_i 1[j = i] - p_j sum_i g_i
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .head import VocabularyShard, rows_of_chunks, shifted_logits, sum_over_ranks


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, weight: Tensor, k: int, shard: VocabularyShard, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Ids [M, k] int64 of the likeliest tokens after each hidden state [M, H], and logprobs [M, k] float32.

    Of the whole vocabulary, likeliest first, equal on all tensor-parallel ranks. `weight` [V / TP, H]; k is
    at most the number of tokens. Of tokens of one logprob at the end of the list any may be there.
    """
    ids = hidden.new_zeros((hidden.shape[0], k), dtype=torch.int64)
    logprobs = torch.zeros_like(ids, dtype=torch.float32)
    for rows in rows_of_chunks(hidden.shape[0], chunk_tokens):
        shifted = shifted_logits(hidden[rows], weight, shard, temperature)
        log_sum = sum_over_ranks(shifted.exp().sum(-1), shard).log()
        values, columns = shifted.topk(min(k, shifted.shape[1]), dim=-1)
        values, columns = _of_all_ranks(values, shard), _of_all_ranks(columns + shard.start, shard)
        values, places = values.topk(k, dim=-1)
        ids[rows] = columns.gather(1, places)
        logprobs[rows] = values - log_sum.unsqueeze(1)
    return ids, logprobs


def logprobs_at(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `ids` [M, C] and the entropies [M], float32, equal on all tensor-parallel ranks.

    A token may stand several times in a row of `ids`. Gradients, as those of `token_logprobs`, go through the
    logprobs alone: the entropies are figures.
    """
    logprobs, entropies = _LogprobsAt.apply(hidden, weight, ids, shard, temperature, chunk_tokens)
    return logprobs, entropies


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        shard: VocabularyShard,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        entropies = logprobs.new_zeros(ids.shape[0])
        for rows in rows_of_chunks(ids.shape[0], chunk_tokens):
            shifted = shifted_logits(hidden[rows], weight, shard, temperature)
            column, is_mine = _local_columns(ids[rows], shard)
            found = shifted.gather(1, column) * is_mine
            exponentials = shifted.exp()
            total = exponentials.sum(-1)
            weighted = exponentials.mul_(shifted).sum(-1)
            sums = sum_over_ranks(torch.cat((found, total[:, None], weighted[:, None]), dim=1), shard)
            log_sum = sums[:, -2].log()
            logprobs[rows] = sums[:, :-2] - log_sum.unsqueeze(1)
            entropies[rows] = log_sum - sums[:, -1] / sums[:, -2]
            del shifted, exponentials  # before the next ones take memory
        ctx.save_for_backward(hidden, weight, ids)
        ctx.options = (shard, temperature, chunk_tokens)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        shard, temperature, chunk_tokens = ctx.options
        grad_logprobs = grads[0]
        grad_hidden = torch.zeros_like(hidden)
        # In float32, as in `head.py`; None when frozen.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in rows_of_chunks(ids.shape[0], chunk_tokens):
            shifted = shifted_logits(hidden[rows], weight, shard, temperature)
            exponentials = shifted.exp_()
            total = sum_over_ranks(exponentials.sum(-1), shard)
            of_all = grad_logprobs[rows].sum(-1)
            grad = exponentials.mul_((-of_all / total).unsqueeze(1))
            column, is_mine = _local_columns(ids[rows], shard)
            grad.scatter_add_(1, column, grad_logprobs[rows] * is_mine)
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add_(grad.t() @ hidden[rows])
            del shifted, exponentials, grad
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _local_columns(ids: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Column [m, C] of each id in this rank's shard, 0 where it is another's, and whether it is there."""
    local = ids - shard.start
    is_mine = (local >= 0) & (local < shard.num_real)
    return torch.where(is_mine, local, 0), is_mine


def _of_all_ranks(values: Tensor, shard: VocabularyShard) -> Tensor:
    """[m, n * TP] from the [m, n] of each rank."""
    if shard.group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(shard.group.size())]
    dist.all_gather(parts, values.contiguous(), group=shard.group)
    return torch.cat(parts, dim=1)
