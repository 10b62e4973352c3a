"""KL-Cov: the tokens whose logprob and advantage go together most are held near the old policy.

    cov_t = (log p_t - mean) (A_t - mean) over all tokens of an update
    loss of a token: -r_t A_t, plus coefficient |log p_t - log p_old,t| for the `fraction` of highest cov_t

It keeps the entropy higher than Clip-Cov in the paper, which takes fractions of 2e-3 (7B) and 2e-4 (32B) with
coefficient 1. The hold is felt from the second update of a step on, so it wants minibatches: 8 here.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="kl_cov",
    title="Covariance-held tokens against entropy collapse",
    paper="https://arxiv.org/abs/2505.22617",
    settings={
        "num_minibatches": 8,
        "advantage": {"name": "group"},
        "loss": {"name": "kl_cov", "fraction": 2e-3, "coefficient": 1.0},
    },
)
