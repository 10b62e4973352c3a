"""Distillation from teachers with other tokens than the policy's (docs/distillation.md).

    text ─┬─ policy's tokens ──▶ policy ──▶ means over chunks, projected ─┐
          └─ teacher's tokens ─▶ teacher ─▶ means over chunks ────────────┴▶ divergence of each chunk

A text is a sequence for each teacher. They are one unit, so they share a micro-batch and the work for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import AverageConfig, CommonKlLossConfig, SelectConfig, TrustConfig
from nemorl.data.aligned import Projection
from nemorl.data.examples import PLACEHOLDER
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch, chunk_means
from nemorl.errors import RunError

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
    name: str = "main"
    # Where it counts, the logarithm of the size of its vocabulary over that of the smallest one.
    scale: float = 1.0


def aligned_teachers(
    config: AlignedDistillationConfig, projections: Mapping[str, Path]
) -> tuple[AlignedTeacher, ...]:
    """The teachers in the order of their numbers, from the files of their projections by name.

    Raises RunError where a mean of logits would be of teachers with other tokens.
    """
    combination, scales = config.combination, dict.fromkeys(projections, 1.0)
    if isinstance(combination, AverageConfig):
        others = [name for name, path in projections.items() if not Projection.load(path).is_identity]
        if others:
            problem = f"teachers.{others[0]} has other tokens than the policy, so logits have no mean"
            raise RunError(f"algorithm.combination.name = average: {problem}; use `sum`, `trust` or `select`")
    elif getattr(combination, "scale_by_vocabulary", False):
        logs = {name: math.log(Projection.load(path).teacher_size) for name, path in projections.items()}
        scales = {name: log / min(logs.values()) for name, log in logs.items()}
    return tuple(
        AlignedTeacher(config.teacher_weights.get(name, 1.0), path, name, scales[name])
        for name, path in projections.items()
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
class Reading:
    """Tokens [start, end) of a batch: a text that is compared with one teacher."""

    start: int
    end: int
    teacher: int
    ends: Tensor  # places of the last tokens of its chunks
    weight: float = 1.0  # of the divergence, among those of its text


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
        """Count the chunks of the optimizer step, whose mean the divergence is.

        Where a text has one divergence, its chunks count, whichever teacher it is from.
        """
        counts, combination = [0] * len(self.teachers), self.config.combination
        for text in self._texts(batch):
            held = self._held(text)
            if isinstance(combination, AverageConfig):
                counts[0] += len(_places_of_all(held))
                continue
            for reading in held:
                counts[reading.teacher] += len(reading.ends)
        total = over_ranks(torch.tensor(counts, dtype=torch.float64)).view(-1, len(counts)).sum(0)
        if isinstance(combination, AverageConfig | SelectConfig):
            total = total.sum().expand(len(counts))
        return replace(self, num_chunks=tuple(total.tolist()))

    def candidates(self, batch: PackedBatch) -> Tensor:
        """All tokens of the policy's tokenizer."""
        size = self._columns(0, batch.tokens.device).policy_size
        return torch.arange(size, device=batch.tokens.device).expand(batch.num_tokens, size)

    def _columns(self, teacher: int, device: torch.device) -> Columns:
        loss = self.config.loss
        likeliest = isinstance(loss, CommonKlLossConfig) and loss.common == "likeliest"
        return columns_of(self.teachers[teacher].projection, likeliest, device)

    def _texts(self, batch: PackedBatch) -> list[list[Reading]]:
        """The sequences of each text that have chunks."""
        assert batch.units is not None, "the sequences of a text are one unit"
        assert batch.teachers is not None, "the batch is of aligned examples"
        found: dict[int, list[Reading]] = {}
        ends = batch.chunk_ends()
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            own = ends[(ends >= start) & (ends < end)]
            if len(own):
                reading = Reading(start, end, int(batch.teachers[start]), own)
                found.setdefault(int(batch.units[start]), []).append(reading)
        return [
            [
                replace(one, weight=weight)
                for one, weight in zip(text, self._weights(batch, text), strict=True)
            ]
            for text in found.values()
        ]

    def _held(self, text: Sequence[Reading]) -> list[Reading]:
        """The sequences of a text that its divergences are of."""
        leaves_out = isinstance(self.config.combination, AverageConfig | SelectConfig)
        return [reading for reading in text if reading.weight or not leaves_out]

    def _weights(self, batch: PackedBatch, readings: Sequence[Reading]) -> list[float]:
        """What the divergences of one text count, all of which have chunks."""
        combination, teachers = self.config.combination, [self.teachers[one.teacher] for one in readings]
        if isinstance(combination, AverageConfig):
            total = sum(teacher.weight for teacher in teachers) or 1.0
            return [teacher.weight / total for teacher in teachers]
        if combination.measured is None:
            return [teacher.weight * teacher.scale for teacher in teachers]
        assert batch.teacher_scores is not None, "the combination requires scores of teachers"
        scores = [float(batch.teacher_scores[one.ends[0]]) for one in readings]
        if isinstance(combination, TrustConfig):
            sharp = [
                combination.sharpness * s * teacher.scale for s, teacher in zip(scores, teachers, strict=True)
            ]
            powers = [math.exp(one - max(sharp)) for one in sharp]
            return [p / sum(powers) * teacher.scale for p, teacher in zip(powers, teachers, strict=True)]
        best = scores.index(max(scores))
        return [float(place == best) for place in range(len(scores))]

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`logprobs` [N, 1 + V]: of the token itself, and of all."""
        assert batch.units is not None, "the sequences of a text are one unit"
        assert entropy is not None, "the loss requires the entropy"
        config, mask, numbers = self.config, batch.loss_mask, batch.chunk_numbers()
        units, text_of_token = batch.units.unique(return_inverse=True)
        entropies = -(batch.weights * logprobs[:, 0])
        cross_entropy = logprobs.new_zeros(len(units)).index_add(0, text_of_token, entropies)
        divergence = torch.zeros_like(cross_entropy)
        names = sorted(name.removeprefix("distillation/") for name in config.loss.metrics)
        sums = {f"{of}/{name}": logprobs.new_zeros(()) for name in names for of in ("distillation", "chunks")}
        texts = self._texts(batch)
        sums |= self._of_teachers(batch, numbers, texts)
        matches = logprobs.new_zeros(())
        for text in texts:
            place = text_of_token[text[0].start : text[0].start + 1]
            for teacher, weight, compared in self._terms(batch, logprobs[:, 1:], numbers, text):
                scale = weight / self.num_chunks[teacher] * config.loss.temperature**2
                term = scale * compared.divergence.sum()
                divergence = divergence.index_add(0, place, term.unsqueeze(0))
                matches += compared.matches.sum()
                for name, part in compared.parts.items():
                    sums[f"distillation/{name}"] += part.detach().sum()
                    sums[f"chunks/{name}"] += len(part)
                if len(self.teachers) > 1 and not isinstance(config.combination, AverageConfig):
                    name = self.teachers[teacher].name
                    sums[f"teachers/{name}/divergence"] += compared.divergence.detach().sum()
                    sums[f"chunks/teachers/{name}"] += len(compared.divergence)
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

    def _of_teachers(
        self, batch: PackedBatch, numbers: Tensor, texts: Sequence[Sequence[Reading]]
    ) -> dict[str, Tensor]:
        """Sums of the metrics of each of several teachers, but for the divergences, which are 0."""
        if len(self.teachers) == 1:
            return {}
        assert batch.teachers is not None, "the batch is of aligned examples"
        zero, sums = batch.weights.new_zeros(()), dict[str, Tensor]()
        for number, teacher in enumerate(self.teachers):
            own = batch.loss_mask & (batch.teachers == number)
            sums[f"tokens/teachers/{teacher.name}"] = own.sum()
            sums[f"teachers/{teacher.name}/aligned"] = (own & (numbers >= 0)).sum()
            for name in (f"teachers/{teacher.name}/divergence", f"chunks/teachers/{teacher.name}"):
                sums[name] = zero.clone()
            for name in (f"teachers/{teacher.name}/weight", f"texts/teachers/{teacher.name}"):
                sums[name] = zero.clone()
        for reading in chain.from_iterable(texts):
            name = self.teachers[reading.teacher].name
            sums[f"teachers/{name}/weight"] += reading.weight
            sums[f"texts/teachers/{name}"] += 1
        return sums

    def _terms(
        self, batch: PackedBatch, logprobs: Tensor, numbers: Tensor, text: Sequence[Reading]
    ) -> Iterator[tuple[int, float, Divergences]]:
        """The divergences of one text from teachers, by number, with their weights; `logprobs` [N, V]."""
        held = self._held(text)
        if isinstance(self.config.combination, AverageConfig):
            if len(places := _places_of_all(held)):
                yield 0, 1.0, self._averaged(batch, logprobs, held, places)
            return
        for reading in held:
            own = slice(reading.start, reading.end)
            compared = self._compared(batch, logprobs[own], numbers[own], reading.ends)
            yield reading.teacher, reading.weight, compared

    def _averaged(
        self, batch: PackedBatch, logprobs: Tensor, readings: Sequence[Reading], places: Tensor
    ) -> Divergences:
        """KL from the mean of the teachers' logits, over tokens that all compare; each chunk is a token."""
        assert batch.top_ids is not None, "the loss requires the teacher's tokens"
        assert batch.top_logprobs is not None, "the loss requires the teacher's logprobs"
        loss, of_each = self.config.loss, []
        for one in readings:
            ids = batch.top_ids[one.ends[0]].long()
            of_each.append(ids[ids >= 0])  # ascending
        common = of_each[0]
        for ids in of_each[1:]:
            common = common[torch.isin(common, ids)]
        logits = logprobs.new_zeros(len(places), len(common))
        for one, ids in zip(readings, of_each, strict=True):
            columns = torch.searchsorted(ids, common)
            logits += one.weight * batch.top_logprobs[one.start + places][:, columns]
        teacher = logits.log_softmax(-1)
        policy = (logprobs[readings[0].start + places][:, common] / loss.temperature).log_softmax(-1)
        kl = forward_kl(policy, teacher) if loss.reverse else forward_kl(teacher, policy)
        matches = policy.argmax(-1) == teacher.argmax(-1) if len(common) else kl != kl
        return Divergences(kl, {"projected_kl": kl}, matches)

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


def _places_of_all(readings: Sequence[Reading]) -> Tensor:
    """[m] places in the text, counted from its beginning, at which all of these have the end of a chunk."""
    if not readings:
        return torch.empty(0, dtype=torch.int64)
    places = readings[0].ends - readings[0].start
    for one in readings[1:]:
        places = places[torch.isin(places, one.ends - one.start)]
    return places


def aligned_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Losses as they are, divergences as means over the chunks that have them, the rest over tokens.

    Of several teachers the mean weight over texts, and divergence and share of aligned tokens of each.
    """
    chunks = {name.removeprefix("chunks/"): n for name, n in sums.items() if name.startswith("chunks/")}
    teachers = [name.removeprefix("texts/") for name in sums if name.startswith("texts/")]
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    of_loss = {name: n for name, n in chunks.items() if n and name not in teachers}
    metrics |= {f"distillation/{name}": sums[f"distillation/{name}"] / n for name, n in of_loss.items()}
    num_chunks = sum(n for name, n in chunks.items() if name in ("projected_kl", "common_kl"))
    metrics["distillation/match"] = sums["distillation/match"] / max(num_chunks, 1.0)
    for name in ("entropy", "distillation/aligned"):
        metrics[name] = sums[name] / max(sums["tokens"], 1.0)
    for name in teachers:
        for kind, of in (("divergence", "chunks"), ("weight", "texts"), ("aligned", "tokens")):
            if count := sums[f"{of}/{name}"]:
                metrics[f"{name}/{kind}"] = sums[f"{name}/{kind}"] / count
    return {**metrics, **maxima}
