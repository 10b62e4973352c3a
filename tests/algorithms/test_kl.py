"""KL estimators: values by formula, gradients by formula and in expectation over a small vocabulary."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.objective import kl_divergence, kl_penalty
from nemorl.config.algorithm import KLConfig
from nemorl.config.algorithm.online import PRESETS

POLICY, REFERENCE = [-1.0, -0.2, -3.0, -0.5, -2.5], [-1.5, -0.1, -3.0, -2.9, -0.7]


def by_formula(estimator: str, logp: float, reference: float) -> float:
    ratio = math.exp(reference) / math.exp(logp)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[
        estimator
    ]


def config(**changes: Any) -> KLConfig:
    return KLConfig(coefficient=1.0, **changes)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values_and_gradients_equal_the_formulas(estimator: Any) -> None:
    policy = torch.tensor(POLICY, requires_grad=True)
    estimate = kl_divergence(policy, torch.tensor(REFERENCE), estimator)
    expected = [by_formula(estimator, p, q) for p, q in zip(POLICY, REFERENCE, strict=True)]
    assert estimate.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    differences = [p - q for p, q in zip(POLICY, REFERENCE, strict=True)]
    factors = {"k1": [1.0] * 5, "k2": differences, "k3": [1 - math.exp(-d) for d in differences]}
    assert gradient.tolist() == pytest.approx(factors[estimator], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator: Any) -> None:
    policy = torch.tensor(POLICY, requires_grad=True)
    penalty = kl_penalty(policy, torch.tensor(REFERENCE), config(estimator=estimator, straight_through=True))
    expected = [by_formula(estimator, p, q) for p, q in zip(POLICY, REFERENCE, strict=True)]
    assert penalty.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    assert gradient.tolist() == pytest.approx(
        [p - q for p, q in zip(POLICY, REFERENCE, strict=True)], abs=1e-6
    )


def test_estimates_are_clamped_where_asked() -> None:
    policy = torch.tensor(POLICY, requires_grad=True)
    penalty = kl_penalty(policy, torch.tensor(REFERENCE), config(estimator="k3", max_value=0.5))
    expected = [min(by_formula("k3", p, q), 0.5) for p, q in zip(POLICY, REFERENCE, strict=True)]
    assert penalty.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    assert [g == 0 for g in gradient.tolist()] == [e == 0.5 or e == 0 for e in expected]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampled_by", [None, "current"])
@pytest.mark.parametrize("bound", [0.3, 1.0, 20.0, None])
def test_log_ratios_are_clamped_before_the_estimate(
    estimator: Any, sampled_by: Any, bound: float | None
) -> None:
    """Beyond `max_log_ratio` the value is that of the bound, and there is no gradient; 30 is beyond 20."""
    given = {} if sampled_by is None else {"importance_weighted": True, "sampled_by": sampled_by}
    chosen = config(estimator=estimator, max_log_ratio=bound, **given)
    logprobs, references = [*POLICY, -1.0], [*REFERENCE, -31.0]
    policy = torch.tensor(logprobs, requires_grad=True)
    ratio = None if sampled_by is None else (policy - policy.detach()).exp()
    penalty = kl_penalty(policy, torch.tensor(references), chosen, ratio)
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    for p, q, value, slope in zip(logprobs, references, penalty.tolist(), gradient.tolist(), strict=True):
        limit = math.inf if bound is None else bound
        x, is_beyond = max(min(p - q, limit), -limit), abs(p - q) > limit
        expected = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]
        of_x = {"k1": 1.0, "k2": x, "k3": 1 - math.exp(-x)}[estimator]
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
        weighted = of_x + (expected if sampled_by else 0.0)
        assert slope == pytest.approx(0.0 if is_beyond else weighted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_clamped_tokens_have_no_gradient_of_k2_either(estimator: Any, weighted: bool) -> None:
    """`max_value` with `straight_through`: where the estimate is clamped the token teaches nothing."""
    policy = torch.tensor(POLICY, requires_grad=True)
    chosen = config(estimator=estimator, straight_through=True, max_value=0.45, importance_weighted=weighted)
    ratio = torch.full_like(policy, 2.0) if weighted else None
    penalty = kl_penalty(policy, torch.tensor(REFERENCE), chosen, ratio)
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    for p, q, value, slope in zip(POLICY, REFERENCE, penalty.tolist(), gradient.tolist(), strict=True):
        estimate, factor = by_formula(estimator, p, q), 2.0 if weighted else 1.0
        assert value == pytest.approx(factor * min(max(estimate, -0.45), 0.45), rel=1e-5, abs=1e-6)
        assert slope == pytest.approx(0.0 if abs(estimate) > 0.45 else factor * (p - q), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampled_by", ["current", "engine"])
def test_a_ratio_to_another_sampler_has_its_gradient(estimator: Any, sampled_by: Any) -> None:
    """`w e` with `w = p / s`: the gradient of the logprob is `w (e' + e)`; the product is clamped."""
    chosen = config(estimator=estimator, importance_weighted=True, sampled_by=sampled_by, max_value=2.0)
    policy = torch.tensor(POLICY, requires_grad=True)
    sampler = policy.detach() if sampled_by == "current" else torch.tensor([-1.2, -0.3, -2.0, -0.5, -2.6])
    penalty = kl_penalty(policy, torch.tensor(REFERENCE), chosen, (policy - sampler).exp())
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    rows = zip(POLICY, REFERENCE, sampler.tolist(), penalty.tolist(), gradient.tolist(), strict=True)
    for p, q, s, value, slope in rows:
        weight, estimate = math.exp(p - s), by_formula(estimator, p, q)
        of_estimate = {"k1": 1.0, "k2": p - q, "k3": 1 - math.exp(q - p)}[estimator]
        clamped = abs(weight * estimate) > 2
        assert value == pytest.approx(max(min(weight * estimate, 2), -2), rel=1e-5, abs=1e-6)
        assert slope == pytest.approx(0 if clamped else weight * (of_estimate + estimate), rel=1e-5, abs=1e-6)


# In expectation, over a vocabulary of four, as a function of the policy's logits

LOGITS = torch.tensor([0.3, -0.8, 1.1, 0.2], dtype=torch.float64)
OF_REFERENCE = torch.tensor([-0.4, 0.5, 0.9, -1.0], dtype=torch.float64).log_softmax(0)
OF_SAMPLER = torch.tensor([0.9, -0.2, 0.4, 0.6], dtype=torch.float64).log_softmax(0)


def expected_gradient(chosen: KLConfig, sampler: Tensor | None = None) -> Tensor:
    """Of the penalty's mean over tokens drawn by the sampler, or by the policy itself."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if sampler is None else sampler
    penalty = kl_penalty(logprobs, OF_REFERENCE, chosen, (logprobs - old).exp())
    (gradient,) = torch.autograd.grad((old.exp() * penalty).sum(), logits)
    return gradient


def gradient_of(divergence: str) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    p, q = logits.log_softmax(0), OF_REFERENCE
    exact = (p.exp() * (p - q)).sum() if divergence == "reverse" else (q.exp() * (q - p)).sum()
    (gradient,) = torch.autograd.grad(exact, logits)
    return gradient


def test_k1_in_a_loss_has_no_gradient_in_expectation() -> None:
    torch.testing.assert_close(expected_gradient(config(estimator="k1")), torch.zeros(4, dtype=torch.float64))


def test_k2_and_straight_through_have_the_gradient_of_the_divergence() -> None:
    exact = gradient_of("reverse")
    torch.testing.assert_close(expected_gradient(config(estimator="k2")), exact)
    for estimator in ("k1", "k3"):
        chosen = config(estimator=estimator, straight_through=True)
        torch.testing.assert_close(expected_gradient(chosen), exact)


def test_k3_has_the_gradient_of_the_other_divergence() -> None:
    torch.testing.assert_close(expected_gradient(config(estimator="k3")), gradient_of("forward"))


def reward_gradient(estimator: str) -> Tensor:
    """Of the mean penalty over the policy's own tokens, by the score function: a reward has no gradient."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    penalty = kl_penalty(logprobs, OF_REFERENCE, config(estimator=estimator)).detach()
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * penalty * logprobs).sum(), logits)
    return gradient


def test_in_the_reward_k1_alone_has_the_gradient_of_the_divergence() -> None:
    reverse, forward = gradient_of("reverse"), gradient_of("forward")
    torch.testing.assert_close(reward_gradient("k1"), reverse)
    torch.testing.assert_close(reward_gradient("k3"), reverse - forward)
    assert (reward_gradient("k2") - reverse).abs().max() > 0.02


@pytest.mark.parametrize("name", ["ppo", "turn_gae", "bi_level_gae", "reinforce_plus_plus"])
def test_presets_with_a_divergence_in_the_reward_take_k1(name: str) -> None:
    kl = PRESETS[name].settings["kl"]
    assert kl == {"estimator": "k1", "placement": "reward"}


@pytest.mark.parametrize(
    "chosen",
    [
        config(estimator="k1", importance_weighted=True),
        config(estimator="k2", importance_weighted=True),
        config(estimator="k3", importance_weighted=True),
        config(estimator="k3", importance_weighted=True, straight_through=True),
    ],
    ids=["k1", "k2", "k3", "k3, straight through"],
)
@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
def test_weighed_by_the_ratio_every_estimator_has_the_gradient_of_the_divergence(
    chosen: KLConfig, stale: bool
) -> None:
    gradient = expected_gradient(chosen, OF_SAMPLER if stale else None)
    torch.testing.assert_close(gradient, gradient_of("reverse"))


def test_stale_samples_bias_what_is_not_weighed() -> None:
    gradient = expected_gradient(config(estimator="k2"), OF_SAMPLER)
    assert (gradient - gradient_of("reverse")).abs().max() > 0.05


def test_divergence_of_engine_and_trainer() -> None:
    engine, trainer = torch.tensor([-1.0, -0.4]), torch.tensor([-1.2, -0.1])
    k1, k3 = (kl_divergence(engine, trainer, estimator) for estimator in ("k1", "k3"))
    assert k1.tolist() == pytest.approx([0.2, -0.3], abs=1e-6)
    assert k3.tolist() == pytest.approx([math.exp(-0.2) - 1 + 0.2, math.exp(0.3) - 1 - 0.3], rel=1e-5)
