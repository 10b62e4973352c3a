"""REINFORCE++: no critic and no groups; what scales the advantages is the whole batch.

The advantage of a token is what is paid from it on, less the divergence of these tokens from the reference
(k1, in the reward), with mean 0 and variance 1 over the sampled tokens of the batch. The loss is PPO's
clipped surrogate. The paper's baseline form takes the mean of a group first: `reinforce_plus_plus_baseline`.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="reinforce_plus_plus",
    title="REINFORCE with returns of tokens, whitened over the batch",
    paper="https://arxiv.org/abs/2501.03262",
    settings={
        "advantage": {"name": "token_returns", "gamma": 1.0, "whiten": True},
        "loss": {"name": "clip"},
        "kl": {"estimator": "k1", "placement": "reward"},
    },
)
