"""Simulated seconds of transfers whose seconds have a formula."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from refit_links import Links, Route, broadcast_seconds, routes_of, simulate

from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout, SenderLayout
from nemorl.weights.plan import plan_transfers

# 10 bytes a second between machines, 40 within one, and nothing else takes time.
LINKS = Links(
    nic_rate=10.0,
    nvlink_rate=40.0,
    copy_rate=float("inf"),
    nic_latency_seconds=0.0,
    nvlink_latency_seconds=0.0,
    bucket_seconds=0.0,
)


def seconds(ways: Iterable[tuple[int, ...]], nodes: Iterable[str], links: Links = LINKS) -> float:
    """Of buckets of 100 bytes, 10 s on a NIC."""
    return simulate([Route(way, 100) for way in ways], list(nodes), links).seconds


def test_one_sender_and_one_receiver_take_bytes_over_the_rate() -> None:
    assert seconds([(0, 1)] * 5, "ab") == pytest.approx(50)
    assert seconds([(0, 1)] * 5, "aa") == pytest.approx(12.5)


def test_latency_and_message_cost_add_to_each_bucket() -> None:
    """A receiver asks for the next bucket when it has this one."""
    links = replace(LINKS, nic_latency_seconds=1.0, bucket_seconds=2.0)
    assert seconds([(0, 1)] * 5, "ab", links) == pytest.approx(5 * 13)


def test_copies_overlap_with_the_way_of_other_buckets() -> None:
    """The first is packed (4 s) before, and the last copied after the buckets' way."""
    assert seconds([(0, 1)] * 5, "ab", replace(LINKS, copy_rate=25.0)) == pytest.approx(4 + 50 + 4)
    # slower copies than links: two slots, each packed and emptied in 20 s
    assert seconds([(0, 1)] * 5, "ab", replace(LINKS, copy_rate=5.0)) == pytest.approx(20 * 5 + 10 + 20)


@pytest.mark.parametrize("receivers", [1, 2, 7])
def test_a_sender_of_different_buckets_is_the_bottleneck(receivers: int) -> None:
    ways = [(0, 1 + number % receivers) for number in range(4 * receivers)]
    assert seconds(ways, "abcdefgh") == pytest.approx(10 * 4 * receivers)


@pytest.mark.parametrize(("receivers", "buckets"), [(1, 3), (4, 1), (4, 6), (15, 20)])
def test_a_chain_is_a_pipeline(receivers: int, buckets: int) -> None:
    chain = tuple(range(receivers + 1))
    assert seconds([chain] * buckets, map(str, chain)) == pytest.approx(10 * (receivers - 1 + buckets))


@pytest.mark.parametrize("senders", [1, 3, 8])
def test_many_senders_to_one_receiver_take_its_rate(senders: int) -> None:
    ways = [(number % senders, senders) for number in range(4 * senders)]
    nodes = map(str, range(senders + 1))
    assert seconds(ways, nodes) == pytest.approx(10 * 4 * senders)


def test_pairs_do_not_disturb_each_other() -> None:
    assert seconds([(0, 2), (1, 3)] * 4, "abcd") == pytest.approx(40)


def test_ranks_that_share_a_nic_share_its_rate() -> None:
    pairs = [(0, 2), (1, 3)] * 4
    assert seconds(pairs, "aabb") == pytest.approx(40)
    assert seconds(pairs, "aabb", replace(LINKS, ranks_per_nic=2)) == pytest.approx(80)
    assert seconds(pairs, "aaab", replace(LINKS, ranks_per_nic=2)) == pytest.approx(40)  # 0 to 2 by NVLink


def test_a_receiver_waits_for_the_first_bucket_of_its_part() -> None:
    """Rank 3 takes sender 0's bucket first, which that sends after another one; sender 1 waits meanwhile."""
    ways = [(0, 2), (0, 3), (1, 3)]
    # both buckets of sender 0 travel at once, each at half the rate
    assert seconds(ways, "abcd") == pytest.approx(20 + 10)


def test_bytes_are_counted_by_link() -> None:
    found = simulate([Route((0, 1, 2), 100), Route((0, 2), 30)], "abb", LINKS)
    assert (found.nic_bytes_out, found.nic_bytes_in) == ([130, 0, 0], [0, 100, 30])
    assert found.nvlink_bytes == 100
    assert max(found.seconds_of_ranks) == found.seconds


def test_routes_are_those_of_the_plan() -> None:
    """Two receivers of everything from two senders: each bucket goes along a chain."""
    everything = (TensorSlice.whole("w", (8, 8)),)
    plan = plan_transfers([SenderLayout(everything)] * 2, [ReceiverLayout(everything, ("float32",))] * 2, 64)
    assert routes_of(plan, 2) == [Route((0, 2, 3), 64), Route((1, 3, 2), 64)] * 2


def test_a_broadcast_takes_the_bytes_and_the_depth_of_its_trees() -> None:
    links = replace(LINKS, bucket_seconds=1.0)
    # 5 buckets of 100 bytes with a second for each; 8 receivers below the root are 4 levels
    assert broadcast_seconds(500, 8, 100, links) == pytest.approx(5 * 11 + 4 * 11)
