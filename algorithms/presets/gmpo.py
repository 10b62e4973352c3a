"""GMPO: the geometric mean of clipped token ratios instead of the arithmetic one.

    loss of a sequence: -A exp(mean of x_t), averaged over sequences
    x_t = min(log r_t, clip_high) if A > 0, else max(log r_t, -clip_low)

A single outlier moves the geometric mean little, so the bounds can be wide: the paper takes (e^-0.4, e^0.4),
here in logarithms. Clipping is of tokens; one that is clipped leaves the others their gradient.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="gmpo",
    title="Geometric mean policy optimisation",
    paper="https://arxiv.org/abs/2507.20673",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-mean"},
    },
)
