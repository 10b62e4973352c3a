"""GDPO: several rewards, each compared within its group before they are summed.

    A' = sum over rewards k of weight_k (r_k - mean_k of the group) / (std_k of the group + epsilon)
    A = (A' - mean of A') / (std of A' + epsilon) over the trajectories of the batch

GRPO normalises the sum, in which different mixtures of rewards can look alike, and a reward with a large
spread hides the others. Weights are those of `rewards` and `env`. GRPO's way, to sum and then normalise, is
the advantage `group`; without the last line (`advantage.whiten_batch: false`) normalise and then sum.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="gdpo",
    title="Rewards normalised by themselves",
    paper="https://arxiv.org/abs/2601.05242",
    settings={"advantage": {"name": "gdpo"}, "loss": {"name": "clip"}},
)
