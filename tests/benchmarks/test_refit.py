"""The refit benchmark: both sides hand over the same weights, by every way that it measures."""

from pathlib import Path

from refit import GATHER, Case, measure_ways
from refit_models import DENSE, shape_of
from refit_ranks import TRANSPORTS, Ranks

from nemorl.config.policy import LayoutConfig


def test_every_way_brings_the_same_weights(tmp_path: Path) -> None:
    shape = shape_of(
        DENSE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    )
    policy, engines = Ranks(1), Ranks(1)
    try:  # raises if the sums over the weights differ
        rows = measure_ways(
            Case("small", shape, LayoutConfig(), [LayoutConfig()]), policy, engines, tmp_path, rounds=1
        )
    finally:
        policy.stop()
        engines.stop()
    assert [row["way"] for row in rows] == [GATHER, *TRANSPORTS]
