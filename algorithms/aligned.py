"""Distillation from teachers with other tokens than the policy's (docs/distillation.md).

    text ─┬─ policy's tokens ──▶ policy ──▶ means over chunks, projected ─┐
          └─ teacher's tokens ─▶ teacher ─▶ means over chunks ────────────┴▶ divergence of each chunk

A text is a sequence for each teacher. They are one unit, so they share a micro-batch and the work for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import CommonKlLossConfig
from nemorl.data.aligned import Projection
from nemorl.data.examples import PLACEHOLDER
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch, chunk_means

from .distillation import forward_kl
from .objective import loss_output

# Fills a batch that lacks a text, for the policy and the teachers.
UNALIGNED = replace(PLACEHOLDER, chunks=PLACEHOLDER.tokens - 1)
# NeMo-RL's; added to probabilities, so that those of tokens without counterpart have a logarithm.
_LEAST = 1e-10


@dataclass(frozen=True)
class AlignedTeacher:
    """What the processes of the policy have to know of a teacher."""

    weight: float
    projection: Path


def aligned_teachers(
    config: AlignedDistillationConfig, projections: Mapping[str, Path]
) -> tuple[AlignedTeacher, ...]:
    """The teachers in the order of their numbers, from the files of their projections by name."""
    return tuple(
        AlignedTeacher(config.teacher_weights.get(name, 1.0), path) for name, path in projections.items()
    )


@dataclass(frozen=True)
class Divergences:
    """Divergences of C chunks, with their gradient, and metrics of the same chunks by name."""

    divergence: Tensor  # [C]
    parts: Mapping[str, Tensor]  # [C] each
    matches: Tensor  # [C] True where both have the same likeliest token


def projected_kl(teacher: Tensor, policy: Tensor, columns: Tensor, *, reverse: bool = False) -> Divergences:
    """KL of the teacher from the policy's projected probabilities, NeMo-RL's P-KL without the temperature.

    `teacher` [C, K]: means of logprobs that sum to 1 over the K compared tokens at each token of the text.
    `policy` [C, V]: means of probabilities. `columns` [K, V], sparse: weights of the compared tokens.
    """
    mass = torch.sparse.mm(columns, policy.t()).t()
    projected = (mass / (mass.sum(-1, keepdim=True) + _LEAST) + _LEAST).log()
    kl = forward_kl(projected, teacher) if reverse else forward_kl(teacher, projected)
    return Divergences(kl, {"projected_kl": kl}, projected.argmax(-1) == teacher.argmax(-1))


@dataclass(frozen=True)
class CommonTokens:
    """Which of a text's K compared tokens the policy has, too."""

    policy: Tensor  # [m] ids of the policy
    teacher: Tensor  # [m] columns of the same tokens among the compared ones
    policy_rest: Tensor  # ids of the policy without counterpart in the complete vocabulary
    teacher_rest: Tensor  # columns without one
    num_rest: int  # the smaller number of tokens without counterpart of the two complete vocabularies


def common_kl(
    teacher: Tensor, policy: Tensor, common: CommonTokens, rest_tokens: int, *, reverse: bool = False
) -> Divergences:
    """KL over common tokens and the L1 distance of the sorted probabilities of others: NeMo-RL's gold loss.

    Of means of logprobs over chunks: `teacher` [C, K] of the compared tokens, `policy` [C, V]. Tokens of the
    teacher that are not compared count as 0.
    """
    p, q = teacher[:, common.teacher], policy[:, common.policy]
    kl = forward_kl(q, p) if reverse else forward_kl(p, q)
    matches = p.argmax(-1) == q.argmax(-1) if len(common.policy) else kl != kl
    size = min(rest_tokens, common.num_rest)
    mine = _largest(policy[:, common.policy_rest].exp(), size)
    distance = (mine - _largest(teacher[:, common.teacher_rest].exp(), size)).abs().sum(-1)
    return Divergences(kl + distance, {"common_kl": kl, "sorted_distance": distance}, matches)


def _largest(values: Tensor, size: int) -> Tensor:
    """[C, size] the largest values in descending order, then zeros."""
    sorted_values = values.topk(min(size, values.shape[1]), dim=-1).values
    return torch.nn.functional.pad(sorted_values, (0, size - sorted_values.shape[1]))


@dataclass(frozen=True)
class Columns:
    """A projection on a device, of which each text uses the columns of its compared tokens."""

    policy_ids: Tensor  # [E]
    teacher_ids: Tensor  # [E]
    weights: Tensor  # [E]
    pairs: tuple[Tensor, Tensor]  # ids of common tokens
    policy_rest: Tensor
    policy_size: int
    teacher_size: int
    is_identity: bool

    def of(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[K, V] sparse: the weights of these tokens of the teacher [K]."""
        column = self._column(ids)[self.teacher_ids]
        places = torch.stack((column, self.policy_ids))[:, column >= 0]
        size = (len(ids), self.policy_size)
        return torch.sparse_coo_tensor(
            places, self.weights[column >= 0].to(dtype), size, check_invariants=False
        )

    def common(self, ids: Tensor) -> CommonTokens:
        policy, teacher = self.pairs
        column = self._column(ids)[teacher]
        has_counterpart = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        has_counterpart[column[column >= 0]] = True
        num_rest = min(self.policy_size, self.teacher_size) - len(policy)
        return CommonTokens(
            policy[column >= 0],
            column[column >= 0],
            self.policy_rest,
            (~has_counterpart).nonzero().squeeze(1),
            num_rest,
        )

    def _column(self, ids: Tensor) -> Tensor:
        """[tokens of the teacher] the place of each among these, -1 of others."""
        # A model may have more columns than its tokenizer has tokens.
        size = max(self.teacher_size, int(ids.max()) + 1)
        column = torch.full((size,), -1, device=ids.device)
        column[ids] = torch.arange(len(ids), device=ids.device)
        return column


@cache
def columns_of(path: Path, likeliest: bool, device: torch.device) -> Columns:
    """Read once in a process."""
    projection = Projection.load(path)
    policy, teacher = (torch.from_numpy(ids).to(device) for ids in projection.pairs(likeliest=likeliest))
    has_counterpart = torch.zeros(projection.policy_size, dtype=torch.bool, device=device)
    has_counterpart[policy] = True
    return Columns(
        torch.from_numpy(projection.policy_ids).long().to(device),
        torch.from_numpy(projection.teacher_ids).long().to(device),
        torch.from_numpy(projection.weights).to(device),
        (policy, teacher),
        (~has_counterpart).nonzero().squeeze(1),
        projection.policy_size,
        projection.teacher_size,
        projection.is_identity,
    )


@dataclass(frozen=True)
class AlignedLoss:
    """The mixture of cross entropy and of the divergences from all teachers, of aligned examples."""

    config: AlignedDistillationConfig
    teachers: tuple[AlignedTeacher, ...]
    num_chunks: tuple[float, ...] = ()  # of each teacher in the optimizer step
    needs_entropy: bool = True

    def prepared(
        self, batch: PackedBatch, over_ranks: Callable[[Tensor], Tensor], step: PackedBatch
    ) -> "AlignedLoss":
        """Count the chunks of the optimizer step, whose mean the divergence is."""
        assert batch.teachers is not None, "the batch is of aligned examples"
        counts = torch.bincount(batch.teachers[batch.chunk_ends()], minlength=len(self.teachers))
        total = over_ranks(counts.double()).view(-1, len(self.teachers)).sum(0)
        return replace(self, num_chunks=tuple(total.tolist()))

    def candidates(self, batch: PackedBatch) -> Tensor:
        """All tokens of the policy's tokenizer."""
        size = self._columns(0, batch.tokens.device).policy_size
        return torch.arange(size, device=batch.tokens.device).expand(batch.num_tokens, size)

    def _columns(self, teacher: int, device: torch.device) -> Columns:
        loss = self.config.loss
        likeliest = isinstance(loss, CommonKlLossConfig) and loss.common == "likeliest"
        return columns_of(self.teachers[teacher].projection, likeliest, device)

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`logprobs` [N, 1 + V]: of the token itself, and of all."""
        assert batch.units is not None, "the sequences of a text are one unit"
        assert batch.teachers is not None, "the batch is of aligned examples"
        assert entropy is not None, "the loss requires the entropy"
        config, mask = self.config, batch.loss_mask
        texts, text_of_token = batch.units.unique(return_inverse=True)
        entropies = -(batch.weights * logprobs[:, 0])
        cross_entropy = logprobs.new_zeros(len(texts)).index_add(0, text_of_token, entropies)
        divergence = torch.zeros_like(cross_entropy)
        names = sorted(name.removeprefix("distillation/") for name in config.loss.metrics)
        sums = {f"{of}/{name}": logprobs.new_zeros(()) for name in names for of in ("distillation", "chunks")}
        matches, numbers, ends = logprobs.new_zeros(()), batch.chunk_numbers(), batch.chunk_ends()
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            if not bool((numbers[start:end] >= 0).any()):
                continue
            own_ends = ends[(ends >= start) & (ends < end)]
            compared = self._compared(batch, logprobs[start:end, 1:], numbers[start:end], own_ends)
            teacher = int(batch.teachers[start])
            scale = self.teachers[teacher].weight / self.num_chunks[teacher] * config.loss.temperature**2
            term = scale * compared.divergence.sum()
            divergence = divergence.index_add(0, text_of_token[start : start + 1], term.unsqueeze(0))
            matches += compared.matches.sum()
            for name, part in compared.parts.items():
                sums[f"distillation/{name}"] += part.detach().sum()
                sums[f"chunks/{name}"] += len(part)
        if config.match_sft:
            sizes = divergence.detach().abs()
            scales = torch.where(sizes > 0, cross_entropy.detach().abs() / sizes, 1.0)
            loss = (scales * divergence + cross_entropy).sum()
        else:
            loss = config.distillation_coefficient * divergence.sum()
            loss = loss + config.sft_coefficient * cross_entropy.sum()
        sums |= {
            "loss/total": loss,
            "loss/sft": cross_entropy.sum(),
            "loss/distillation": divergence.sum(),
            "entropy": (entropy * mask).sum(),
            "distillation/aligned": (mask & (numbers >= 0)).sum(),
            "distillation/match": matches,
            "tokens": mask.sum(),
        }
        return loss_output(loss, sums)

    def _compared(self, batch: PackedBatch, logprobs: Tensor, own: Tensor, ends: Tensor) -> Divergences:
        """The chunks of a sequence, of the policy's logprobs [T, V].

        `own` [T] are the numbers of the chunks in the batch, -1 in none, and `ends` the places of their ends.
        """
        assert batch.top_ids is not None, "the loss requires the teacher's tokens"
        assert batch.top_logprobs is not None, "the loss requires the teacher's logprobs"
        assert batch.teachers is not None, "the batch is of aligned examples"
        loss = self.config.loss
        if loss.temperature != 1:
            logprobs = (logprobs / loss.temperature).log_softmax(-1)
        ids = batch.top_ids[ends[0]].long()
        teacher, ids = batch.top_logprobs[ends][:, ids >= 0], ids[ids >= 0]
        columns = self._columns(int(batch.teachers[ends[0]]), logprobs.device)
        inside = own >= 0
        own = torch.where(inside, own - own[inside][0], -1)
        if isinstance(loss, CommonKlLossConfig) and not columns.is_identity:
            means = chunk_means(logprobs, own, len(ends))
            return common_kl(teacher, means, columns.common(ids), loss.rest_tokens, reverse=loss.reverse)
        if columns.is_identity:  # then a chunk is a token
            teacher = teacher.log_softmax(-1)
        means = chunk_means(logprobs.exp(), own, len(ends))
        return projected_kl(teacher, means, columns.of(ids, logprobs.dtype), reverse=loss.reverse)


def aligned_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Losses as they are, divergences as means over the chunks that have them, the rest over tokens."""
    chunks = {name.removeprefix("chunks/"): n for name, n in sums.items() if name.startswith("chunks/")}
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    metrics |= {f"distillation/{name}": sums[f"distillation/{name}"] / n for name, n in chunks.items() if n}
    num_chunks = sum(n for name, n in chunks.items() if name in ("projected_kl", "common_kl"))
    metrics["distillation/match"] = sums["distillation/match"] / max(num_chunks, 1.0)
    for name in ("entropy", "distillation/aligned"):
        metrics[name] = sums[name] / max(sums["tokens"], 1.0)
    return {**metrics, **maxima}
