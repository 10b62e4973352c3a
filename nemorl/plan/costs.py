"""Seconds of kernels and messages, and what bounds them. Imports no torch.

Work takes as long as its slowest resource (roofline, Williams et al. 2009): operations at the attained share
of the device's peak, or bytes at that of its memory. Products are computed in tiles, of which a device
computes as many at a time as it has multiprocessors ("Matrix Multiplication Background User's Guide",
NVIDIA: tile and wave quantization). Messages take a latency and their bytes (Hockney 1994).
"""

import math
from dataclasses import dataclass, fields
from operator import add
from typing import Literal

from .hardware import Hardware
from .operations import Product

Bound = Literal["compute", "memory", "link", "latency", "straggler", "bubble"]
_DEPTH = 1024  # of the inner extent that a multiprocessor adds up; kernels divide longer ones


@dataclass(frozen=True)
class Cost:
    """Seconds by what bounds them; costs of work that follows other work are added."""

    compute: float = 0.0
    memory: float = 0.0  # bandwidth of the device's memory
    link: float = 0.0  # bandwidth between devices, and to the host
    latency: float = 0.0  # of launches, messages and the host's work
    straggler: float = 0.0  # waiting for the longest sequence, the fullest micro-batch or the busiest experts
    bubble: float = 0.0  # waiting for other pipeline stages

    @property
    def _parts(self) -> tuple[float, ...]:
        return self.compute, self.memory, self.link, self.latency, self.straggler, self.bubble

    @property
    def seconds(self) -> float:
        return sum(self._parts)

    @property
    def bound(self) -> str:
        """What takes most of the time; `nothing` for no time."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        largest = max(parts, key=lambda name: parts[name])
        return largest if parts[largest] > 0 else "nothing"

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, self._parts, other._parts))

    def __mul__(self, times: float) -> "Cost":
        return Cost(*(part * times for part in self._parts))

    def waiting(self, bound: Literal["straggler", "bubble"]) -> "Cost":
        """The same time, in which others wait."""
        return Cost(**{bound: self.seconds})


@dataclass(frozen=True)
class Attained:
    """What a stack attains of the hardware. Those that `step_time.fit` changes are fitted to half of the
    published runs in docs/plan_time.md; the others are set to usual values."""

    matmul: float = 0.73  # share of the peak in large products
    attention: float = 0.4  # share of the peak in attention of a training pass
    memory: float = 0.6  # share of the memory's bandwidth
    link: float = 0.6  # share of the bandwidth of links
    launch: float = 2.1e-3  # seconds of the host for a layer of a micro-batch, forward
    expert_launch: float = 1.28e-4  # seconds of the host for each expert of a rank in it
    decode_layer: float = 1.36e-4  # seconds of a layer's launches in an engine's step
    sequence: float = 2.7e-5  # seconds of the host for a sequence in an engine's step
    step: float = 11.0  # seconds of a step that no stage explains: rewards, batches, idle starts
    refit: float = 0.52  # share of the bandwidth of links when weights travel
    message: float = 8e-6  # seconds until a message arrives within an NVLink domain
    far_message: float = 3e-5  # and between domains
    expert_load: float = 1.2  # tokens of the busiest rank's experts, as a multiple of the mean
    call: float = 0.0  # seconds of the driver and of processes for a pass or an update, next to its work
    refit_call: float = 0.0  # and for a refit
    gathers_weights: bool = False  # each device of an engine collects all weights in a refit, not its part


def product_cost(
    rows: float,
    product: Product,
    hardware: Hardware,
    attained: Attained,
    *,
    groups: float = 1,
    fp8: bool = False,
) -> Cost:
    """`groups` products of `rows` x inner with inner x columns, computed together."""
    if rows <= 0 or groups <= 0:
        return Cost()
    tile = hardware.tile
    tile_rows = tile if rows > tile // 2 else tile // 2
    depth = min(product.inner, _DEPTH)
    tiles = math.ceil(rows / tile_rows) * math.ceil(product.columns / tile)
    tiles = math.ceil(tiles * math.ceil(product.inner / depth) * groups)
    waves = math.ceil(tiles / hardware.multiprocessors)
    operations = 2 * waves * hardware.multiprocessors * tile_rows * tile * depth
    rate = hardware.operations_fp8 if fp8 else hardware.operations
    elements = rows * (product.inner + product.columns) + product.inner * product.columns
    moved = groups * elements * hardware.element_bytes
    return roofline(operations / (rate * attained.matmul), moved, hardware, attained)


def roofline(compute: float, moved: float, hardware: Hardware, attained: Attained) -> Cost:
    """Work of `compute` seconds that moves bytes from and to memory at the same time."""
    memory = moved / (hardware.memory_rate * attained.memory)
    return Cost(compute=compute) if compute >= memory else Cost(memory=memory)


def message_cost(
    sent: float,
    span: int,
    hardware: Hardware,
    attained: Attained,
    *,
    count: float = 1,
    scattered: bool = False,
) -> Cost:
    """Bytes that each device of a group sends in `count` messages; the group lies over `span` devices.

    `scattered`: as many to each other (all-to-all), so that those for the same NVLink domain do not cross the
    network.
    """
    if span <= 1:
        return Cost()
    outside = span > hardware.domain
    share = 1 - hardware.domain / span if outside and scattered else 1.0
    seconds = sent * share / (hardware.link_rate(span) * attained.link)
    latency = attained.far_message if outside else attained.message
    return Cost(link=seconds, latency=count * latency)


def at_least(cost: Cost, launches: float) -> Cost:
    """Work of a device that its host needs `launches` seconds to start."""
    return cost + Cost(latency=max(0.0, launches - cost.seconds))
