"""DAPO: GRPO for long answers, with four changes.

    clip-higher:       the ratio may rise to 1 + 0.28 and fall to 1 - 0.2, so that rare tokens can grow
    token mean:        every token of the batch weighs the same, in long answers too
    dynamic sampling:  groups of equal rewards are dropped, and others sampled in their place
    overlong answers:  left out of training, or punished softly near the limit

There is no divergence from a reference. `filters.refill.max_batches` bounds dynamic sampling. Where a penalty
of length is among the rewards, give `filters.reward` the reward that says right or wrong, which the paper's
constraint is about. The last change is left to the experiment: `filters.drop_truncated`, or a reward for
overlong answers. The paper makes 16 updates of a step of 512 prompts with 16 generations.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="dapo",
    title="Decoupled clip and dynamic sampling",
    paper="https://arxiv.org/abs/2503.14476",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
        "filters": {"drop_equal_rewards": True, "refill": {"max_batches": 10}},
    },
)
