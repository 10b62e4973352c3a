"""Aligned distillation on policy workers: what teachers say of chunks, and updates under layouts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.algorithms.aligned import AlignedLoss, AlignedTeacher
from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.data.aligned import Projection
from nemorl.data.packed import PackedBatch
from tests.megatron.cases import share
from tests.megatron.examples import VOCABULARY, layout, policy_config, ragged_batch
from tests.megatron.topk_cases import distilled

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
