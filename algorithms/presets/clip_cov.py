"""Clip-Cov: a few tokens whose logprob and advantage go together most are left out, to keep the entropy up.

    cov_t = (log p_t - mean) (A_t - mean) over all tokens of an update
    of the tokens with covariance_low <= cov_t <= covariance_high at most `fraction`, drawn, have loss 0;
    the others PPO's clipped surrogate

The change of the entropy in a step is minus the covariance of logprob and advantage, which a small share of
tokens makes up. The paper takes a fraction of 2e-4 between 1 and 5: one token of an update at least, where
any lies there.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="clip_cov",
    title="Covariance clipping against entropy collapse",
    paper="https://arxiv.org/abs/2505.22617",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "clip_cov", "fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
    },
)
