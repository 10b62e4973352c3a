"""Aligned distillation on policy workers: what teachers say of chunks, and updates under layouts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.algorithms.aligned import AlignedLoss, AlignedTeacher
from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import TeacherScore
from nemorl.data.aligned import Projection
from nemorl.data.packed import PackedBatch
from tests.megatron.cases import share
from tests.megatron.examples import VOCABULARY, layout, policy_config, ragged_batch
from tests.megatron.topk_cases import combined, distilled, scores_of

K = 11


def aligned_batch() -> PackedBatch:
    """Chunks of one to three tokens of the loss mask; each sequence a text of one teacher."""
    batch = ragged_batch()
    chunks = torch.full_like(batch.tokens, -1)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        number, left = -1, 0
        for place in range(start, end):
            if not batch.loss_mask[place]:
                left = 0
                continue
            if left == 0:
                number, left = number + 1, 1 + int(batch.tokens[place]) % 3
            chunks[place] = number
            left -= 1
    units = batch.spread(range(batch.num_sequences), torch.int64)
    return replace(batch, chunks=chunks, teachers=torch.zeros_like(units), units=units)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[AlignedLoss]:
    """Over a projection that maps each token to itself, and half of them also to the next."""
    ids = np.arange(VOCABULARY, dtype=np.int32)
    half, further = ids[::2], (ids[::2] + 1) % VOCABULARY
    projection = Projection(
        np.concatenate((ids, half)),
        np.concatenate((ids, further.astype(np.int32))),
        np.concatenate((np.where(ids % 2, 1, 0.8), np.full(len(half), 0.2))).astype(np.float32),
        np.concatenate((ids % 2 == 1, np.zeros(len(half), bool))),
        VOCABULARY,
        VOCABULARY,
    )
    path = tmp_path_factory.mktemp("projections") / "half.npz"
    projection.save(path)
    return [
        AlignedLoss(
            AlignedDistillationConfig.model_validate(
                {
                    "name": "aligned_distillation",
                    "num_steps": 1,
                    "batch_size": 1,
                    "match_sft": True,
                    "loss": loss,
                }
            ),
            (AlignedTeacher(1.0, path),),
        )
        for loss in (
            {"name": "projected_kl", "tokens": K},
            {"name": "common_kl", "tokens": K, "common": "likeliest", "temperature": 2.0},
        )
    ]


@pytest.fixture(scope="module")
def alone(pool, model, losses):
    config = policy_config(model("llama")[1], layout=layout())
    (found,) = pool.run(1, distilled, config, aligned_batch(), 8, K, [CrossEntropyLoss(), *losses])
    return found


@torch.no_grad()
def test_chunks_have_the_mean_logprobs_of_the_likeliest_tokens_of_the_text(model, alone):
    batch, (network, _) = aligned_batch(), model("llama")
    ids, logprobs, _ = alone
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        log_p = network(batch.tokens[start:end][None]).logits[0].float().log_softmax(-1)
        trained = [place for place in range(start + 1, end) if batch.loss_mask[place]]
        if not trained:
            continue
        of_place = {place: log_p[place - 1 - start] for place in trained}
        highest = torch.stack([*of_place.values()]).amax(0).topk(K).indices.sort().values
        for number in range(int(batch.chunks[start:end].max()) + 1):
            places = [place for place in trained if batch.chunks[place] == number]
            mean = sum(of_place[place][highest] for place in places) / len(places)
            assert ids[places[-1]].tolist() == highest.tolist()
            torch.testing.assert_close(logprobs[places[-1]], mean, atol=2e-5, rtol=1e-5)


def test_all_chunks_of_the_step_are_counted(alone):
    batch, (_, projected, common) = aligned_batch(), alone[2]
    for step, name in ((projected, "projected_kl"), (common, "common_kl")):
        assert step.sums[f"chunks/{name}"] == len(batch.chunk_ends())
        assert step.sums["distillation/aligned"] == int((batch.chunks >= 0).sum())
        assert step.grad_norm > 0


@pytest.mark.parametrize(
    "where", [layout(cp=2, tp=2, sp=True), layout(pp=2, dp=2)], ids=lambda where: where.name
)
def test_layouts_equal_one_process(pool, model, alone, losses, where):
    config, batch = policy_config(model("llama")[1], layout=where), aligned_batch()
    whole_ids, whole_logprobs, steps = alone
    numbered = replace(batch, position_ids=torch.arange(batch.num_tokens))
    run = pool.run(where.world_size, distilled, config, batch, 2, K, [CrossEntropyLoss(), *losses])
    for rank, (ids, logprobs, mine) in enumerate(run):
        held = share(numbered, rank, config).position_ids
        ends = batch.chunk_ends()
        ends = ends[torch.isin(ends, held)]
        places = torch.searchsorted(held.sort().values, ends)
        places = held.argsort()[places]
        assert torch.equal(ids[places], whole_ids[ends])
        torch.testing.assert_close(logprobs[places], whole_logprobs[ends], atol=2e-5, rtol=1e-5)
        for one, other in zip(mine, steps, strict=True):
            assert one.sums == pytest.approx(other.sums, rel=2e-4, abs=2e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


@pytest.mark.parametrize("number", [0, 1], ids=["projected_kl", "common_kl"])
def test_a_model_that_went_away_comes_back_to_its_teacher(pool, model, losses, number):
    """Three steps of cross entropy away from the first weights, and fifteen towards what these say."""
    loss = losses[number]
    fixed = loss.config.model_copy(update={"match_sft": False, "sft_coefficient": 0.0})
    given = [CrossEntropyLoss()] * 3 + [replace(loss, config=fixed)] * 15
    (found,) = pool.run(
        1, distilled, policy_config(model("llama")[1], layout=layout()), aligned_batch(), 8, VOCABULARY, given
    )
    first, last = (step.sums["loss/distillation"] for step in (found[2][3], found[2][-1]))
    assert last < 0.6 * first


def texts_of_two_teachers() -> PackedBatch:
    """Four texts, each for both teachers; the second one has fewer tokens of it, and other chunks.

    The sequences of a text are neighbors in two data-parallel shares as in one.
    """
    batch = aligned_batch()
    first = batch.select([0, 1, 0, 1, 2, 3, 2, 3])
    second = first.spread([0, 0, 1, 1] * 2, torch.int64)
    units = first.spread([0, 1, 0, 1, 2, 3, 2, 3], torch.int64)
    assert first.chunks is not None
    mask = first.loss_mask & ((second == 0) | (first.tokens % 5 > 0))
    chunks = torch.where(mask, torch.where(second == 0, first.chunks, -1), -1)
    for start, end in itertools.pairwise(first.cu_seqlens.tolist()):
        if second[start]:
            chunks[start:end][mask[start:end]] = torch.arange(int(mask[start:end].sum()))
    weights = mask / mask.sum()
    return replace(first, loss_mask=mask, weights=weights, chunks=chunks, teachers=second, units=units)


SCORES: tuple[TeacherScore, ...] = ("cross_entropy", "entropy", "max_probability")


@pytest.fixture(scope="module")
def combinations(losses: list[AlignedLoss]) -> dict[TeacherScore, list[AlignedLoss]]:
    """Of two teachers; the average compares the tokens that are chunks of both."""
    (teacher,) = losses[0].teachers
    both = replace(teacher, weight=0.5, name="a"), replace(teacher, name="b", scale=1.2)

    def of(**combination: object) -> AlignedLoss:
        given = losses[0].config.model_dump() | {"match_sft": False, "combination": combination}
        return AlignedLoss(AlignedDistillationConfig.model_validate(given), both)

    found = {score: [of(name="trust", score=score, sharpness=3.0)] for score in SCORES}
    found["cross_entropy"] += [of(name="select"), of(name="average")]
    return found


@pytest.fixture(scope="module")
def combined_alone(pool, model, combinations):
    config = policy_config(model("llama")[1], layout=layout())
    (found,) = pool.run(1, combined, config, texts_of_two_teachers(), 8, K, combinations)
    return found


@torch.no_grad()
def test_teachers_score_each_text_by_its_tokens(pool, model):
    """At temperature 1, by the logits of transformers."""
    batch, (network, folder) = texts_of_two_teachers(), model("llama")
    config = policy_config(folder, layout=layout())
    (found,) = pool.run(1, scores_of, config, batch, 8, K, list(SCORES))
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        places = [place for place in range(start + 1, end) if batch.loss_mask[place]]
        log_p = network(batch.tokens[start:end][None]).logits[0].double().log_softmax(-1)
        rows = log_p[[place - 1 - start for place in places]]
        by_hand = {
            "cross_entropy": float(rows.gather(1, batch.tokens[places][:, None]).mean()),
            "entropy": float((rows.exp() * rows).sum(-1).mean()),
            "max_probability": float(rows.exp().amax(-1).mean()),
        }
        for score, values in zip(SCORES, found, strict=True):
            assert values[places].tolist() == pytest.approx([by_hand[score]] * len(places), abs=2e-5)


@pytest.mark.parametrize(
    "where", [layout(cp=2, tp=2, sp=True), layout(pp=2, dp=2)], ids=lambda where: where.name
)
def test_layouts_combine_teachers_as_one_process(pool, model, combinations, combined_alone, where):
    config, batch = policy_config(model("llama")[1], layout=where), texts_of_two_teachers()
    run = pool.run(where.world_size, combined, config, batch, 4, K, combinations)
    for mine in run:
        for score, steps in mine.items():
            for one, other in zip(steps, combined_alone[score], strict=True):
                assert one.sums == pytest.approx(other.sums, rel=2e-4, abs=2e-5)
                assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
                assert abs(other.sums["loss/distillation"]) > 1e-3
    selected = combined_alone["cross_entropy"][1].sums
    assert all(0 < selected[f"teachers/{name}/weight"] < 4 for name in "ab")
