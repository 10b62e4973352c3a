"""Losses that look at whole sequences, or at all tokens of an update, under layouts that split these."""

from dataclasses import replace

import pytest
import torch

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import (
    KLConfig,
    NoCorrectionConfig,
    SequenceMaskConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.algorithm.losses import (
    CispoLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    KlCovLossConfig,
    ReinforceLossConfig,
    SapoLossConfig,
)
from nemorl.data.packed import PackedBatch, with_likelihood
from tests.megatron.cases import updates
from tests.megatron.examples import layout, policy_config, ragged_batch, reference_logprobs

KL = KLConfig(coefficient=0.05, importance_weighted=True)
BY_SEQUENCE = TruncatedCorrectionConfig(
    name="tis",
    level="sequence",
    high=1.5,
    sequence_mask=SequenceMaskConfig(low=0.9, high=1.1),
    divisor="kept",
)
LOSSES = (
    PolicyLoss(ClipLossConfig(), KL),  # so that the others see ratios other than 1
    PolicyLoss(GspoLossConfig(name="gspo", clip_low=0.02, clip_high=0.03), KL, BY_SEQUENCE),
    PolicyLoss(
        GspoTokenLossConfig(name="gspo_token", clip_low=0.02, clip_high=0.03),
        KL,
        NoCorrectionConfig(form="bypass", off_policy_threshold=0.05),
    ),
    PolicyLoss(GmpoLossConfig(name="gmpo", clip_low=0.1, clip_high=0.1)),
    PolicyLoss(ClipCovLossConfig(name="clip_cov", fraction=0.2, covariance_low=0, covariance_high=2)),
    PolicyLoss(KlCovLossConfig(name="kl_cov", fraction=0.2)),
    PolicyLoss(ClipLossConfig(top_entropy_quantile=0.3), KL, likelihood_coefficient=0.5),
    PolicyLoss(CispoLossConfig(name="cispo", clip_low=0.1, clip_high=0.1), KL),
    PolicyLoss(SapoLossConfig(name="sapo")),
    PolicyLoss(ReinforceLossConfig(name="reinforce"), KL),
)


@pytest.fixture(scope="module")
def batch(model) -> PackedBatch:
    """Sampled by an engine that is a little off, with advantages of both signs."""
    sampled = ragged_batch()
    noise = torch.Generator().manual_seed(2)
    engine = reference_logprobs(model("llama")[0], sampled)
    engine = engine + 0.15 * torch.randn(sampled.num_tokens, generator=noise)
    advantages = torch.randn(sampled.num_sequences, generator=noise) + 0.3
    imitated = [0.05 * (advantage > 0.5) for advantage in advantages.tolist()]
    return replace(
        with_likelihood(sampled, imitated),
        logprobs=engine * sampled.loss_mask,
        advantages=advantages.repeat_interleave(torch.diff(sampled.cu_seqlens)),
    )


@pytest.fixture(scope="module")
def alone(pool, model, batch):
    config = policy_config(model("llama")[1], layout=layout())
    (steps,) = pool.run(1, updates, config, batch, 8, LOSSES)
    return steps


@pytest.mark.parametrize(
    "where",
    [layout(cp=2, tp=2, sp=True), layout(cp=2, dp=2), layout(pp=2, dp=2)],
    ids=lambda where: where.name,
)
def test_updates_equal_one_process(pool, model, batch, alone, where):
    config = policy_config(model("llama")[1], layout=where)
    for steps in pool.run(where.world_size, updates, config, batch, 2, LOSSES):
        for mine, its in zip(steps, alone, strict=True):
            assert mine.sums == pytest.approx(its.sums, rel=2e-4, abs=2e-5)
            assert mine.maxima == pytest.approx(its.maxima, rel=1e-3)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-3)


def test_all_parts_have_something_to_do(alone):
    """Or the layouts would agree on nothing."""
    clip, gspo, gspo_token, gmpo, clip_cov, kl_cov, by_entropy, cispo, sapo, reinforce = (
        step.sums for step in alone
    )
    tokens = clip["tokens"]
    assert 0 < gspo["correction/masked_sequences"] < tokens
    assert 0 < gspo["correction/truncated"] < tokens
    assert 0 < gspo_token["correction/masked_off_policy"] < tokens
    for sums in (gspo, gspo_token, gmpo, cispo):
        assert 0 < sums["clip_fraction/high"] + sums["clip_fraction/low"] < tokens
    assert clip_cov["selected_fraction"] == kl_cov["selected_fraction"] == int(0.2 * tokens)
    assert by_entropy["top_entropy_fraction"] == 1 + int(0.3 * (tokens - 1))
    assert by_entropy["loss/likelihood"] > 0
    assert sapo["ratio/mean"] != tokens
    assert reinforce["loss/policy"] != 0
