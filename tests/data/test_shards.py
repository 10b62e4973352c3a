"""What the driver decided about sequences, as data-parallel ranks get it."""

import pytest

from nemorl.data.shards import BatchPlan, SequencePlace

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
