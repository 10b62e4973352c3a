"""GRPO: a group's own mean is the baseline, so no critic is needed.

    A = (r - mean of the group) / (std of the group + epsilon), the same for all tokens of a trajectory
    loss of a token: -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t = p_t / p_old,t

The loss is PPO's clipped surrogate; the divergence from the reference, where `kl.coefficient` asks for one,
is added to it. The paper averages over the tokens of a sequence and then over sequences; here the default is
the mean over all tokens of the batch, as DAPO and most later work have it.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="grpo",
    title="Group relative policy optimisation",
    paper="https://arxiv.org/abs/2402.03300",
    settings={"advantage": {"name": "group", "normalize": True}, "loss": {"name": "clip"}},
)
