"""Simulated seconds of transfers whose seconds have a formula."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from refit_links import Links, broadcast_seconds, simulate

from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout, SenderLayout
from nemorl.weights.plan import Bucket, TransferPlan, plan_transfers

# 10 bytes a second between machines, 40 within one, and nothing else takes time.
LINKS = Links(
    nic_rate=10.0,
    nvlink_rate=40.0,
    copy_rate=float("inf"),
    nic_latency_seconds=0.0,
    nvlink_latency_seconds=0.0,
    bucket_seconds=0.0,
)


def plan_of(ways: Iterable[tuple[int, ...]], num_senders: int, num_bytes: int = 100) -> TransferPlan:
    """Buckets by the ranks that have them, senders first; each is a round."""
    return TransferPlan(
        tuple(
            Bucket(
                way[0], tuple(rank - num_senders for rank in way[1:]), "float32", num_bytes, (), (), number
            )
            for number, way in enumerate(ways)
        )
    )


def seconds(
    ways: Iterable[tuple[int, ...]], nodes: Iterable[str], links: Links = LINKS, num_senders: int = 1
) -> float:
    """Of buckets of 100 bytes, 10 s on a NIC."""
    return simulate(plan_of(ways, num_senders), list(nodes), num_senders, links).seconds


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
    assert seconds(ways, nodes, LINKS, senders) == pytest.approx(10 * 4 * senders)


def test_pairs_do_not_disturb_each_other() -> None:
    assert seconds([(0, 2), (1, 3)] * 4, "abcd", LINKS, 2) == pytest.approx(40)


def test_ranks_that_share_a_nic_share_its_rate() -> None:
    pairs = [(0, 2), (1, 3)] * 4
    shared = replace(LINKS, ranks_per_nic=2)
    assert seconds(pairs, "aabb", LINKS, 2) == pytest.approx(40)
    assert seconds(pairs, "aabb", shared, 2) == pytest.approx(80)
    assert seconds(pairs, "aaab", shared, 2) == pytest.approx(40)  # rank 0 sends by NVLink


def test_a_receiver_waits_for_the_first_bucket_of_its_part() -> None:
    """Rank 3 takes sender 0's bucket first, which travels at half the rate; sender 1 waits meanwhile."""
    assert seconds([(0, 2), (0, 3), (1, 3)], "abcd", LINKS, 2) == pytest.approx(20 + 10)


def test_bytes_are_counted_by_link() -> None:
    found = simulate(plan_of([(0, 1, 2), (0, 2)], 1), "abb", 1, LINKS)
    assert (found.nic_bytes_out, found.nic_bytes_in) == ([200, 0, 0], [0, 100, 100])
    assert found.nvlink_bytes == 100
    assert max(found.seconds_of_ranks) == found.seconds


def test_a_real_plan_for_two_machines() -> None:
    """Everything (8 buckets of 100 bytes) from 4 senders to 4 receivers on two machines, 2 on each.

    Four rounds of two buckets; each receiver takes one by its NIC (10 s) and one by NVLink (2.5 s).
    The second machine begins once a bucket has passed both receivers of the first one.
    """
    everything = (TensorSlice.whole("w", (8, 25)),)
    senders = [SenderLayout(everything, f"policy {rank}") for rank in range(4)]
    receivers = [ReceiverLayout(everything, ("float32",), f"engine {rank // 2}") for rank in range(4)]
    plan = plan_transfers(senders, receivers, 100)
    found = simulate(plan, [layout.node for layout in (*senders, *receivers)], 4, LINKS)
    assert found.nic_bytes_in[4:] == [400] * 4
    assert found.seconds == pytest.approx(5 * 12.5)


def test_a_broadcast_takes_the_bytes_and_the_depth_of_its_trees() -> None:
    links = replace(LINKS, bucket_seconds=1.0)
    # 5 buckets of 100 bytes with a second for each; 8 receivers below the root are 4 levels
    assert broadcast_seconds(500, 8, 100, links) == pytest.approx(5 * 11 + 4 * 11)
