"""Several teachers of aligned distillation, weighed, selected or averaged, against loops over floats."""

# ruff: noqa: F811 (the fixture of another module is imported by its name)

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nemorl.algorithms.aligned import aligned_teachers
from nemorl.config.algorithm.aligned import ProjectedKlLossConfig
from nemorl.data.packed import Compared, PackedBatch, pack_examples
from nemorl.data.shards import rows_of, with_rows
from nemorl.errors import RunError
from tests.algorithms.test_aligned import (
    CHUNKS,
    FLOAT32,
    POLICY_SIZE,
    TEACHER_SIZE,
    TOKENS,
    TWICE,
    WEIGHED,
    added,
    check_gradient,
    compared_tokens,
    config_of,
    examples,
    files,  # noqa: F401
    kl,
    logits,
    loss_of,
    replaced,
    softmax,
    taught,
    two_teachers,
)

SCORES = (-1.2, -0.7), (-0.5, -2.0)  # of both teachers for each text


def scored(batch: PackedBatch) -> PackedBatch:
    """Sequences are in the order of texts, then teachers."""
    return replace(batch, teacher_scores=batch.spread([score for text in SCORES for score in text]))


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("name", ["projected_kl", "common_kl"])
def test_teachers_are_weighed_by_their_scores(files: list[Path], name: str, by_size: bool) -> None:
    """Softmax over teachers of `sharpness * score`; both factors grow with the vocabulary, if it counts."""
    combination = {"name": "trust", "score": "entropy", "sharpness": 1.5, "scale_by_vocabulary": by_size}
    config, batch, texts = two_teachers(name, combination=combination, sft_coefficient=0.0)
    scale = math.log(TEACHER_SIZE) / math.log(POLICY_SIZE) if by_size else 1.0
    weights = []
    for first, second in SCORES:
        powers = math.exp(1.5 * first * scale), math.exp(1.5 * second)
        weights.append((scale * powers[0] / sum(powers), powers[1] / sum(powers)))

    def by_hand(z: Tensor) -> float:
        return sum(divergence for divergence, _ in added(texts(z), *weights))

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    found, metrics = loss_of(config, files, scored(batch), z[TWICE])
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=FLOAT32)
    check_gradient(found, z, by_hand)
    for number in range(2):
        mean = (weights[0][number] + weights[1][number]) / 2
        assert metrics[f"teachers/{number}/weight"] == pytest.approx(mean, rel=FLOAT32)


def test_sums_grow_with_the_vocabularies(files: list[Path]) -> None:
    combination = {"name": "sum", "scale_by_vocabulary": True}
    config, batch, texts = two_teachers(
        "projected_kl", combination=combination, **WEIGHED, sft_coefficient=0.0
    )
    z, scale = logits(10, POLICY_SIZE, 1), math.log(TEACHER_SIZE) / math.log(POLICY_SIZE)
    found, metrics = loss_of(config, files, batch, z[TWICE])
    divergences, _ = zip(*added(texts(z), (0.5 * scale, 2)), strict=True)
    assert float(found) == pytest.approx(sum(divergences), rel=FLOAT32)
    for number, chunks in enumerate((sum(max(c) + 1 for c in CHUNKS), sum(len(t) - 1 for t in TOKENS))):
        own = sum(sum(text[number]) for text in texts(z)) / chunks  # type: ignore[arg-type]
        assert metrics[f"teachers/{number}/divergence"] == pytest.approx(own, rel=FLOAT32)
    aligned = sum(chunk >= 0 for chunks in CHUNKS for chunk in chunks) / 8
    assert (metrics["teachers/0/aligned"], metrics["teachers/1/aligned"]) == pytest.approx((aligned, 1))


def test_each_text_has_the_teacher_of_the_best_score(files: list[Path]) -> None:
    """The first text has the second teacher, and the other one the first; their chunks are counted."""
    config, batch, texts = two_teachers("projected_kl", combination={"name": "select"}, sft_coefficient=0.0)

    def by_hand(z: Tensor) -> float:
        (_, of_second, _), (of_first, _, _) = texts(z)
        return sum([*of_second, *of_first]) / (len(of_second) + len(of_first))

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    found, metrics = loss_of(config, files, scored(batch), z[TWICE])
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=FLOAT32)
    check_gradient(found, z, by_hand)
    (_, of_second, _), (of_first, _, _) = texts(z.detach())
    for number, chunks in enumerate((of_first, of_second)):
        assert metrics[f"teachers/{number}/divergence"] == pytest.approx(np.mean(chunks), rel=FLOAT32)
        assert metrics[f"teachers/{number}/weight"] == pytest.approx(0.5)


@pytest.mark.parametrize(("temperature", "reverse"), [(1.0, False), (2.5, True)])
@pytest.mark.parametrize("size", [4, POLICY_SIZE])
def test_logits_are_averaged_over_the_tokens_that_all_compare(
    files: list[Path], size: int, temperature: float, reverse: bool
) -> None:
    """NeMo-RL's averaged_logits where all tokens are compared; else of those that both teachers compare."""
    loss = ProjectedKlLossConfig(tokens=size, temperature=temperature, reverse=reverse)
    fields = {"combination": {"name": "average"}, "teacher_weights": {"0": 3.0}, "sft_coefficient": 0.0}
    config = config_of(loss, **fields)
    singles = [np.arange(-1, len(tokens) - 1, dtype=np.int32) for tokens in TOKENS]
    of_each = [
        [logits(len(one) - 1, POLICY_SIZE, 10 * t + n) for n, one in enumerate(TOKENS)] for t in range(2)
    ]
    parts, sequences = [], []
    for number, of_teacher in enumerate(of_each):
        own = [replace(one, chunks=c) for one, c in zip(examples(number), singles, strict=True)]
        part = pack_examples(own, [0.1, 0.1], [Compared(0), Compared(1)])
        parts.append(replaced(part, taught(part, of_teacher, [c[1:].tolist() for c in singles], size, loss)))
        sequences.append(own)
    order = [(text, teacher) for text in range(2) for teacher in range(2)]
    batch = pack_examples(
        [sequences[teacher][text] for text, teacher in order],
        [0.1] * 4,
        [Compared(text) for text, _ in order],
    )
    for field in ("top_ids", "top_logprobs"):
        rows = [rows_of(part, field) for part in parts]
        batch = with_rows(batch, field, [rows[teacher][text] for text, teacher in order])

    def by_hand(z: Tensor) -> float:
        terms = []
        for text, policy in enumerate((z[:6], z[6:])):
            mine = [compared_tokens(own[text].tolist(), size) for own in of_each]
            common = sorted(set(mine[0]) & set(mine[1]))
            assert size == len(common) or 0 < len(common) < size
            for place in range(len(TOKENS[text]) - 1):
                rows = [own[text][place].tolist() for own in of_each]
                mean = [(3 * rows[0][t] + rows[1][t]) / 4 for t in common]
                p, q = (
                    softmax(row, temperature) for row in (mean, [policy[place + 1, t].item() for t in common])
                )
                terms.append((kl(q, p) if reverse else kl(p, q)) * temperature**2)
        return sum(terms) / len(terms)

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    found, metrics = loss_of(config, [files[1]] * 2, batch, z[TWICE])
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=FLOAT32)
    check_gradient(found, z, by_hand)
    assert metrics["distillation/projected_kl"] * temperature**2 == pytest.approx(
        float(found.detach()), rel=FLOAT32
    )
    shares = metrics["teachers/0/weight"], metrics["teachers/1/weight"]
    assert shares == pytest.approx((0.75, 0.25))
    assert "teachers/0/divergence" not in metrics


def test_a_mean_of_logits_has_tokens_of_the_policy(files: list[Path]) -> None:
    config = config_of(ProjectedKlLossConfig(), combination={"name": "average"})
    with pytest.raises(
        RunError, match=r"average: teachers\.coder has other tokens than the policy.*; use `sum`"
    ):
        aligned_teachers(config, {"large": files[1], "coder": files[0]})


def test_a_teacher_without_chunks_of_a_text_has_no_weight_there(files: list[Path]) -> None:
    """As of a text that the teacher's template cuts: the others' weights have the sum 1."""
    combination = {"name": "trust", "score": "cross_entropy"}
    config, batch, _ = two_teachers("projected_kl", combination=combination, sft_coefficient=0.0)
    assert batch.chunks is not None
    cut = torch.where((batch.units == 1) & (batch.teachers == 0), -1, batch.chunks)
    _, metrics = loss_of(config, files, scored(replace(batch, chunks=cut)), logits(10, POLICY_SIZE, 1)[TWICE])
    first = 1 / (1 + math.exp(-0.7 + 1.2))
    assert metrics["teachers/0/weight"] == pytest.approx(first, rel=FLOAT32)
    assert metrics["teachers/1/weight"] == pytest.approx((1 - first + 1) / 2, rel=FLOAT32)
