"""GRPO: a group's own mean is the baseline, so no critic is needed.

The advantage of a trajectory is its reward against the others of its task, the same for all its tokens; the
loss is PPO's clipped surrogate per token. The paper averages over the tokens of a sequence and then over
sequences; here the default is the mean over all tokens of the batch, as DAPO and most later work have it.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="grpo",
    title="Group relative policy optimisation",
    paper="https://arxiv.org/abs/2402.03300",
    settings={"advantage": {"name": "group", "normalize": True}, "loss": {"name": "clip"}},
)
