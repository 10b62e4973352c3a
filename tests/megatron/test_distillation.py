"""Distillation on policy workers: a teacher's likeliest tokens, and the same updates under every layout."""

import itertools
from dataclasses import replace

import pytest
import torch

from nemorl.algorithms.distillation import TopDivergence
from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.algorithm import ForwardKlLossConfig, JsdLossConfig, MixedKlLossConfig
from nemorl.config.policy import AdamConfig
from nemorl.config.quantization import CalibrationConfig, QuantizationConfig
from tests.megatron.cases import share
from tests.megatron.examples import VOCABULARY, layout, policy_config, ragged_batch
from tests.megatron.topk_cases import distilled, taught_by

K = 5
FORWARD = TopDivergence(ForwardKlLossConfig(name="forward_kl", tokens=K))
JSD = TopDivergence(JsdLossConfig(name="jsd", tokens=K, beta=0.3))
MIXED = TopDivergence(MixedKlLossConfig(name="mixed_kl", tokens=K, rest="zero"))  # has the entropy's gradient
LOSSES = [CrossEntropyLoss(), FORWARD, JSD, MIXED]


@pytest.fixture(scope="module")
def alone(pool, model):
    config = policy_config(model("llama")[1], layout=layout())
    (found,) = pool.run(1, distilled, config, ragged_batch(), 8, K, LOSSES)
    return found


@torch.no_grad()
def test_top_tokens_are_those_of_transformers(model, alone):
    batch, (network, _) = ragged_batch(), model("llama")
    ids, logprobs, _ = alone
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        log_p = network(batch.tokens[start:end][None]).logits[0].float().log_softmax(-1)
        for place in range(start + 1, end):
            values, places = log_p[place - 1 - start].topk(K)
            if batch.loss_mask[place]:
                assert ids[place].tolist() == places.tolist()
                torch.testing.assert_close(logprobs[place], values, atol=2e-5, rtol=1e-5)
            else:
                assert not ids[place].any()
                assert not logprobs[place].any()


def test_the_teacher_is_left_and_come_back_to(alone):
    _, forward, jsd, mixed = alone[2]
    assert forward.sums["distillation/forward_kl"] > 1e-4 * forward.sums["tokens"]
    assert 0 < jsd.sums["distillation/jsd"] < jsd.sums["distillation/forward_kl"]
    assert jsd.sums["distillation/forward_kl"] < forward.sums["distillation/forward_kl"]
    assert mixed.sums["distillation/reverse_kl"] > mixed.sums["distillation/forward_kl"]


@pytest.mark.parametrize("loss", [FORWARD, JSD], ids=lambda loss: loss.config.name)
def test_a_model_that_went_away_comes_back_to_its_teacher(pool, model, loss):
    """Three steps of cross entropy away from the first weights, and fifteen towards what these say."""
    name = f"distillation/{loss.config.name}"
    losses = [CrossEntropyLoss()] * 3 + [loss] * 15
    (found,) = pool.run(
        1, distilled, policy_config(model("llama")[1], layout=layout()), ragged_batch(), 8, K, losses
    )
    first, last = (step.sums[name] / step.sums["tokens"] for step in (found[2][3], found[2][-1]))
    assert last < 0.2 * first


@pytest.mark.parametrize(
    "where", [layout(cp=2, tp=2, sp=True), layout(pp=2, dp=2)], ids=lambda where: where.name
)
def test_layouts_equal_one_process(pool, model, alone, where):
    config, batch = policy_config(model("llama")[1], layout=where), ragged_batch()
    whole_ids, whole_logprobs, steps = alone
    numbered = replace(batch, position_ids=torch.arange(batch.num_tokens))
    for rank, (ids, logprobs, mine) in enumerate(
        pool.run(where.world_size, distilled, config, batch, 2, K, LOSSES)
    ):
        held = share(numbered, rank, config).position_ids
        assert torch.equal(ids, whole_ids[held])
        torch.testing.assert_close(logprobs, whole_logprobs[held], atol=2e-5, rtol=1e-5)
        for one, other in zip(mine, steps, strict=True):
            assert one.sums == pytest.approx(other.sums, rel=2e-4, abs=2e-5)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


@pytest.mark.ci
def test_a_rounded_policy_learns_from_its_own_unrounded_weights(pool, model):
    """Quantization-aware distillation: the teacher is in bfloat16, the policy rounds to four bits.

    The divergence that rounding costs at first falls, though the weights of both are the same then.
    """
    folder, batch = model("llama-wide")[1], ragged_batch()
    teacher = policy_config(folder, precision="bfloat16")
    ((ids, logprobs, _),) = pool.run(1, distilled, teacher, batch, 8, VOCABULARY, [])
    taught = replace(batch, top_ids=ids, top_logprobs=logprobs)
    quantization = QuantizationConfig(
        format="nvfp4", train="fake", activations=True, calibration=CalibrationConfig(prompts=8)
    )
    loss = TopDivergence(ForwardKlLossConfig(name="forward_kl", tokens=VOCABULARY))
    found = {}
    for name, given in (("plain", None), ("rounded", quantization)):
        config = policy_config(folder, quantization=given, optimizer=AdamConfig(lr=1e-3))
        (steps,) = pool.run(1, taught_by, config, taught, [loss] * 12)
        found[name] = [step.sums["distillation/forward_kl"] / step.sums["tokens"] for step in steps]
    assert found["rounded"][0] > 10 * found["plain"][0]  # more than bfloat16 costs
    assert found["rounded"][-1] < 0.5 * found["rounded"][0]
