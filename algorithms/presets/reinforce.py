"""REINFORCE: the logprob of each trajectory, weighed by how much better it was paid than the batch.

    A = r - mean of r over the batch
    loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning". It
wants no groups: `num_generations_per_prompt` may be 1. Tasks that differ in difficulty make its variance
large; `advantage.normalization: whiten` also divides by the standard deviation of the batch.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="reinforce",
    title="REINFORCE with the batch as the baseline",
    paper="https://doi.org/10.1007/BF00992696",
    settings={
        "advantage": {"name": "reinforce", "normalization": "mean"},
        "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
    },
)
