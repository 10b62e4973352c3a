"""RLOO: the baseline of a trajectory is the mean reward of the others, which leaves the gradient unbiased.

    A_i = r_i - mean of r_j over j != i
    loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

A whole answer is one action, so there is no ratio and nothing is clipped. The paper has two or four
generations of a prompt, and takes the divergence from the reference out of the reward.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="rloo",
    title="REINFORCE, the others of the group as the baseline",
    paper="https://arxiv.org/abs/2402.14740",
    settings={
        "advantage": {"name": "group", "normalize": False, "leave_one_out": True},
        "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
    },
)
