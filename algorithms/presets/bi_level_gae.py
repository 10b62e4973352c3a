"""Bi-level GAE: advantages of turns, carried back to the tokens inside each turn.

GAE over turns, with what each was paid and a discount of its own, gives the last token of a turn its
advantage; GAE over tokens runs from there to the turn's first token. Rewards of turns are not diluted by the
hundreds of tokens between them. Recommended: a discount over turns of 0.95 or less where early turns should
matter less for late rewards, and 1 over tokens.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="bi_level_gae",
    title="PPO with GAE over turns and over their tokens",
    paper="https://arxiv.org/abs/2510.16907",
    settings={
        "advantage": {
            "name": "bi_level_gae",
            "gamma": 1.0,
            "lam": 1.0,
            "turn_gamma": 0.95,
            "turn_lam": 1.0,
        },
        "loss": {"name": "clip"},
        "kl": {"estimator": "k1", "placement": "reward"},
        "critic": {"value_clip": 0.2},
    },
)
