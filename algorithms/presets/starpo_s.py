"""StarPO-S (RAGEN): for conversations of several turns, only the groups whose rewards vary most train.

    U(task) = standard deviation of the rewards of its group
    of a batch train the `filters.keep_most_varied` of its groups with the largest U

Tasks that always fail or always succeed add noise that lets agents collapse into one way of answering. As
here, the paper raises the upper clip bound and has no divergence from a reference. It does the same with PPO:
take the advantage `gae` or `bi_level_gae` and a critic.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="starpo_s",
    title="Agents on the most uncertain tasks",
    paper="https://arxiv.org/abs/2504.20073",
    settings={
        "advantage": {"name": "group"},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "filters": {"keep_most_varied": 0.25},
    },
)
