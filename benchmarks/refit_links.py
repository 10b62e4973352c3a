"""Seconds of a weight transfer over a cluster's links, by simulation of its buckets.

Ranks follow the rules of nemorl/weights/process_group.py. A sender fills one of two slots while the other
travels. A receiver takes one bucket at a time, in the order of its part, and passes it on while the next one
arrives; a slot is free once its bucket has been copied into the weights and has left for the next receiver. A
bucket begins to travel when its sender has it and its receiver has asked for it, as with NCCL, whose buffers
are small compared with a bucket.

Bytes flow continuously. The buckets on a link share it equally, and each is as fast as the slower of its two
links. If every rank has a NIC of its own, this is the max-min fair share, since a receiver takes one bucket
at a time; ranks that share a NIC may leave some of it unused, so that their seconds are an upper bound.

The defaults are nominal rates of a DGX H100 (NVIDIA's datasheets of DGX H100 and H100, 2023): 8 GPUs, each
with a NIC of 400 Gb/s, NVLink of 900 GB/s for both directions together, and memory of 3.35 TB/s, of which a
copy reads half and writes half. Latencies are of the order of those that InfiniBand and NVLink have for small
messages. `bucket_seconds` is an assumption for two messages and the host's wait for the first one.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.weights.messages import SLOTS
from nemorl.weights.plan import TransferPlan


@dataclass(frozen=True)
class Links:
    """A cluster of equal machines; rates are in bytes per second and direction."""

    ranks_per_nic: int = 1
    nic_rate: float = 50e9
    nvlink_rate: float = 450e9  # of each rank, to all others of its machine together
    copy_rate: float = 1.675e12  # into a bucket, and from it into the weights
    nic_latency_seconds: float = 5e-6
    nvlink_latency_seconds: float = 2e-6
    bucket_seconds: float = 30e-6  # of the hosts, for each bucket and receiver


@dataclass(frozen=True)
class Arrival:
    """Simulated end of a transfer."""

    seconds: float  # until the last rank is done
    seconds_of_ranks: list[float]
    nic_bytes_in: list[int]  # by rank
    nic_bytes_out: list[int]
    nvlink_bytes: int  # of all ranks


def simulate(plan: TransferPlan, nodes: Sequence[Hashable], num_senders: int, links: Links) -> Arrival:
    """Play a transfer. `nodes` has the machine of each rank, those of senders first."""
    return _Transfer(plan, nodes, num_senders, links).run()


def broadcast_seconds(num_bytes: int, num_receivers: int, bucket_bytes: int, links: Links) -> float:
    """From one rank to all others by two binary trees, each for half of the buckets, without contention.

    Each inner rank of one tree is a leaf of the other (Sanders, Speck and Träff, "Two-tree algorithms for
    full bandwidth broadcast, reduction and scan", 2009). So every NIC sends and receives each byte once, and
    the depth of the trees is added.
    """
    depth, num_buckets = num_receivers.bit_length(), -(-num_bytes // bucket_bytes)
    of_messages = links.bucket_seconds + links.nic_latency_seconds
    of_bucket = bucket_bytes / links.nic_rate + of_messages
    return num_bytes / links.nic_rate + num_buckets * of_messages + depth * of_bucket


class _Flow:
    """A bucket on the way from one rank to the next. Only the end of the latest `turn` is valid."""

    __slots__ = ("left", "links", "rate", "since", "stop", "turn")

    def __init__(self, stop: int, links: tuple[int, int], num_bytes: int) -> None:
        self.stop, self.links, self.left = stop, links, float(num_bytes)
        self.rate, self.since, self.turn = 0.0, 0.0, 0


class _Transfer:
    """A stop is a bucket at one rank; the next rank of its route has the stop with the next number."""

    def __init__(self, plan: TransferPlan, nodes: Sequence[Hashable], num_senders: int, links: Links) -> None:
        self._links, num_ranks = links, len(nodes)
        on_node: Counter[Hashable] = Counter()
        nics: dict[tuple[Hashable, int], int] = {}
        self._nodes, self._nic = nodes, []
        for node in nodes:
            self._nic.append(nics.setdefault((node, on_node[node] // links.ranks_per_nic), len(nics)))
            on_node[node] += 1
        # links by number: out of and into each NIC, then NVLink out of and into each rank
        self._num_nics, self._num_ranks = len(nics), num_ranks
        self._rates = [links.nic_rate] * 2 * len(nics) + [links.nvlink_rate] * 2 * num_ranks
        self._flows: list[list[_Flow]] = [[] for _ in self._rates]
        self._queues = [array("q") for _ in range(num_ranks)]  # stops of each rank in order
        self._rank, self._bytes = array("q"), array("q")  # of each stop
        self._is_first, self._is_last = bytearray(), bytearray()
        first_stops = []
        for bucket in plan.buckets:
            first_stops.append(len(self._rank))
            self._queues[bucket.sender].append(len(self._rank))
            self._rank.append(bucket.sender)
            self._rank.extend(num_senders + receiver for receiver in bucket.receivers)
            num_stops = 1 + len(bucket.receivers)
            self._bytes.extend([bucket.num_bytes] * num_stops)
            self._is_first += b"\x01" + bytes(num_stops - 1)
            self._is_last += bytes(num_stops - 1) + b"\x01"
        for number, place in plan.takes():
            stop = first_stops[number] + 1 + place
            self._queues[self._rank[stop]].append(stop)
        self._offered = bytearray(len(self._rank))  # to the next rank
        self._requested = bytearray(len(self._rank))
        self._has_left = bytearray(self._is_last)  # for the next rank; the last one has none
        self._next = [0] * num_ranks  # place of the bucket to fill or receive next
        self._is_busy = bytearray(num_ranks)  # filling or receiving it
        self._num_free = [SLOTS] * num_ranks  # slots of a receiver whose bucket has been copied
        self._copied_at = [0.0] * num_ranks  # end of the last copy out of a slot
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_events = 0
        self._now = 0.0
        self._seconds = [0.0] * num_ranks
        self._nic_in, self._nic_out, self._nvlink_bytes = [0] * num_ranks, [0] * num_ranks, 0

    def run(self) -> Arrival:
        for rank in range(self._num_ranks):
            self._advance(rank)
        while self._events:
            self._now, _, event, argument = heapq.heappop(self._events)
            event(argument)
        done = all(place == len(queue) for place, queue in zip(self._next, self._queues, strict=True))
        assert done, "ranks wait for each other"
        return Arrival(
            max(self._seconds, default=0.0), self._seconds, self._nic_in, self._nic_out, self._nvlink_bytes
        )

    def _at(self, seconds: float, event: Callable[[Any], None], argument: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, event, argument))

    def _advance(self, rank: int) -> None:
        """Begin to fill or to receive the rank's next bucket, if it may."""
        place, queue = self._next[rank], self._queues[rank]
        if self._is_busy[rank] or place == len(queue):
            return
        if place >= SLOTS and not self._has_left[queue[place - SLOTS]]:
            return
        stop = queue[place]
        if self._is_first[stop]:
            self._is_busy[rank] = 1
            self._at(self._now + self._bytes[stop] / self._links.copy_rate, self._packed, stop)
        elif self._num_free[rank]:
            self._num_free[rank] -= 1
            self._is_busy[rank] = 1
            self._requested[stop] = 1
            self._meet(stop)

    def _packed(self, stop: int) -> None:
        rank = self._rank[stop]
        self._is_busy[rank] = 0
        self._next[rank] += 1
        if not self._is_last[stop]:
            self._offered[stop] = 1
            self._meet(stop + 1)
        self._advance(rank)

    def _meet(self, stop: int) -> None:
        """Begin to move a bucket to `stop` once both sides are ready."""
        if self._requested[stop] and self._offered[stop - 1]:
            links = self._links
            is_local = self._nodes[self._rank[stop - 1]] == self._nodes[self._rank[stop]]
            latency = links.nvlink_latency_seconds if is_local else links.nic_latency_seconds
            self._at(self._now + latency + links.bucket_seconds, self._begin, stop)

    def _begin(self, stop: int) -> None:
        source, target, num_bytes = self._rank[stop - 1], self._rank[stop], self._bytes[stop]
        if self._nodes[source] == self._nodes[target]:
            first = 2 * self._num_nics
            way = first + 2 * source, first + 2 * target + 1
            self._nvlink_bytes += num_bytes
        else:
            way = 2 * self._nic[source], 2 * self._nic[target] + 1
            self._nic_out[source] += num_bytes
            self._nic_in[target] += num_bytes
        flow = _Flow(stop, way, num_bytes)
        flow.since = self._now
        for link in way:
            self._flows[link].append(flow)
        self._share(way)

    def _share(self, way: tuple[int, int]) -> None:
        """Give each flow on two links its rate, from now on."""
        flows, rates = self._flows, self._rates
        for flow in [*flows[way[0]], *flows[way[1]]]:
            rate = min(rates[link] / len(flows[link]) for link in flow.links)
            if rate != flow.rate:
                flow.left -= (self._now - flow.since) * flow.rate
                flow.rate, flow.since, flow.turn = rate, self._now, flow.turn + 1
                self._at(self._now + flow.left / rate, self._may_arrive, (flow, flow.turn))

    def _may_arrive(self, end: tuple[_Flow, int]) -> None:
        flow, turn = end
        if turn != flow.turn:
            return  # its rate has changed since
        for link in flow.links:
            self._flows[link].remove(flow)
        self._share(flow.links)
        stop = flow.stop
        source, target = self._rank[stop - 1], self._rank[stop]
        self._has_left[stop - 1] = 1
        self._seconds[source] = self._now
        self._is_busy[target] = 0
        self._next[target] += 1
        if not self._is_last[stop]:
            self._offered[stop] = 1
            self._meet(stop + 1)
        copied_at = max(self._now, self._copied_at[target]) + self._bytes[stop] / self._links.copy_rate
        self._copied_at[target] = copied_at
        self._at(copied_at, self._copied, target)
        self._advance(source)
        self._advance(target)

    def _copied(self, rank: int) -> None:
        self._num_free[rank] += 1
        self._seconds[rank] = self._now
        self._advance(rank)
