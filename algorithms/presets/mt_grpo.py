"""MT-GRPO: in conversations of several turns, each turn is compared with the same turn of the others.

    A of turn k, before the last one: norm(what turn k was paid) + outcome_weight norm(outcome)
    A of the last turn:               norm(outcome)
    norm(x) = (x - mean) / (std + epsilon) over the group; the outcome is all else that was paid

So a useful call of a tool is not blamed for a wrong answer, nor a useless one praised for a right one. It
wants an environment that pays turns, such as `calculator` with `call_weight`, or `chained_sums`. With
`advantage.discount` a turn also earns what later turns are paid.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="mt_grpo",
    title="GRPO with an advantage for each turn",
    paper="https://arxiv.org/abs/2505.11821",
    settings={"advantage": {"name": "turn"}, "loss": {"name": "clip"}},
)
