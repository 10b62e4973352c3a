"""VAPO: PPO for long chains of thought.

The critic learns the returns as they came (lambda 1), which carries the reward back over thousands of tokens;
the policy's lambda grows with the length l of a trajectory, `1 - 1 / (alpha l)`. The critic learns alone
before the policy does (value pre-training: `critic.warmup_steps` with lambda 1). The upper bound of the clip
is higher, and every token counts alike. The mean negative logprob of the tokens of right answers is added to
the loss, weighed by 0.1; `likelihood.min_reward` says what is right. The paper takes 50 steps of
pre-training, groups of 16, and rates of 1e-6 for the policy and 2e-6 for the critic.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="vapo",
    title="Value-based augmented PPO",
    paper="https://arxiv.org/abs/2504.05118",
    settings={
        "advantage": {"name": "gae", "gamma": 1.0, "length_adaptive_alpha": 0.05, "critic_lam": 1.0},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
        "likelihood": {"coefficient": 0.1},
        "critic": {"value_clip": 0.2, "warmup_steps": 50},
    },
)
