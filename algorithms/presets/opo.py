"""OPO: of all baselines of a group, the one whose gradient has the least variance.

    b = sum of l_i r_i / sum of l_i, with l the sampled tokens of a trajectory
    A = r - b
    loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

It follows where the gradient's square norm grows with the length of an answer. Exactly on-policy: one update
of each batch, no clipping, no divergence, no entropy bonus, no standard deviation.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="opo",
    title="On-policy RL with the optimal baseline",
    paper="https://arxiv.org/abs/2505.23585",
    settings={
        "advantage": {"name": "opo"},
        "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
    },
)
