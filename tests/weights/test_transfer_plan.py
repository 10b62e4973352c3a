"""Every needed element comes once, from a holder, whatever the layouts of both sides."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import PolicyRank, hf_tensors, policy_rank, policy_slices
from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout, SenderLayout
from nemorl.weights.plan import (
    Box,
    Bucket,
    TransferPlan,
    UnservedBox,
    difference,
    intersection,
    plan_files,
    plan_transfers,
    split,
)
from tests.weights.layouts import Case, cases, many_ranks, part, plan_of, whole
from tests.weights.ranks import SHAPE


def elements(part: TensorSlice) -> list[tuple[tuple[int, ...], int]]:
    """Brute force: each element's place in the HF tensor, and in the holder's parameter."""
    return [
        (
            tuple(s + i for s, i in zip(part.start, index, strict=True)),
            part.offset + sum(i * stride for i, stride in zip(index, part.strides, strict=True)),
        )
        for index in itertools.product(*map(range, part.size))
    ]


def held(slices: list[TensorSlice]) -> set[tuple[str, tuple[int, ...], str, int]]:
    return {(s.name, place, s.param, offset) for s in slices for place, offset in elements(s)}


def transfers(bucket: Bucket) -> Iterator[tuple[int, TensorSlice, TensorSlice]]:
    """Each box for each receiver, as its sender and as that receiver hold it."""
    assert len(set(bucket.receivers)) == len(bucket.receivers)
    for receiver, targets in zip(bucket.receivers, bucket.targets, strict=True):
        for source, target in zip(bucket.sources, targets, strict=True):
            yield receiver, source, target


def sent_bytes(plan: TransferPlan, num_senders: int) -> list[int]:
    sent = [0] * num_senders
    for bucket in plan.buckets:
        sent[bucket.sender] += bucket.num_bytes
    return sent


@settings(max_examples=200, deadline=None)
@given(case=cases(), bucket_elements=st.integers(1, 50))
def test_every_needed_element_is_delivered_exactly_once(case: Case, bucket_elements: int) -> None:
    plan = plan_of(case.senders, case.receivers, bucket_bytes=4 * bucket_elements)
    delivered: list[Counter[tuple[str, tuple[int, ...], str, int]]] = [Counter() for _ in case.receivers]
    senders = [held(slices) for slices in case.senders]
    for bucket in plan.buckets:
        assert 0 < bucket.num_bytes <= 4 * bucket_elements
        for receiver, source, target in transfers(bucket):
            assert (source.name, source.start, source.size) == (target.name, target.start, target.size)
            assert held([source]) <= senders[bucket.sender]
            delivered[receiver].update(list(held([target])))
    for rank, slices in enumerate(case.receivers):
        assert delivered[rank] == Counter(held(slices))


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_the_plan_is_deterministic(case: Case) -> None:
    assert plan_of(case.senders, case.receivers, 64) == plan_of(case.senders, case.receivers, 64)


@settings(max_examples=50, deadline=None)
@given(case=cases(), copies=st.integers(2, 4), bucket_elements=st.integers(1, 20))
def test_copies_share_the_load(case: Case, copies: int, bucket_elements: int) -> None:
    """Where all senders hold everything, none sends more than another by more than one bucket."""
    everything = [whole(name, shape) for name, shape in case.tensors.items()]
    plan = plan_of([everything] * copies, case.receivers, 4 * bucket_elements)
    sent = sent_bytes(plan, copies)
    assert max(sent) - min(sent) <= 4 * bucket_elements


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=many_ranks(), bucket_elements=st.integers(1, 50), machines=st.integers(1, 8))
def test_hundreds_of_ranks_get_every_element_once_and_from_their_own_machine(
    case: Case, bucket_elements: int, machines: int
) -> None:
    def node(rank: int) -> str:
        return f"node {rank % machines}"

    plan = plan_of(
        case.senders,
        case.receivers,
        4 * bucket_elements,
        node_of_sender=node,
        node_of_receiver=node,
    )
    needed = [sum(part.num_elements for part in slices) for slices in case.receivers]
    delivered: list[Counter[tuple[str, int]]] = [Counter() for _ in case.receivers]
    for bucket in plan.buckets:
        for receiver, _, target in transfers(bucket):
            places = [(target.param, offset) for _, offset in elements(target)]
            delivered[receiver].update(places)
        for receiver in bucket.receivers:
            same_machine = case.senders[receiver % machines :: machines]
            if any(slices is case.senders[bucket.sender] for slices in same_machine):
                assert bucket.sender % machines == receiver % machines
    for rank, count in enumerate(needed):
        assert delivered[rank].total() == len(delivered[rank]) == count


def test_holders_without_a_choice_are_spared() -> None:
    """Sender 0 alone holds `a`; so `b`, which both hold, comes from sender 1, though requested first."""
    a, b = whole("a", (10,)), whole("b", (10,))
    plan = plan_of([[b, a], [b]], [[b, a]], bucket_bytes=1000)
    assert {source.name: bucket.sender for bucket in plan.buckets for source in bucket.sources} == {
        "a": 0,
        "b": 1,
    }


@settings(max_examples=100, deadline=None)
@given(case=cases(), bucket_elements=st.integers(1, 20))
def test_both_sides_see_the_same_buckets_in_the_same_order(case: Case, bucket_elements: int) -> None:
    plan = plan_of(case.senders, case.receivers, 4 * bucket_elements)
    senders = plan.sender_parts(len(case.senders))
    receivers = plan.receiver_parts(len(case.receivers))
    for sender, receiver in itertools.product(range(len(senders)), range(len(receivers))):
        outgoing = [b for b in senders[sender].buckets if receiver in b.receivers]
        incoming = [b for b in receivers[receiver].buckets if b.sender == sender]
        assert len(outgoing) == len(incoming)
        for sent, received in zip(outgoing, incoming, strict=True):
            assert [(s.name, s.start) for s in sent.slices] == [(s.name, s.start) for s in received.slices]


@pytest.mark.parametrize("passed_on", [False, True])
@settings(max_examples=60, deadline=None)
@given(case=cases(), bucket_elements=st.integers(1, 20))
def test_two_slots_per_rank_never_deadlock(passed_on: bool, case: Case, bucket_elements: int) -> None:
    """Play both protocols: a rank is at most two buckets ahead; all that can move do, until the end."""
    plan = plan_of(case.senders, case.receivers, 4 * bucket_elements)
    ways = [[("sender", b.sender), *(("receiver", r) for r in b.receivers)] for b in plan.buckets]
    todo: dict[tuple[str, int], list[int]] = {}
    for number, way in enumerate(ways):
        todo.setdefault(way[0], []).append(number)
    for number, place in plan.takes():
        todo.setdefault(ways[number][1 + place], []).append(number)
    here: set[tuple[tuple[str, int], int]] = set()  # who has, or had, which bucket

    def gone(member: tuple[str, int], number: int) -> bool:
        after = ways[number][ways[number].index(member) + 1 :]
        wanted_by = after[:1] if passed_on else after if member[0] == "sender" else []
        return (member, number) in here and all((other, number) in here for other in wanted_by)

    moved = True
    while moved:
        moved = False
        for member, numbers in todo.items():
            done = sum((member, number) in here for number in numbers)
            if done == len(numbers) or (done >= 2 and not gone(member, numbers[done - 2])):
                continue
            way = ways[numbers[done]]
            before = way[way.index(member) - 1] if passed_on else way[0]
            if member[0] == "sender" or (before, numbers[done]) in here:
                here.add((member, numbers[done]))
                moved = True
    assert len(here) == sum(map(len, todo.values()))


@settings(max_examples=60, deadline=None)
@given(case=cases(), bucket_elements=st.integers(1, 20), machines=st.integers(1, 3))
def test_a_round_has_other_senders_and_another_receiver_at_each_place(
    case: Case, bucket_elements: int, machines: int
) -> None:
    """This rules out deadlocks, and buckets of one sender that a receiver takes in another order."""
    plan = plan_of(
        case.senders, case.receivers, 4 * bucket_elements, node_of_receiver=lambda rank: str(rank % machines)
    )
    for _, found in itertools.groupby(plan.buckets, lambda bucket: bucket.round):
        buckets = list(found)
        assert len({bucket.sender for bucket in buckets}) == len(buckets)
        assert len({frozenset(bucket.receivers) for bucket in buckets}) == 1
        for receivers in zip(*(bucket.receivers for bucket in buckets), strict=True):
            assert len(set(receivers)) == len(buckets)
    assert [bucket.round for bucket in plan.buckets] == sorted(bucket.round for bucket in plan.buckets)


def test_receivers_of_a_machine_share_what_comes_from_others() -> None:
    """Two machines with two receivers each: half of the buckets enter a machine at each rank."""
    everything = [whole("w", (8, 8))]
    plan = plan_of(
        [everything] * 4,
        [everything] * 4,
        bucket_bytes=4 * 8,
        node_of_receiver=lambda rank: f"node {rank // 2}",
    )
    assert [bucket.receivers for bucket in plan.buckets] == [(0, 1, 2, 3), (1, 0, 3, 2)] * 4
    # each takes first what it is the first to get, and passes on what it got first while it takes the next
    taken: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for number, place in plan.takes():
        taken[plan.buckets[number].receivers[place]].append(number)
    assert [taken[rank][:4] for rank in range(4)] == [[0, 1, 2, 3], [1, 0, 3, 2]] * 2
    parts = plan.receiver_parts(4)
    assert [bucket.sender for bucket in parts[1].buckets] == [plan.buckets[n].sender for n in taken[1]]


def test_what_the_most_receivers_need_comes_first() -> None:
    """So all ranks pass it on at the same time; no replica waits for one that is busy with its experts."""
    senders = [[whole("experts", (2, 8)), whole("attention", (6,))]] * 2
    experts = [part("experts", (2, 8), (rank, 0), (1, 8), "p") for rank in range(2)]
    plan = plan_of(
        senders, [[expert, whole("attention", (6,))] for expert in experts] * 2, bucket_bytes=4 * 4
    )
    assert [len(bucket.receivers) for bucket in plan.buckets] == [4, 4, 2, 2, 2, 2]


def test_what_many_need_is_sent_once_for_sixteen() -> None:
    """Experts apart, attention for all: two replicas of 20 ranks."""
    attention = whole("attention", (100,))
    experts = [part("experts", (20, 10), (rank, 0), (1, 10), "p") for rank in range(20)]
    plan = plan_of(
        [[attention, whole("experts", (20, 10))]] * 3,
        [[attention, expert] for expert in experts] * 2,
        bucket_bytes=10_000,
        node_of_receiver=lambda rank: f"node {rank // 20}",
    )
    groups = Counter((bucket.sources[0].name, len(bucket.receivers)) for bucket in plan.buckets)
    assert groups == {("attention", 16): 2, ("attention", 8): 1, ("experts", 2): 20}
    assert plan.num_bytes == 4 * 40 * 110
    assert sum(bucket.num_bytes for bucket in plan.buckets) == 4 * (3 * 100 + 20 * 10)


def test_each_machine_is_served_by_its_own_holder() -> None:
    everything = [whole("w", (8,))]
    plan = plan_of(
        [everything] * 2,
        [everything] * 5,
        bucket_bytes=1000,
        node_of_sender=lambda rank: f"node {rank}",
        node_of_receiver=lambda rank: f"node {rank // 2}",
    )
    assert sorted((b.sender, sorted(b.receivers)) for b in plan.buckets) == [
        (0, [0, 1]),
        (0, [4]),
        (1, [2, 3]),
    ]


def test_a_transfer_larger_than_a_bucket_is_cut_along_its_rows() -> None:
    plan = plan_of([[whole("w", (10, 4))]], [[whole("w", (10, 4))]], bucket_bytes=2 * 12, dtype="bfloat16")
    boxes = [(target.start, target.size) for b in plan.buckets for _, _, target in transfers(b)]
    assert boxes == [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (3, 4)), ((9, 0), (1, 4))]


def test_each_sender_begins_with_another_receiver() -> None:
    everything = [whole("w", (8, 8))]
    plan = plan_of([everything] * 2, [everything] * 2, bucket_bytes=4 * 16)
    assert [bucket.receivers for bucket in plan.buckets] == [(0, 1), (1, 0)] * 2
    assert {bucket.sender for bucket in plan.buckets[:2]} == {0, 1}


def test_a_policy_of_any_layout_serves_whole_tensors_and_another_layout() -> None:
    """TP2 x PP2 with 2 copies of data parallelism to one whole engine and to a TP4 engine."""
    layout = LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    policy = [policy_slices(SHAPE, policy_rank(layout, rank)) for rank in range(8)]
    engine = [whole(name, shape) for name, shape in hf_tensors(SHAPE).items()]
    sharded = [policy_slices(SHAPE, PolicyRank(LayoutConfig(tensor_parallel_size=4), tp)) for tp in range(4)]
    plan = plan_of(policy, [engine, *sharded], bucket_bytes=4096, dtype="bfloat16")
    needed = [sum(s.num_elements for s in slices) for slices in (engine, *sharded)]
    assert plan.num_bytes == 2 * sum(needed)
    per_receiver = Counter(dict.fromkeys(range(5), 0))
    for bucket in plan.buckets:
        per_receiver.update(dict.fromkeys(bucket.receivers, bucket.num_bytes // 2))
    assert [per_receiver[rank] for rank in range(5)] == needed
    sent = sent_bytes(plan, len(policy))
    assert max(sent) - min(sent) <= 4096


def test_what_no_rank_holds_is_named() -> None:
    top = part("w", (4, 6), start=(0, 0), size=(2, 6), param="p")
    message = r"no sender holds w\[2:4, 0:6\], which receiver 1 needs"
    with pytest.raises(UnservedBox, match=message):
        plan_of([[top]], [[top], [whole("w", (4, 6))]], bucket_bytes=100)
    with pytest.raises(UnservedBox, match=r"no sender holds v\[0:3\], which receiver 0 needs"):
        plan_of([[top]], [[whole("v", (3,))]], bucket_bytes=100)


def test_different_shapes_of_one_tensor_are_named() -> None:
    message = r"w has shape \(4, 6\) at senders and \(5, 6\) at receiver 0"
    with pytest.raises(UnservedBox, match=message):
        plan_of([[whole("w", (4, 6))]], [[whole("w", (5, 6))]], bucket_bytes=100)


def test_a_bucket_holds_at_least_one_element() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 3, less than one element; set a larger value"):
        plan_of([[whole("w", (2,))]], [[whole("w", (2,))]], bucket_bytes=3)


boxes = (
    st.integers(1, 3)
    .flatmap(lambda rank: st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 5)) for _ in range(rank)]))
    .map(lambda spans: Box(tuple(s for s, _ in spans), tuple(n for _, n in spans)))
)


def points(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(s, s + n) for s, n in zip(box.start, box.size, strict=True))))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(box=boxes, max_elements=st.integers(1, 30))
def test_split_boxes_tile_the_box(box: Box, max_elements: int) -> None:
    pieces = list(split(box, max_elements))
    assert all(piece.num_elements <= max_elements for piece in pieces)
    assert [point for piece in pieces for point in points(piece)] == sorted(points(box))


def test_rows_that_fill_a_piece_are_not_cut() -> None:
    assert list(split(Box((2, 0), (3, 4)), 4)) == [Box((row, 0), (1, 4)) for row in (2, 3, 4)]
    assert list(split(Box((0, 1), (2, 4)), 3)) == [
        Box((row, first), (1, count)) for row in (0, 1) for first, count in ((1, 3), (4, 1))
    ]


def test_a_number_without_axes_is_one_piece() -> None:
    assert list(split(Box((), ()), 1)) == [Box((), ())]


def test_boxes_that_touch_share_nothing() -> None:
    assert intersection(Box((0, 0), (2, 3)), Box((2, 0), (1, 3))) is None
    assert intersection(Box((0, 0), (2, 3)), Box((1, 2), (4, 4))) == Box((1, 2), (1, 1))
    assert list(difference(Box((0,), (5,)), Box((0,), (2,)))) == [Box((2,), (3,))]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(box=boxes, data=st.data())
def test_difference_and_intersection_tile_the_box(box: Box, data: st.DataObject) -> None:
    other = Box(
        tuple(data.draw(st.integers(0, 6)) for _ in box.size),
        tuple(data.draw(st.integers(1, 6)) for _ in box.size),
    )
    shared = intersection(box, other)
    common = set(points(box)) & set(points(other))
    assert set(points(shared) if shared else ()) == common
    if shared:
        rest = [point for piece in difference(box, shared) for point in points(piece)]
        assert sorted(rest) == sorted(set(points(box)) - common)


def test_transfers_are_the_same_elements_on_both_sides() -> None:
    """A column shard of a [4, 6] tensor, out of a matrix stored row by row, into one stored transposed."""
    source = whole("w", (4, 6))
    target = TensorSlice("w", (4, 6), start=(0, 2), size=(4, 2), param="t", offset=5, strides=(1, 4))
    plan = plan_of([[source]], [[target]], bucket_bytes=100)
    expected = TensorSlice("w", (4, 6), start=(0, 2), size=(4, 2), param="w", offset=2, strides=(6, 1))
    assert list(transfers(plan.buckets[0])) == [(0, expected, target)]


def delivered_boxes(plan: TransferPlan) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Sender, start and size of each box, in the order of the buckets."""
    return [(b.sender, source.start, source.size) for b in plan.buckets for source in b.sources]


def test_the_largest_shares_are_taken_first_and_of_equal_ones_those_with_more_holders() -> None:
    """Four of six rows: from who has all six in one piece, and rather from the two who have five."""
    need = part("w", (6, 2), (0, 0), (4, 2), "p")
    rows = [part("w", (6, 2), (row, 0), (1, 2), f"row {row}") for row in range(6)]
    assert delivered_boxes(plan_of([rows, [whole("w", (6, 2))]], [[need]], 1000)) == [(1, (0, 0), (4, 2))]
    # A box that is held as it is needed comes from there, also one that just fills a bucket.
    for bucket_bytes in (1000, 4 * 8):
        plan = plan_of([[need], [whole("w", (6, 2))], [whole("w", (6, 2))]], [[need]], bucket_bytes)
        assert delivered_boxes(plan) == [(0, (0, 0), (4, 2))]
    five = part("w", (6, 2), (0, 0), (5, 2), "five")
    plan = plan_of([[whole("w", (6, 2))], [five], [five]], [[need]], 1000)
    assert delivered_boxes(plan) == [(1, (0, 0), (4, 2))]


def test_boxes_fill_a_bucket_to_its_last_byte() -> None:
    tensors = [whole(name, (10,)) for name in "abc"]
    plan = plan_of([tensors], [tensors], bucket_bytes=2 * 40)
    assert [[source.name for source in bucket.sources] for bucket in plan.buckets] == [["a", "b"], ["c"]]
    assert [bucket.num_bytes for bucket in plan.buckets] == [80, 40]


def test_each_receiver_gets_its_own_type() -> None:
    everything = (whole("w", (8,)),)
    receivers = [ReceiverLayout(everything, (dtype,), "") for dtype in ("float32", "bfloat16", "float32")]
    plan = plan_transfers([SenderLayout(everything, "")], receivers, 1000)
    assert sorted((b.dtype, sorted(b.receivers), b.num_bytes) for b in plan.buckets) == [
        ("bfloat16", [1], 16),
        ("float32", [0, 2], 32),
    ]
    assert plan.num_bytes == 16 + 2 * 32


def test_what_a_receiver_needs_twice_it_gets_twice() -> None:
    twice = [whole("w", (8,), "one"), whole("w", (8,), "other")]
    plan = plan_of([[whole("w", (8,))]], [twice], bucket_bytes=1000)
    assert [t.param for b in plan.buckets for _, _, t in transfers(b)] == ["one", "other"]


def test_files_have_each_tensor_in_every_type_that_is_needed() -> None:
    """Two receivers need a half each, one of them in another type as well."""
    upper, lower = (part("w", (4, 2), (row, 0), (2, 2), "p") for row in (0, 2))
    receivers = [
        ReceiverLayout((upper,), ("float32",), ""),
        ReceiverLayout((lower, lower), ("float32", "bfloat16"), ""),
    ]
    plan = plan_files([SenderLayout((upper,), ""), SenderLayout((lower,), "")], receivers, 1000)
    assert sorted((b.dtype, b.sender, b.receivers, b.num_bytes) for b in plan.buckets) == [
        ("bfloat16", 0, (0,), 8),
        ("bfloat16", 1, (0,), 8),
        ("float32", 0, (0,), 16),
        ("float32", 1, (0,), 16),
    ]


@settings(max_examples=200, deadline=None)
@given(case=cases(), bucket_elements=st.integers(1, 50), types=st.integers(1, 2))
def test_files_have_every_element_once_in_boxes_that_no_receiver_needs_in_part(
    case: Case, bucket_elements: int, types: int
) -> None:
    dtypes = ("float32", "bfloat16")[:types]
    senders = [SenderLayout(tuple(slices)) for slices in case.senders]
    receivers = [
        ReceiverLayout(tuple(slices), tuple(dtypes[(rank + i) % types] for i in range(len(slices))))
        for rank, slices in enumerate(case.receivers)
    ]
    plan = plan_files(senders, receivers, 4 * bucket_elements)
    boxes = [(bucket.dtype, source) for bucket in plan.buckets for source in bucket.sources]
    stored = Counter((dtype, box.name, place) for dtype, box in boxes for place, _ in elements(box))
    needs = [
        (dtype, s) for layout in receivers for s, dtype in zip(layout.slices, layout.dtypes, strict=True)
    ]
    assert stored == Counter(
        {
            (dtype, name, place)
            for dtype, name in {(d, s.name) for d, s in needs}
            for place in itertools.product(*map(range, case.tensors[name]))
        }
    )
    for layout in receivers:
        needed = {
            (dtype, s.name, place)
            for s, dtype in zip(layout.slices, layout.dtypes, strict=True)
            for place, _ in elements(s)
        }
        for dtype, box in boxes:
            inside = [(dtype, box.name, place) in needed for place, _ in elements(box)]
            assert all(inside) or not any(inside)


def files_of(receivers: Sequence[Sequence[TensorSlice]]) -> list[Box]:
    """Boxes that one sender of everything writes for these receivers."""
    tensors = {s.name: s.shape for slices in receivers for s in slices}
    sender = SenderLayout(tuple(whole(name, shape) for name, shape in tensors.items()))
    layouts = [ReceiverLayout(tuple(slices), ("float32",) * len(slices)) for slices in receivers]
    plan = plan_files([sender], layouts, 2**20)
    return [Box(source.start, source.size) for bucket in plan.buckets for source in bucket.sources]


def test_files_are_not_cut_within_the_share_of_a_receiver() -> None:
    """Two receivers have two of four blocks of rows each, as a fused qkv has them."""
    rows = [part("w", (8, 3), (2 * block, 0), (2, 3), "p", offset=100 * block) for block in range(4)]
    assert files_of([rows[:2], rows[2:]]) == [Box((0, 0), (4, 3)), Box((4, 0), (4, 3))]


def test_a_file_has_no_more_boxes_than_its_readers_can_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tensors divided among 16 receivers, the one that is divided by columns too is cut less."""
    monkeypatch.setattr("nemorl.weights.plan.MAX_STORED_BOXES", 60)
    rows = [[part(name, (16, 2), (rank, 0), (1, 2), name) for name in "ab"] for rank in range(16)]
    cells = [[part("c", (16, 2), (r, column), (1, 1), "c")] for r in range(16) for column in range(2)]
    sizes = Counter(box.size for box in files_of([*rows, *cells]))
    assert sizes == {(1, 2): 32, (2, 1): 16}


def test_senders_take_turns_and_begin_with_receivers_of_their_own() -> None:
    """Three senders with two buckets each for three receivers, which pass them on in a ring."""
    everything = [whole("w", (6, 4))]
    plan = plan_of([everything] * 3, [everything] * 3, bucket_bytes=4 * 4)
    assert [(bucket.sender, bucket.receivers) for bucket in plan.buckets] == [
        (0, (0, 1, 2)),
        (1, (1, 2, 0)),
        (2, (2, 0, 1)),
    ] * 2


def test_senders_of_one_receiver_each_reach_another_at_a_time() -> None:
    """Both senders have a tensor for each receiver alone: no receiver is the target of both at once."""
    halves = [part("w", (4, 4), (2 * rank, 0), (2, 4), "p") for rank in range(2)]
    columns = [part("w", (4, 4), (0, 2 * rank), (4, 2), "q") for rank in range(2)]
    plan = plan_of([[halves[0]], [halves[1]]], [[columns[0]], [columns[1]]], bucket_bytes=1000)
    assert [(bucket.sender, bucket.receivers) for bucket in plan.buckets] == [
        (0, (0,)),
        (1, (1,)),
        (1, (0,)),
        (0, (1,)),
    ]


def test_shapes_that_differ_among_senders_are_named() -> None:
    with pytest.raises(UnservedBox, match=r"w has shape \(5, 6\) at sender 1 and \(4, 6\) at another"):
        plan_of([[whole("w", (4, 6))], [whole("w", (5, 6))]], [[whole("w", (4, 6))]], bucket_bytes=100)
