"""SAPO: a sigmoid gate takes the place of clipping, so the gradient fades instead of breaking off.

    loss of a token: -(4 / t) sigmoid(t (r_t - 1)) A, averaged over tokens and then over sequences

with the temperature t of the advantage's sign. It is larger for negative advantages, 1.05 beside 1.0: these
push up all the tokens that were not sampled, which is where training loses its balance.
"""

from nemorl.config.algorithm.presets import Preset

PRESET = Preset(
    name="sapo",
    title="Soft adaptive policy optimisation",
    paper="https://arxiv.org/abs/2511.20347",
    settings={
        "advantage": {"name": "group"},
        "loss": {
            "name": "sapo",
            "temperature_positive": 1.0,
            "temperature_negative": 1.05,
            "aggregation": "seq-mean-token-mean",
        },
    },
)
