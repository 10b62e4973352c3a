"""Losses of aligned distillation against their formulas, written in loops over floats, in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.algorithms.aligned import AlignedLoss, aligned_metrics, aligned_teachers
from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import AlignedLossConfig, CommonKlLossConfig, ProjectedKlLossConfig
from nemorl.data.aligned import Projection
from nemorl.data.examples import Example
from nemorl.data.packed import Compared, PackedBatch, pack_examples
from nemorl.data.shards import Field, TokenArray, rows_of, with_rows

POLICY_SIZE, TEACHER_SIZE = 7, 9
# Of tokens of the policy: weights of tokens of the teacher. 6 has none; 3 and 4 begin with the same token.
WEIGHTS: dict[int, dict[int, float]] = {
    0: {2: 1.0},
    1: {5: 1.0},
    2: {0: 1.0},
    3: {7: 0.9, 2: 0.1},
    4: {7: 0.7, 8: 0.3},
    5: {5: 0.6, 1: 0.4},
}
EXACT = {0: 2, 1: 5, 2: 0}
LIKELIEST = EXACT | {3: 7}
# Chunks of the tokens of two texts: the policy's tokens, and how many tokens the teacher has of each chunk.
CHUNKS = ([-1, 0, 0, 1, -1, 2], [-1, -1, 0, 1])
TEACHER_CHUNKS = ([0, 1, 1, 1, 2], [0, 0, 1])
TOKENS = ([0, 3, 1, 5, 2, 2], [1, 2, 6, 0])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Projections: the one by hand, and the identity of the policy's tokens."""
    entries = [(s, t, w, EXACT.get(s) == t) for s, row in WEIGHTS.items() for t, w in row.items()]
    policy, teacher, weights, exact = (np.array(column) for column in zip(*entries, strict=True))
    projection = Projection(
        policy.astype(np.int32), teacher.astype(np.int32), weights, exact, POLICY_SIZE, TEACHER_SIZE
    )
    ids = np.arange(POLICY_SIZE, dtype=np.int32)
    ones = np.ones(POLICY_SIZE)
    identity = Projection(ids, ids, ones, ones == 1, POLICY_SIZE, POLICY_SIZE)
    paths = [tmp_path / "by_hand.npz", tmp_path / "identity.npz"]
    for one, path in zip((projection, identity), paths, strict=True):
        one.save(path)
    return paths


def logits(tokens: int, size: int, seed: int) -> Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed)).double() * 2


def softmax(row: Sequence[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(x / temperature) for x in row]
    return [w / sum(weights) for w in weights]


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def of_chunk(rows: Sequence[Sequence[float]], chunks: Sequence[int], number: int) -> list[Sequence[float]]:
    return [row for row, chunk in zip(rows, chunks, strict=True) if chunk == number]


def compared_tokens(teacher: Sequence[Sequence[float]], size: int) -> list[int]:
    """The tokens of the largest probability anywhere."""
    highest = [max(softmax(row)[t] for row in teacher) for t in range(len(teacher[0]))]
    return sorted(sorted(range(len(highest)), key=lambda t: -highest[t])[:size])


def projected_by_hand(
    policy: Sequence[Sequence[float]],
    teacher: Sequence[Sequence[float]],
    ids: Sequence[int],
    weights: dict[int, dict[int, float]],
    temperature: float,
    reverse: bool,
) -> float:
    """Of the logits of one chunk's tokens: NeMo-RL's P-KL."""
    chances = mean([softmax(row, temperature) for row in policy])
    mass = [sum(weights.get(s, {}).get(t, 0.0) * chances[s] for s in range(len(chances))) for t in ids]
    q = [m / (sum(mass) + 1e-10) + 1e-10 for m in mass]
    logs = mean([[math.log(x) for x in softmax([row[t] for t in ids], temperature)] for row in teacher])
    p = [math.exp(x) for x in logs]  # a geometric mean, which need not sum to 1
    return (kl(q, p) if reverse else kl(p, q)) * temperature**2


def common_by_hand(
    policy: Sequence[Sequence[float]],
    teacher: Sequence[Sequence[float]],
    pairs: dict[int, int],
    rest_tokens: int,
    temperature: float,
    reverse: bool,
) -> tuple[float, float]:
    """Of the logits of one chunk's tokens: KL and distance of NeMo-RL's gold loss."""

    def averaged(rows: Sequence[Sequence[float]]) -> list[float]:
        return [math.exp(x) for x in mean([[math.log(y) for y in softmax(row, temperature)] for row in rows])]

    q, p = averaged(policy), averaged(teacher)
    of_common = [p[t] for t in pairs.values()], [q[s] for s in pairs]
    rest = sorted((x for s, x in enumerate(q) if s not in pairs), reverse=True)
    teacher_rest = sorted((x for t, x in enumerate(p) if t not in pairs.values()), reverse=True)
    size = min(len(rest), len(teacher_rest), rest_tokens)
    distance = sum(abs(a - b) for a, b in zip(rest[:size], teacher_rest[:size], strict=True))
    return (kl(*reversed(of_common)) if reverse else kl(*of_common)), distance


def examples(teacher: int = 0) -> list[Example]:
    return [
        Example(
            np.array(tokens, np.int32),
            np.arange(len(tokens)) > 0,
            chunks=np.array(chunks, np.int32),
            teacher=teacher,
        )
        for tokens, chunks in zip(TOKENS, CHUNKS, strict=True)
    ]


def taught(
    batch: PackedBatch,
    of_texts: Sequence[Tensor],
    chunks: Sequence[Sequence[int]],
    size: int,
    loss: AlignedLossConfig,
) -> tuple[Tensor, Tensor]:
    """`top_ids` and `top_logprobs` as a teacher's processes compute them, by hand."""
    ids, values = (
        torch.zeros(batch.num_tokens, size, dtype=torch.int32),
        torch.zeros(batch.num_tokens, size).double(),
    )
    ends = iter(batch.chunk_ends().tolist())
    for own, numbers in zip(of_texts, chunks, strict=True):
        seen = compared_tokens(own.tolist(), size)
        for number in range(max(numbers) + 1):
            logs = []
            for row in of_chunk(own.tolist(), numbers, number):
                chosen = [softmax(row, loss.temperature)[t] for t in seen]
                total = sum(chosen) if loss.name == "projected_kl" else 1.0
                logs.append([math.log(x / total) for x in chosen])
            place = next(ends)
            ids[place], values[place] = (
                torch.tensor(seen, dtype=torch.int32),
                torch.tensor(mean(logs)).double(),
            )
    return ids, values


def loss_of(
    config: AlignedDistillationConfig, files: Sequence[Path], batch: PackedBatch, z: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss, and metrics as a step reports them."""
    teachers = aligned_teachers(config, {str(n): path for n, path in enumerate(files)})
    loss = AlignedLoss(config, teachers).prepared(batch, lambda counts: counts, batch)
    every = z.log_softmax(-1)
    own = every.gather(1, batch.tokens[:, None])
    candidates = loss.candidates(batch)
    outputs = torch.cat((own, every.gather(1, candidates)), dim=1) * batch.loss_mask[:, None]
    output = loss(batch, outputs, torch.ones(batch.num_tokens).double())
    return output.loss, aligned_metrics(
        {name: float(value.detach()) for name, value in output.sums.items()}, {}
    )


def config_of(loss: AlignedLossConfig, **fields: object) -> AlignedDistillationConfig:
    given = {"name": "aligned_distillation", "num_steps": 1, "batch_size": 2, **fields}
    return AlignedDistillationConfig.model_validate(given | {"loss": loss.model_dump()})


FLOAT32 = 1e-6  # of weights in the batch, and of metrics


@pytest.mark.parametrize(("temperature", "reverse"), [(1.0, False), (1.0, True), (2.5, False), (0.7, True)])
@pytest.mark.parametrize("size", [4, TEACHER_SIZE])
def test_projected_kl_and_its_gradient(
    files: list[Path], size: int, temperature: float, reverse: bool
) -> None:
    loss = ProjectedKlLossConfig(tokens=size, temperature=temperature, reverse=reverse)
    batch = pack_examples(examples(), [0.1, 0.1], [Compared(0), Compared(1)])
    of_teacher = [logits(len(chunks), TEACHER_SIZE, 3 + n) for n, chunks in enumerate(TEACHER_CHUNKS)]
    batch = replaced(batch, taught(batch, of_teacher, TEACHER_CHUNKS, size, loss))

    def by_hand(z: Tensor) -> float:
        terms = []
        for rows, chunks, own, numbers in zip(
            z.split([6, 4]), CHUNKS, of_teacher, TEACHER_CHUNKS, strict=True
        ):
            ids = compared_tokens(own.tolist(), size)
            for number in range(max(chunks) + 1):
                both = of_chunk(rows.tolist(), chunks, number), of_chunk(own.tolist(), numbers, number)
                terms.append(projected_by_hand(*both, ids, WEIGHTS, temperature, reverse))
        return sum(terms) / len(terms)

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    config = config_of(loss, sft_coefficient=0.0)
    found, metrics = loss_of(config, files[:1], batch, z)
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=1e-6)
    assert metrics["distillation/projected_kl"] * temperature**2 == pytest.approx(
        float(found.detach()), rel=FLOAT32
    )
    check_gradient(found, z, by_hand)


@pytest.mark.parametrize("common", ["exact", "likeliest"])
@pytest.mark.parametrize(
    ("temperature", "reverse", "rest"), [(1.0, False, 8192), (1.0, True, 2), (2.0, False, 1)]
)
def test_common_kl_and_its_gradient(
    files: list[Path], common: str, temperature: float, reverse: bool, rest: int
) -> None:
    """All tokens of the teacher are compared, as NeMo-RL does."""
    given = {"common": common, "rest_tokens": rest, "temperature": temperature, "reverse": reverse}
    loss = CommonKlLossConfig.model_validate({"name": "common_kl", "tokens": TEACHER_SIZE, **given})
    batch = pack_examples(examples(), [0.1, 0.1], [Compared(0), Compared(1)])
    of_teacher = [logits(len(chunks), TEACHER_SIZE, 3 + n) for n, chunks in enumerate(TEACHER_CHUNKS)]
    batch = replaced(batch, taught(batch, of_teacher, TEACHER_CHUNKS, TEACHER_SIZE, loss))
    pairs = EXACT if common == "exact" else LIKELIEST

    def terms(z: Tensor) -> list[tuple[float, float]]:
        found = []
        for rows, chunks, own, numbers in zip(
            z.split([6, 4]), CHUNKS, of_teacher, TEACHER_CHUNKS, strict=True
        ):
            for number in range(max(chunks) + 1):
                both = of_chunk(rows.tolist(), chunks, number), of_chunk(own.tolist(), numbers, number)
                found.append(common_by_hand(*both, pairs, rest, temperature, reverse))
        return found

    def by_hand(z: Tensor) -> float:
        return sum(map(sum, terms(z))) / len(terms(z)) * temperature**2

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    found, metrics = loss_of(config_of(loss, sft_coefficient=0.0), files[:1], batch, z)
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=1e-6)
    kls, distances = zip(*terms(z.detach()), strict=True)
    assert metrics["distillation/common_kl"] == pytest.approx(np.mean(kls), rel=FLOAT32)
    assert metrics["distillation/sorted_distance"] == pytest.approx(np.mean(distances), rel=FLOAT32)
    assert "distillation/projected_kl" not in metrics
    check_gradient(found, z, by_hand)


def test_tokens_of_the_teacher_that_are_not_compared_count_as_zero(files: list[Path]) -> None:
    """Their terms of the forward divergence, and of the sorted probabilities, are what is missing."""
    batch = pack_examples(examples(), [0.1, 0.1], [Compared(0), Compared(1)])
    of_teacher = [4 * logits(len(chunks), TEACHER_SIZE, 3 + n) for n, chunks in enumerate(TEACHER_CHUNKS)]
    z, found = logits(10, POLICY_SIZE, 1), []
    for size in (TEACHER_SIZE - 1, TEACHER_SIZE):
        loss = CommonKlLossConfig(name="common_kl", tokens=size)
        given = replaced(batch, taught(batch, of_teacher, TEACHER_CHUNKS, size, loss))
        found.append(float(loss_of(config_of(loss), files[:1], given, z)[0]))
    left_out = [
        softmax(own.tolist()[place])[t]
        for own in of_teacher
        for place in range(len(own))
        for t in set(range(TEACHER_SIZE)) - set(compared_tokens(own.tolist(), TEACHER_SIZE - 1))
    ]
    assert 0 < max(left_out) < 0.01
    assert 0 < abs(found[0] - found[1]) < 0.1


OfText = tuple[list[float], list[float], float]


def two_teachers(
    name: str, **fields: object
) -> tuple[AlignedDistillationConfig, PackedBatch, Callable[[Tensor], list[OfText]]]:
    """A batch of two texts with two teachers, the second of the policy's tokens; both compare all tokens.

    The function by hand gives the divergences of the chunks of each text from either teacher, and its cross
    entropy over the tokens of the step.
    """
    loss: AlignedLossConfig = ProjectedKlLossConfig(tokens=TEACHER_SIZE)
    if name == "common_kl":
        loss = CommonKlLossConfig(name="common_kl", tokens=TEACHER_SIZE)
    first, singles = examples(), [list(range(len(tokens) - 1)) for tokens in TOKENS]
    second = [
        replace(one, chunks=np.array([-1, *numbers], np.int32), teacher=1)
        for one, numbers in zip(first, singles, strict=True)
    ]
    own = [logits(len(chunks), TEACHER_SIZE, 3 + n) for n, chunks in enumerate(TEACHER_CHUNKS)]
    same = [logits(len(numbers), POLICY_SIZE, 5 + n) for n, numbers in enumerate(singles)]
    trained, units = sum(map(len, singles)), [Compared(0), Compared(1)]
    rows: dict[Field, list[TokenArray]] = {"top_ids": [], "top_logprobs": []}
    for texts, of_teacher, numbers, size in (
        (first, own, TEACHER_CHUNKS, TEACHER_SIZE),
        (second, same, singles, POLICY_SIZE),
    ):
        part = pack_examples(texts, [1.0, 1.0], units)
        ids, values = taught(part, of_teacher, numbers, size, loss)
        missing = (0, TEACHER_SIZE - size)
        part = replace(part, top_ids=F.pad(ids, missing, value=-1), top_logprobs=F.pad(values, missing))
        for field, found in rows.items():
            found += rows_of(part, field)
    order = [0, 2, 1, 3]  # the sequences of a text are neighbors
    sequences = [*first, *second]
    batch = pack_examples([sequences[n] for n in order], [0.5 / trained] * 4, [units[n % 2] for n in order])
    for field, found in rows.items():
        batch = with_rows(batch, field, [found[n] for n in order])

    def by_hand(z: Tensor) -> list[OfText]:
        texts = []
        for n, policy in enumerate((z[:6], z[6:])):
            of_first = []
            for number in range(max(CHUNKS[n]) + 1):
                both = (
                    of_chunk(policy.tolist(), CHUNKS[n], number),
                    of_chunk(own[n].tolist(), TEACHER_CHUNKS[n], number),
                )
                if name == "common_kl":
                    of_first.append(sum(common_by_hand(*both, EXACT, 8192, 1.0, False)))
                else:
                    of_first.append(projected_by_hand(*both, range(TEACHER_SIZE), WEIGHTS, 1.0, False))
            p, q = ([softmax(row) for row in rows.tolist()] for rows in (same[n], policy[1:]))
            right = [softmax(row)[token] for row, token in zip(policy.tolist(), TOKENS[n], strict=True)]
            texts.append((of_first, list(map(kl, p, q)), -sum(map(math.log, right[1:])) / trained))
        return texts

    return config_of(loss, **fields), batch, by_hand


WEIGHED = {"teacher_weights": {"0": 0.5, "1": 2.0}}


def added(texts: Sequence[OfText], *weights: tuple[float, float]) -> list[tuple[float, float]]:
    """The divergence of each text, of which each teacher's is over its chunks in the step; and its entropy.

    `weights` of both teachers for each text, or for all.
    """
    counts = [sum(len(text[number]) for text in texts) for number in range(2)]  # type: ignore[arg-type]
    by_text = weights * (len(texts) // len(weights))
    return [
        (a * sum(first) / counts[0] + b * sum(second) / counts[1], entropy)
        for (first, second, entropy), (a, b) in zip(texts, by_text, strict=True)
    ]


TWICE = [*range(6)] * 2 + [*range(6, 10)] * 2  # tokens of the texts in the batch of two teachers


@pytest.mark.parametrize("name", ["projected_kl", "common_kl"])
def test_teachers_are_weighted_and_mixed_with_the_cross_entropy(files: list[Path], name: str) -> None:
    coefficients = {"distillation_coefficient": 3.0, "sft_coefficient": 0.25}
    config, batch, texts = two_teachers(name, **WEIGHED, **coefficients)

    def by_hand(z: Tensor) -> float:
        return sum(3 * divergence + 0.25 * entropy for divergence, entropy in added(texts(z), (0.5, 2)))

    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    found, metrics = loss_of(config, files, batch, z[TWICE])
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=FLOAT32)
    divergences, entropies = zip(*added(texts(z.detach()), (0.5, 2)), strict=True)
    assert metrics["loss/distillation"] == pytest.approx(sum(divergences), rel=FLOAT32)
    assert metrics["loss/sft"] == pytest.approx(sum(entropies), rel=FLOAT32)
    aligned = sum(chunk >= 0 for chunks in CHUNKS for chunk in chunks)
    assert metrics["distillation/aligned"] == pytest.approx((aligned + 8) / 16)
    check_gradient(found, z, by_hand)


def test_divergences_match_the_cross_entropy_of_each_text(files: list[Path]) -> None:
    config, batch, texts = two_teachers("projected_kl", **WEIGHED, match_sft=True)
    z = logits(10, POLICY_SIZE, 1).requires_grad_()
    scales = [entropy / divergence for divergence, entropy in added(texts(z.detach()), (0.5, 2))]
    assert abs(scales[0] - scales[1]) > 0.01

    def by_hand(z: Tensor) -> float:
        of_texts = added(texts(z), (0.5, 2))
        return sum(
            s * divergence + entropy for s, (divergence, entropy) in zip(scales, of_texts, strict=True)
        )

    found, _ = loss_of(config, files, batch, z[TWICE])
    assert float(found.detach()) == pytest.approx(by_hand(z.detach()), rel=FLOAT32)
    check_gradient(found, z, by_hand)


def replaced(batch: PackedBatch, top: tuple[Tensor, Tensor]) -> PackedBatch:
    return replace(batch, top_ids=top[0], top_logprobs=top[1])


def check_gradient(found: Tensor, z: Tensor, by_hand: Callable[[Tensor], float]) -> None:
    """In three directions, by differences of the formula."""
    (gradient,) = torch.autograd.grad(found, z)
    for seed in range(3):
        step = 1e-5 * logits(*z.shape, seed=20 + seed)
        change = by_hand(z.detach() + step) - by_hand(z.detach() - step)
        assert float((gradient * step).sum()) * 2 == pytest.approx(change, rel=1e-4, abs=1e-10)
