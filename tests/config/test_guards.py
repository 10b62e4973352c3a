"""What users get wrong in the limits of updates."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.load import load_experiment
from tests.config.experiments import refuses, write

SFT = "algorithm={name: sft, num_steps: 10, batch_size: 8}"
WRONG: dict[str, tuple[list[str], str, Any, str]] = {
    "limits that exclude each other": (
        ["policy.guards.loss={min_value: 2, max_value: 1}"],
        "policy.guards.loss.min_value",
        2.0,
        "it must be less than max_value, 1",
    ),
    "a change without deviations": (
        ["policy.guards.entropy={max_value: 3, min_change: 0.5}"],
        "policy.guards.entropy.min_change",
        0.5,
        "max_deviations is not given; set it",
    ),
    "an action without a limit": (
        ["policy.guards.grad_norm.action=count"],
        "policy.guards.grad_norm.action",
        "count",
        "there is no limit",
    ),
    "a window of nothing": (
        ["policy.guards={window: 32, grad_norm: {max_value: 9}}"],
        "policy.guards.window",
        32,
        "no quantity has max_deviations",
    ),
    "a warm-up longer than the window": (
        ["policy.guards={window: 8, warmup: 9, grad_norm: {max_deviations: 9}}"],
        "policy.guards.warmup",
        9,
        "set it to at most window, 8",
    ),
    "the entropy of SFT": (
        [SFT, "policy.guards.entropy.max_value=3"],
        "policy.guards.entropy",
        {"max_value": 3.0},
        "the updates of `sft` do not compute it",
    ),
    "the logprob gap of the best of n": (
        ["algorithm.name=rejection_sampling", "policy.guards.logprob_gap.max_value=3"],
        "policy.guards.logprob_gap",
        {"max_value": 3.0},
        "the updates of `rejection_sampling` do not compute it",
    ),
    "a return without checkpoints": (
        ["policy.guards.max_rollbacks=2", "checkpointing.enabled=false"],
        "policy.guards.max_rollbacks",
        2,
        "checkpointing.enabled is false",
    ),
    "the entropy of a critic": (
        ["algorithm.name=ppo", "critic.guards.entropy.max_value=3"],
        "critic.guards.entropy",
        {"max_value": 3},
        "unknown field",
    ),
}


@pytest.mark.parametrize(("overrides", "field", "value", "fix"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused(tmp_path: Path, overrides: list[str], field: str, value: Any, fix: str) -> None:
    refuses(write(tmp_path), overrides, field, value, fix)


def test_policy_and_critic_have_limits_of_their_own(tmp_path: Path) -> None:
    overrides = ["algorithm.name=ppo", "policy.guards.loss.max_value=1", "critic.guards.loss.max_value=9"]
    experiment = load_experiment(write(tmp_path), overrides)
    assert experiment.critic is not None
    critic = experiment.critic.worker_config(experiment.policy)
    assert critic.guards.loss.max_value == 9
    assert load_experiment(write(tmp_path), []).policy.guards.limits == {}
