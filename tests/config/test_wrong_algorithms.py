"""What users get wrong in advantages, filters and losses: refusals name the field, the value and the fix."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.load import load_experiment
from tests.config.experiments import refuses

ALONE = "algorithm.num_generations_per_prompt=1"
AGENT = ["data.chat=true", "env={name: calculator}", "rewards=[]"]
TWO_REWARDS = "env.name=math"
LOUD = "env.turn_flags={loud: {texts: ['!']}}"

WRONG: dict[str, tuple[list[str], str, Any, str]] = {
    "an advantage nobody knows": (
        ["algorithm.advantage={name: grpo}"],
        "algorithm.advantage.name",
        "grpo",
        "`group`",
    ),
    "a setting of another advantage": (
        ["algorithm.advantage={name: opo, normalize: false}"],
        "algorithm.advantage.normalize",
        False,
        "this field belongs to `group`, `gpg`, `gdpo`, `turn`",
    ),
    "a number that is true": (
        ["algorithm.max_staleness=true"],
        "algorithm.max_staleness",
        "true",
        "expected an integer",
    ),
    "a number or nothing that is true": (
        ["algorithm.group_seconds=true"],
        "algorithm.group_seconds",
        "true",
        "expected a number",
    ),
    "groups of one": (
        ["algorithm.name=opo", ALONE],
        "algorithm.num_generations_per_prompt",
        1,
        "a trajectory alone in its group has advantage 0",
    ),
    "tokens of groups of one": (
        ["algorithm.name=otb", ALONE],
        "algorithm.num_generations_per_prompt",
        1,
        "a trajectory alone in its group has no baseline; set it to 2 or more, or use `token_returns`",
    ),
    "probabilities that the engine does not give": (
        ["algorithm.name=otb", "algorithm.correction={form: bypass}"],
        "algorithm.correction.form",
        "bypass",
        "`otb` takes probabilities of the old policy",
    ),
    "a ratio of sequences with advantages of tokens": (
        ["algorithm.name=otb", "algorithm.loss={name: gspo}"],
        "algorithm.loss.name",
        "gspo",
        "`otb` has several advantages in a sequence",
    ),
    "a mean of no weights": (
        ["algorithm.correction={normalize: true}"],
        "algorithm.correction.normalize",
        True,
        "there are no weights; remove this, or use `tis`",
    ),
    "a mean of weights that a ratio has": (
        ["algorithm.correction={name: mis, form: bypass, normalize: true}"],
        "algorithm.correction.normalize",
        True,
        "in the bypass form the ratio of `clip` weighs tokens; remove this",
    ),
    "experts of two passes": (
        ["policy.moe={router_replay: true, update_replay: true}", "algorithm.num_minibatches=2"],
        "policy.moe.update_replay",
        True,
        "with router_replay all passes have the experts of sampling; remove one of the two",
    ),
    "experts of a pass that is not made": (
        ["policy.moe={update_replay: true}"],
        "policy.moe.update_replay",
        True,
        "no pass for old logprobs chooses experts",
    ),
    "experts of a pass with the weights of the update": (
        ["policy.moe={update_replay: true}", "algorithm.name=otb"],
        "policy.moe.update_replay",
        True,
        "the only update of a step has the weights of that pass; raise algorithm.num_minibatches",
    ),
    "a likelihood that counts nothing": (
        ["algorithm.likelihood={min_reward: 0.5}"],
        "algorithm.likelihood.min_reward",
        0.5,
        "algorithm.likelihood.coefficient is 0, so nothing is imitated",
    ),
    "no tokens at all": (
        ["algorithm.loss.top_entropy_quantile=0"],
        "algorithm.loss.top_entropy_quantile",
        0,
        "a value more than 0",
    ),
    "an epsilon of groups that are not scaled": (
        ["algorithm.advantage={name: gpg, epsilon: 1e-3}"],
        "algorithm.advantage.epsilon",
        1e-3,
        "algorithm.advantage.normalize is false",
    ),
    "an epsilon of a batch that is not scaled": (
        ["algorithm.advantage={name: reinforce, normalization: mean, epsilon: 1e-3}"],
        "algorithm.advantage.epsilon",
        1e-3,
        "use `whiten`, or remove this",
    ),
    "a mean that is not taken": (
        ["algorithm.advantage={name: reinforce, normalization: none, over: tokens}"],
        "algorithm.advantage.over",
        "tokens",
        "algorithm.advantage.normalization is `none`, so no mean is computed",
    ),
    "sets as large as the group": (
        ["algorithm.name=pass_at_k", "algorithm.advantage.k=8"],
        "algorithm.advantage.k",
        8,
        "in a group of 8 all sets of it have the same reward; use less",
    ),
    "one reward to keep apart": (
        ["algorithm.name=gdpo"],
        "algorithm.advantage.name",
        "gdpo",
        "it normalizes several rewards, and there is only `exact_match`; add one, or use `group`",
    ),
    "a divergence that nobody looks at": (
        ["algorithm.name=pass_at_k", "algorithm.kl={coefficient: 0.01, estimator: k1, placement: reward}"],
        "algorithm.kl.placement",
        "reward",
        "set it to loss, or use another advantage",
    ),
    "branches compared by single rewards": (
        [*AGENT, "algorithm.name=pass_at_k", "algorithm.compares=branches"],
        "algorithm.compares",
        "branches",
        "`pass_at_k` does not compare the sums of rewards of branches; remove this, or use the advantage",
    ),
    "a divergence of what is left out": (
        [
            "algorithm.kl={coefficient: 0.01, estimator: k1, placement: reward}",
            "algorithm.filters.drop_truncated=true",
        ],
        "algorithm.filters.drop_truncated",
        True,
        "dropped trajectories have no divergence for their reward",
    ),
    "branches of conversations with one turn": (
        ["algorithm.compares=branches"],
        "algorithm.compares",
        "branches",
        "conversations in `single_turn` have one turn, so one branch; remove this, or use another env",
    ),
    "an advantage of a flag that nobody sets": (
        [LOUD, "algorithm.flagged_advantages={lout: -1.0}"],
        "algorithm.flagged_advantages.lout",
        -1.0,
        "no environment has this flag in its turn_flags; did you mean `loud`?",
    ),
    "flags of turns whose tokens have advantages": (
        ["algorithm.name=ppo", LOUD, "algorithm.flagged_advantages={loud: -1.0}"],
        "algorithm.flagged_advantages",
        {"loud": -1.0},
        "those of `gae` are of tokens, which flags do not change; remove this, or use the advantage `group`",
    ),
    "flags of turns in a loss of sequences": (
        ["algorithm.loss.name=gspo", LOUD, "algorithm.flagged_advantages={loud: -1.0}"],
        "algorithm.loss.name",
        "gspo",
        "flagged_advantages has several advantages in a sequence; use `gspo_token` or `clip`",
    ),
    "a flag without texts": (
        ["env.turn_flags={loud: {texts: []}}"],
        "env.turn_flags.loud.texts",
        [],
        "at least 1",
    ),
    "turns of conversations with one": (
        ["algorithm.name=mt_grpo"],
        "algorithm.advantage.name",
        "turn",
        "conversations in `single_turn` have one turn; use another env, or the advantage `group`",
    ),
    "turns that nobody pays": (
        [*AGENT, "algorithm.name=mt_grpo"],
        "algorithm.advantage.name",
        "turn",
        "no turn before the last has a reward; set env.call_weight, or use the advantage `group`",
    ),
    "no slips": (
        ["data.train.slips=[]"],
        "data.train.slips",
        [],
        "expected a list with a length of at least 1: Errors of wrong answers, drawn with equal",
    ),
    "a slip that is none": (
        ["data.train.slips=[1, -200]"],
        "data.train.slips.1",
        -200,
        "an answer with this error is right, since answers are modulo 200; use another",
    ),
    "a chain of sums from what is none": (
        [
            "data.train={name: reasoning_gym, task: chain_sum}",
            "env={name: chained_sums}",
            "rewards=[]",
            "algorithm.name=mt_grpo",
        ],
        "data.train.name",
        "reasoning_gym",
        "the environment `chained_sums` supports `arithmetic` datasets only; change one",
    ),
    "a function that is no path": (
        ["algorithm.advantage={name: custom, function: centred}"],
        "algorithm.advantage.function",
        "centred",
        "invalid format: `package.module:function`.",
    ),
    "others in place of no group": (
        ["algorithm.filters={refill: {max_batches: 3}}"],
        "algorithm.filters.refill",
        {"max_batches": 3, "at_cap": "fewer"},
        "set one of drop_equal_rewards, min_mean_reward or max_mean_reward, or remove this",
    ),
    "one batch for dropped groups": (
        ["algorithm.filters={drop_equal_rewards: true, refill: {max_batches: 1}}"],
        "algorithm.filters.refill.max_batches",
        1,
        "at least 2",
    ),
    "a reward that drops nothing": (
        ["algorithm.filters.reward=exact_match"],
        "algorithm.filters.reward",
        "exact_match",
        "no group is dropped by it",
    ),
    "a reward misspelled": (
        ["algorithm.filters={drop_equal_rewards: true, reward: exact_macth}"],
        "algorithm.filters.reward",
        "exact_macth",
        "did you mean `exact_match`?",
    ),
    "bounds the wrong way round": (
        ["algorithm.filters={min_mean_reward: 0.8, max_mean_reward: 0.2}"],
        "algorithm.filters.min_mean_reward",
        0.8,
        "no group would be left; set it to at most algorithm.filters.max_mean_reward, 0.2",
    ),
    "rewards of one that differ": (
        ["algorithm.name=reinforce", "algorithm.filters.drop_equal_rewards=true", ALONE],
        "algorithm.filters.drop_equal_rewards",
        True,
        "in a group of one all rewards are equal",
    ),
    "groups of one that vary": (
        ["algorithm.name=remax", "algorithm.filters.keep_most_varied=0.5", ALONE],
        "algorithm.filters.keep_most_varied",
        0.5,
        "in a group of one all rewards are equal",
    ),
    "all of the groups": (
        ["algorithm.filters.keep_most_varied=1.0"],
        "algorithm.filters.keep_most_varied",
        1.0,
        "less than 1",
    ),
}


@pytest.mark.parametrize(("overrides", "field", "value", "fix"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_field_value_and_fix(
    sound: Path, overrides: list[str], field: str, value: Any, fix: str
) -> None:
    refuses(sound, overrides, field, value, fix)


RIGHT: dict[str, list[str]] = {
    "several rewards": ["algorithm.name=gdpo", TWO_REWARDS],
    "a group of one against a greedy sample": ["algorithm.name=remax", ALONE],
    "turns that are paid": [*AGENT, "env.call_weight=0.1", "algorithm.name=mt_grpo"],
    "sums that are paid": ["env={name: chained_sums}", "rewards=[]", "algorithm.name=gdpo"],
    "a share of groups by one reward": ["algorithm.filters={keep_most_varied: 0.5, reward: exact_match}"],
    "tasks neither too hard nor too easy": [
        "algorithm.filters={min_mean_reward: 0.1, max_mean_reward: 0.9, refill: {at_cap: stop}}"
    ],
    "a best checkpoint by what is dropped": [
        "algorithm.name=dapo",
        "checkpointing={metric: filters/dropped_equal_rewards, higher_is_better: false}",
    ],
    "a best checkpoint by greedy samples": ["algorithm.name=remax", "checkpointing.metric=reward/of_greedy"],
}


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT.keys())
def test_it_is_taken(sound: Path, overrides: list[str]) -> None:
    load_experiment(sound, overrides)
