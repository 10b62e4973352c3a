"""PPO: a critic says what may still be expected, so that every token has an advantage of its own.

`A[t] = delta[t] + gamma lambda A[t + 1]` with `delta[t] = r[t] + gamma V[t + 1] - V[t]`, whitened over the
batch; the policy learns with the clipped surrogate, the critic the returns `A + V` with clipped values. The
divergence from the reference, where `kl.coefficient` asks for one, is taken from each token's reward (k1), as
in InstructGPT. Usual: the critic's rate some times the policy's, two to four minibatches, one epoch.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="ppo",
    title="Proximal policy optimisation with a critic",
    paper="https://arxiv.org/abs/1707.06347",
    settings={
        "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
        "kl": {"estimator": "k1", "placement": "reward"},
        "critic": {"value_clip": 0.2},
    },
)
