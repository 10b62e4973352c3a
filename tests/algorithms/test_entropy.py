"""The weight of the entropy bonus, by hand."""

import pytest
import torch

from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import AdaptiveEntropyConfig, EntropyBonusConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from tests.algorithms.packed import current, ragged


def test_a_bonus_is_always_the_same() -> None:
    weight = EntropyWeight.of(EntropyBonusConfig(coefficient=0.02))
    assert weight.update(0.1) == {}
    assert weight.weight == 0.02


def test_the_weight_follows_the_target() -> None:
    config = AdaptiveEntropyConfig(
        name="adaptive", target=0.5, initial=0.01, change=0.02, max_coefficient=0.04
    )
    weight = EntropyWeight.of(config)
    heard = (0.4, 0.3, 0.3, 0.6, 0.5, 0.7, 0.8, 0.9, 0.4)
    used = [weight.update(entropy)["entropy/coefficient"] for entropy in heard]
    # 0.03 after the first, 0.04 at the limit, none above the target while it falls to 0, and up again
    assert used == pytest.approx([0.01, 0.03, 0.04, 0.04, 0, 0.02, 0, 0, 0])
    assert weight.weight == pytest.approx(0.02)


def test_a_weight_continues_from_what_a_checkpoint_keeps() -> None:
    config = AdaptiveEntropyConfig(name="adaptive", target=0.5)
    whole = EntropyWeight.of(config)
    for entropy in (0.4, 0.45, 0.6):
        whole.update(entropy)
    again = EntropyWeight.of(config, whole.coefficient, whole.entropy)
    assert again.weight == whole.weight == 0
    assert again.update(0.4) == whole.update(0.4)
    assert again.weight == whole.weight == pytest.approx(0.01)


def test_a_run_that_continues_with_another_setting_takes_it() -> None:
    assert EntropyWeight.of(EntropyBonusConfig(coefficient=0.02), 0.5, 0.1).weight == 0.02


def test_the_bonus_is_in_the_loss_with_the_weights_of_the_tokens() -> None:
    batch = ragged(0, "seq-mean-token-mean")
    logprobs, entropy = current(batch, 0), torch.rand(batch.num_tokens, requires_grad=True)
    plain = PolicyLoss(ClipLossConfig())(batch, logprobs, entropy).loss
    bonus = PolicyLoss(ClipLossConfig(), entropy_coefficient=0.3)(batch, logprobs, entropy)
    (gradient,) = torch.autograd.grad(bonus.loss, entropy)
    torch.testing.assert_close(gradient, -0.3 * batch.weights)
    torch.testing.assert_close(bonus.loss, plain - 0.3 * (batch.weights * entropy).sum())
    assert bonus.sums["loss/policy"] == pytest.approx(plain.item())


def test_a_skipped_update_does_not_change_the_weight() -> None:
    weight = EntropyWeight.of(AdaptiveEntropyConfig(name="adaptive", target=0.4), 0.1, 0.3)
    assert weight.update(float("nan")) == {"entropy/coefficient": 0.1}
    assert (weight.coefficient, weight.entropy) == (0.1, 0.3)
