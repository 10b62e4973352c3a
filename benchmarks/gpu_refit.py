"""How fast do weights reach an engine on the same GPU, next to a plain copy, and what does checking cost?

A policy rank and an engine rank in two processes hand over a model in bfloat16 by the project's exchange,
driven from a third. A plain copy on the device, and one through pinned memory of the host, are the bounds.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from gpu_models import LARGE, SMALL
from gpu_setting import Row, Setting, per_second
from meter import now
from refit_models import shape_of
from refit_ranks import ON_ONE_GPU, TRANSPORTS, Ranks, Side

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import hf_tensors, policy_rank
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import CorruptWeights

DTYPE = "bfloat16"
ROUNDS = 3  # that count, after one that makes plans and slots
MEGABYTES = (64, 512)
CHECKED = (1, 16)  # one of this number of tensors
LEFT_BYTES = 2**26  # that a driver may keep of an ended process


def measure(setting: Setting) -> tuple[list[Row], Row]:
    """Gigabytes a second of every way, bucket size and share of checked tensors."""
    shape = shape_of(SMALL if setting.small else LARGE)
    place = policy_rank(LayoutConfig(), 0)
    num_bytes = 2 * sum(map(math.prod, hf_tensors(shape).values()))
    rows = [copy_row(setting, name, num_bytes, copy) for name, copy in copies(setting, num_bytes)]
    with ranks(setting) as policy:
        policy.each("become_sender", [(shape, place, DTYPE)])
        policy.all("draw")
        alone = used_bytes(setting)
        with ranks(setting) as engine:
            engine.each("become_receiver", [(shape, place, DTYPE)])
            for transport in ON_ONE_GPU if setting.device == "cuda" else TRANSPORTS[:1]:
                for megabytes in (1, 4) if setting.small else MEGABYTES:
                    for one_in in CHECKED:
                        exchange = WeightExchange(
                            Side(policy, transport),  # type: ignore[arg-type]
                            Side(engine, transport),  # type: ignore[arg-type]
                            megabytes * 2**20,
                            120.0,
                            TransportOptions(transport, check_one_in=one_in),
                        )
                        name = f"{transport}, buckets of {megabytes} MB, checks 1 in {one_in}"
                        rows.append(refit_row(name, exchange, num_bytes))
            equal = policy.all("sums") == engine.all("sums")
            engine.all("spoil_next")
            found = fails(exchange)
            policy.all("release")  # what `sums` took is no part of what the engine leaves
        left = left_bytes(setting, alone)
    details = {
        "megabytes": num_bytes / 1e6,
        "weights are equal": equal,
        "changed byte is found": found,
        "bytes left by a killed engine": left,
        "a killed engine leaves nothing": left <= LEFT_BYTES + 2 * max(MEGABYTES) * 2**20,
    }
    return rows, details


def refit_row(name: str, exchange: WeightExchange, num_bytes: int) -> Row:
    stats = [asyncio.run(exchange.refit(version)) for version in range(1, ROUNDS + 2)][1:]
    seconds = min(one.seconds for one in stats)
    return {"way": name, "seconds": seconds, "gigabytes_per_second": per_second(num_bytes / 1e9, seconds)}


def fails(exchange: WeightExchange) -> bool:
    """True if a refit notices a byte that changed on its way; each tensor is checked once in its turn."""
    try:
        for version in range(100, 100 + max(CHECKED)):
            asyncio.run(exchange.refit(version))
    except CorruptWeights:
        return True
    return False


def copies(setting: Setting, num_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What no exchange can be faster than."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.torch_device)
    target = torch.empty_like(source)
    yield "copy on the device", lambda: target.copy_(source)
    if setting.device == "cuda":
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        yield "copy through pinned memory", lambda: target.copy_(host.copy_(source))


def copy_row(setting: Setting, name: str, num_bytes: int, copy: Callable[[], object]) -> Row:
    copy()
    began = now(setting.device).seconds
    for _ in range(ROUNDS):
        copy()
    seconds = (now(setting.device).seconds - began) / ROUNDS
    return {"way": name, "seconds": seconds, "gigabytes_per_second": per_second(num_bytes / 1e9, seconds)}


@contextmanager
def ranks(setting: Setting) -> Iterator[Ranks]:
    """A process that ends by SIGKILL."""
    process = Ranks(1, setting.device)
    try:
        yield process
    finally:
        process.stop()


def used_bytes(setting: Setting) -> int:
    """Of the GPU, by all processes."""
    if setting.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def left_bytes(setting: Setting, before: int, seconds: float = 10.0) -> int:
    """What is used beyond `before`, once it stops falling or after some seconds."""
    ends, left = time.monotonic() + seconds, used_bytes(setting) - before
    while left > LEFT_BYTES and time.monotonic() < ends:
        time.sleep(0.2)
        left = used_bytes(setting) - before
    return max(0, left)
