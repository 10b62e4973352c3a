"""ReMax: what the policy gets with its most likely answer is what is to be expected.

    A = r - r of a greedy sample of the same task
    loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

One sample more is taken of each task, at temperature 0; it is paid and does not train, and its mean reward is
the figure `reward/of_greedy`. `num_generations_per_prompt: 1` is the paper's.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="remax",
    title="REINFORCE, a greedy answer as the baseline",
    paper="https://arxiv.org/abs/2310.10505",
    settings={
        "advantage": {"name": "remax"},
        "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
    },
)
