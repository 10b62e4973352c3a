"""What the driver decided about sequences, as data-parallel ranks get it."""

from pathlib import Path

import pytest

from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.data.packed import Compared
from nemorl.data.shards import BatchPlan, SequencePlace, plan_sequences

PLAN = BatchPlan(ranks=[[2, 0], [1]], minibatches=[])


def test_each_rank_gets_the_places_of_its_sequences() -> None:
    places = [
        SequencePlace(f"store-{number % 2}", number, 5, weight=number / 4, likelihood=number / 8)
        for number in range(3)
    ]
    first, second = PLAN.shards(places)
    assert first.stores == ("store-0",)
    assert first.places == ((0, 2), (0, 0))
    assert (first.weights, first.likelihood) == ((0.5, 0.0), (0.25, 0.0))
    assert (second.weights, second.likelihood, second.rewards) == ((0.25,), (0.125,), None)


@pytest.mark.parametrize(("field", "value"), [("likelihood", 0.5), ("rewards", (1.0,))])
def test_what_some_sequences_of_a_rank_lack_is_refused(field: str, value: object) -> None:
    places = [SequencePlace("store", row, 5, **({field: value} if row else {})) for row in range(3)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1 of 2 sequences of a shard are .*: all or none"):
        PLAN.shards(places)


def test_rows_of_another_number_of_sequences_are_refused() -> None:
    assert PLAN.in_order([["c", "a"], ["b"]]) == ["a", "b", "c"]
    with pytest.raises(ValueError):
        PLAN.in_order([["c"], ["b"]])
    with pytest.raises(ValueError):
        PLAN.column(["store of rank 0"])


@pytest.mark.parametrize(
    ("stages", "runs", "micro_batches"), [(1, 1, 1), (3, 1, 1), (3, 2, 3), (2, 2, 2), (2, 3, 2)]
)
def test_interleaved_stages_get_a_micro_batch_for_each_stage(
    stages: int, runs: int, micro_batches: int
) -> None:
    """Six short sequences, which fit into one micro-batch."""
    layout = LayoutConfig(pipeline_parallel_size=stages, virtual_pipeline_parallel_size=runs)
    config = PolicyConfig(model_path=Path("model"), micro_batch_tokens=100, layout=layout)
    plan = plan_sequences([SequencePlace("store", row, 5) for row in range(6)], config, 64, 1, 1)
    assert [len(of_rank) for of_rank in plan.micro_batches] == [micro_batches]


def test_compared_sequences_share_a_micro_batch_and_others_do_not() -> None:
    """A pair fills a micro-batch; its number, 2, is also the place of a sequence of no pair."""
    config = PolicyConfig(model_path=Path("model"), micro_batch_tokens=10)
    alone = [SequencePlace("store", row, size) for row, size in enumerate((5, 8))]
    pair = [SequencePlace("store", row, 5, compared=Compared(unit=2)) for row in (2, 3)]
    plan = plan_sequences([*alone, *pair], config, 64, 1, 1)
    (batches,) = plan.micro_batches
    held = [sorted(plan.ranks[0][place] for place in batch) for batch in batches]
    assert sorted(held) == [[0], [1], [2, 3]]
