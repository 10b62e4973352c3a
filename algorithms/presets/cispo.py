"""CISPO: the ratio is a weight without gradient, and clipping bounds the weight; no token loses its gradient.

    loss of a token: -sg[min(r_t, 1 + clip_high)] A log p_t, averaged over all tokens

PPO drops the gradient of tokens whose ratio left its bounds, often rare ones at turns of a reasoning, such as
"However". The paper tunes the upper bound, without giving its value, and has neither a lower one nor a
divergence from a reference; 1 + clip_high is 5 here, as ART has it.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="cispo",
    title="Clipped importance sampling weights (MiniMax-M1)",
    paper="https://arxiv.org/abs/2506.13585",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "cispo", "clip_high": 4.0, "aggregation": "token-mean"},
    },
)
