"""The refit benchmark: both sides hand over the same weights, by every way that it measures."""

import json
from pathlib import Path

from refit import GATHER, SAVE, Case, measure_overlap, measure_stages, measure_ways, write_random
from refit_models import DENSE, shape_of
from refit_ranks import LESS_CHECKED, TRANSPORTS, Ranks

from nemorl.config.policy import LayoutConfig

SMALL = DENSE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}


def test_every_way_brings_the_same_weights(tmp_path: Path) -> None:
    shape = shape_of(SMALL)
    policy, engines = Ranks(1), Ranks(1)
    try:  # raises if the sums over the weights differ
        rows = measure_ways(
            Case("small", shape, LayoutConfig(), [LayoutConfig()]), policy, engines, tmp_path, rounds=1
        )
    finally:
        policy.stop()
        engines.stop()
    ways = *TRANSPORTS, *LESS_CHECKED
    assert [row["way"] for row in rows] == [GATHER, SAVE, *ways]
    assert [row["bytes_over_shards"] for row in rows[2:]] == [1.0] * len(ways)


def test_stages_are_those_of_an_update_of_the_embedded_engine(tmp_path: Path) -> None:
    write_random(shape_of(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    policy, engines = Ranks(1), Ranks(1)
    try:
        rows = measure_stages(policy, engines, tmp_path, rounds=2)
    finally:
        policy.stop()
        engines.stop()
    seconds = {row["stage"]: row["median_seconds"] for row in rows}
    assert {"send_pack", "receive_copy", "commit"} < seconds.keys()
    assert 0 < seconds["commit"] < seconds["update"]


def test_a_refit_is_measured_after_an_optimizer_step_and_during_it(tmp_path: Path) -> None:
    write_random(shape_of(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    policy, engines = Ranks(2), Ranks(1)
    try:
        rows = measure_overlap(policy, engines, tmp_path, 1, tmp_path)
    finally:
        policy.stop()
        engines.stop()
    alone, after, during = rows
    assert [row["way"] for row in rows] == ["refit alone", "after the step", "during the step"]
    assert alone["step_seconds"] == 0
    assert 0 < after["step_seconds"] < after["median_seconds"]
    assert during["step_seconds"] > 0
