"""NeMo-RL's PPO: what its keys become, and its formulas, written token by token in Python floats."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.policy_losses import ValueLoss
from nemorl.algorithms.token_advantages import TokenEstimator
from nemorl.config.algorithm.advantages import GaeConfig
from nemorl.config.algorithm.losses import CriticLearningConfig
from nemorl.importing.document import PROJECTS, import_values
from tests.algorithms.test_token_advantages import batch_of
from tests.importing.contexts import GRPO, OPTIONS, PPO

SEQUENCES = ((3, 7), (2, 1), (4, 5))  # a prompt and an answer each


def imported(values: dict[str, Any]) -> dict[str, Any]:
    return import_values(PROJECTS["nemo-rl"], values, OPTIONS).tree


def one_rank(values: Tensor) -> Tensor:
    return values


def peers_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one answer: `delta + gamma lam A` from its last token on, after which nothing is expected."""
    advantages, later, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        later = rewards[t] + gamma * following - values[t] + gamma * lam * later
        advantages[t], following = later, values[t]
    return advantages


ESTIMATORS: dict[str, dict[str, Any]] = {
    "plain": {"gae_lambda": 0.9, "gae_gamma": 0.98},
    "decoupled": {"gae_lambda": 0.95, "gae_lambda_value": 1.0, "gae_lambda_policy": 0.8},
    "by length": {"gae_lambda": 0.95, "length_adaptive_alpha": 0.4, "gae_lambda_policy": 0.8},
    "not whitened": {"gae_lambda": 0.9, "normalize_advantages": False},
}


@pytest.mark.parametrize("case", ESTIMATORS)
def test_advantages_and_returns_are_those_of_the_peer(case: str) -> None:
    given = ESTIMATORS[case]
    section = imported(PPO | {f"ppo.adv_estimator.{name}": value for name, value in given.items()})
    batch = batch_of(SEQUENCES)
    found = TokenEstimator(GaeConfig(**section["algorithm"]["advantage"]), None)(batch, one_rank)
    assert found.returns is not None

    lam, gamma = given["gae_lambda"], given.get("gae_gamma", 1.0)
    advantages, returns, start = [], [], 0
    for prompt, answer in SEQUENCES:
        first, start = start + prompt, start + prompt + answer
        # The peer shifts the critic's outputs to the right by one.
        values = batch.values[first - 1 : start - 1].double().tolist()  # type: ignore[index]
        rewards = batch.rewards[first:start].double().tolist()  # type: ignore[index]
        of_policy = given.get("gae_lambda_policy", lam)
        if alpha := given.get("length_adaptive_alpha", 0.0):
            of_policy = 1 - 1 / max(alpha * answer, 1.0)
        advantages += peers_gae(rewards, values, gamma, of_policy)
        learned = peers_gae(rewards, values, gamma, given.get("gae_lambda_value", lam))
        returns += [a + v for a, v in zip(learned, values, strict=True)]
    if given.get("normalize_advantages", True):
        mean = sum(advantages) / len(advantages)
        variance = sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
        advantages = [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages]
    places = batch.loss_mask
    assert found.advantages[places].tolist() == pytest.approx(advantages, abs=1e-6, rel=1e-6)
    assert found.returns[places].tolist() == pytest.approx(returns, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize(("clip", "scale"), [(0.2, 0.4), (None, 1.5)])
def test_the_value_loss_is_the_peers(clip: float | None, scale: float) -> None:
    """`0.5 scale` times the mean over sampled tokens of the larger squared error."""
    section = imported(PPO | {"value_loss_fn.cliprange": clip, "value_loss_fn.scale": scale})
    plain = batch_of(SEQUENCES)
    returns = torch.randn(plain.num_tokens, generator=torch.Generator().manual_seed(1))
    batch = replace(plain, weights=plain.loss_mask.double() / plain.loss_mask.sum(), returns=returns)
    now = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2)).double()
    config = CriticLearningConfig(**section["algorithm"]["critic"])
    total = 0.0
    places = batch.loss_mask.nonzero().squeeze(1).tolist()
    for i in places:
        value, old, target = now[i - 1].item(), batch.values[i - 1].item(), batch.returns[i].item()  # type: ignore[index]
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (min(max(value, old - clip), old + clip) - target) ** 2)
        total += error
    loss = ValueLoss(config)(batch, now, None).loss
    assert loss.item() == pytest.approx(0.5 * scale * total / len(places), rel=1e-6)


def test_what_is_added_to_all_rewards_is_a_reward() -> None:
    """From 0 and 1 to -1 and 1: the critic learns what is added, and baselines of groups subtract it."""
    scaled = {"enabled": True, "target_min": -1.0}
    of_ppo = imported(PPO | {f"ppo.reward_scaling.{name}": value for name, value in scaled.items()})
    assert of_ppo["env"]["weight"] == 2.0
    assert of_ppo["rewards"] == [{"function": "constant", "weight": -1.0}]
    of_grpo = imported(GRPO | {f"grpo.reward_scaling.{name}": value for name, value in scaled.items()})
    assert of_grpo["env"]["weight"] == 2.0
    assert "rewards" not in of_grpo


def test_rewards_without_a_critic() -> None:
    found = imported(PPO | {"ppo.adv_estimator.name": "raw_reward"})
    scaled = {"name": "reinforce", "over": "tokens", "variance": "biased"}
    assert found["algorithm"]["advantage"] == scaled
    assert "critic" not in found
    plain = {"ppo.adv_estimator.name": "raw_reward", "ppo.adv_estimator.normalize_advantages": False}
    assert imported(PPO | plain)["algorithm"]["advantage"] == {"name": "reinforce", "normalization": "none"}


def test_schedules_count_passes_over_the_batch() -> None:
    """Four optimizer steps in a pass: 10 of its ticks are 40 of ours, of the policy and of the critic."""
    warmup = {
        f"{model}.megatron_cfg.{name}": value
        for model in ("policy", "value")
        for name, value in (("enabled", True), ("scheduler.lr_warmup_iters", 10))
    }
    minibatches = {"policy.train_global_batch_size": 16, "value.train_global_batch_size": 16}
    found = imported(PPO | warmup | minibatches)
    assert found["policy"]["schedule"]["warmup_steps"] == 40
    assert found["critic"]["schedule"]["warmup_steps"] == 40
    one = imported(PPO | warmup)
    assert one["policy"]["schedule"]["warmup_steps"] == 10
