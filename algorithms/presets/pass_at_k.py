"""Pass@k training: a trajectory is worth what it adds to the chance that one of k passes.

    R = 1 - C(n-, k) / C(n, k), s = sqrt(R (1 - R)), n- of the group's n trajectories do not pass
    A of one that passes: (1 - R) / s
    A of one that does not: (1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s

This is the mean of GRPO's advantage over all sets of k, each paid 1 where any of it passes. Groups that
mostly fail teach most, so the policy keeps trying different ways. A trajectory passes at
`advantage.pass_reward`; k must be less than the group.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="pass_at_k",
    title="Training on pass@k",
    paper="https://arxiv.org/abs/2508.10751",
    settings={"advantage": {"name": "pass_at_k", "k": 4}, "loss": {"name": "clip"}},
)
