"""GSPO: the unit of the ratio, and of clipping, is the sequence, as the reward's is.

    s = (p(y) / p_old(y))^(1/|y|) = exp(mean of log p_t - log p_old,t)
    loss of a sequence: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), averaged over sequences

Ratios of single tokens are noisy, most of all where experts are routed anew after each update; their
geometric mean is not. It varies far less, hence the narrow bounds 3e-4 and 4e-4. The paper makes four
minibatches of a step and has no divergence from a reference.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="gspo",
    title="Group sequence policy optimisation",
    paper="https://arxiv.org/abs/2507.18071",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    },
)
