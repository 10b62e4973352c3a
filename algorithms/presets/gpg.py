"""GPG: the plain policy gradient, scaled so that groups without a lesson do not shrink it.

    A = alpha (r - mean of the group), alpha = B / (B - M), M of the batch's B groups have equal rewards
    loss: -A log p, averaged over all tokens

No ratio, no clipping, no reference, no standard deviation. With `filters.drop_equal_rewards` and `refill`
there are no such groups, and alpha is 1: the paper's other way to the same end.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="gpg",
    title="Group policy gradient",
    paper="https://arxiv.org/abs/2504.02546",
    settings={"advantage": {"name": "gpg"}, "loss": {"name": "reinforce", "aggregation": "token-mean"}},
)
