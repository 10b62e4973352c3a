"""Turn-level PPO: a whole turn is one action of the policy, with one advantage for all its tokens.

GAE over turns: the reward of a turn is what was paid for it, its value that of the state in which its first
token is chosen. For environments of many turns that pay each of them, where credit belongs to what was done
and not to single words.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="turn_gae",
    title="PPO over turns",
    paper="https://arxiv.org/abs/1506.02438",
    settings={
        "advantage": {"name": "turn_gae", "gamma": 1.0, "lam": 0.95},
        "loss": {"name": "clip"},
        "kl": {"estimator": "k1", "placement": "reward"},
        "critic": {"value_clip": 0.2},
    },
)
