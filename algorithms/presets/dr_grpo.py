"""Dr. GRPO: two divisors of GRPO are left out, because both bend the gradient.

    A = r - mean of the group
    loss: sum over the tokens of a sequence / aggregation_length, averaged over sequences

Without the division by the standard deviation, tasks that are nearly always or nearly never solved do not
weigh more than others; with a fixed length in place of a sequence's own, long wrong answers are not spared.
`loss.aggregation_length` must be given, usually as generation.max_new_tokens; it scales the learning rate.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="dr_grpo",
    title="GRPO done right: no bias by length or by difficulty",
    paper="https://arxiv.org/abs/2503.20783",
    settings={
        "advantage": {"name": "group", "normalize": False},
        "loss": {"name": "clip", "aggregation": "seq-mean-token-sum-norm"},
    },
)
