"""REINFORCE++-baseline: the group says what to expect, the batch how much a difference counts.

    A' = r - mean of the group
    A = (A' - mean of A') / (std of A' + epsilon), mean and std over all sampled tokens of the batch

GRPO divides by the deviation of single groups, which is noisy where groups are small and weighs their tasks
by it; that of the batch is the same for all. The loss is PPO's clipped surrogate. The paper adds a divergence
in the loss: `kl: {coefficient: 0.001, estimator: k2}`.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="reinforce_plus_plus_baseline",
    title="REINFORCE++ with the mean of a group as the baseline",
    paper="https://arxiv.org/abs/2501.03262",
    settings={"advantage": {"name": "group_then_batch", "over": "tokens"}, "loss": {"name": "clip"}},
)
