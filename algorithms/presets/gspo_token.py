"""GSPO-token: GSPO's ratio with the gradient of each token, so that tokens may differ in their advantages.

    s_t = sg[s] p_t / sg[p_t]; loss of a token: -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

sg stops the gradient, s is GSPO's ratio of the sequence. With equal advantages in a sequence, loss and
gradient are GSPO's.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="gspo_token",
    title="GSPO with advantages of tokens",
    paper="https://arxiv.org/abs/2507.18071",
    settings={
        "advantage": {"name": "group"},
        "loss": {
            "name": "gspo_token",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "seq-mean-token-mean",
        },
    },
)
