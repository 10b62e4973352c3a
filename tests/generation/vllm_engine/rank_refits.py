"""Refits of one rank of vLLM by a policy of every layout, over every transport, in one process."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import RefitFailed
from tests.generation.vllm_engine import policy as policies
from tests.generation.vllm_engine.policy import Policy
from tests.weights.ranks import Threads

BUCKET = 2**14
TRANSPORTS = ("shared_memory", "gloo", "files")

State = Mapping[str, Tensor]


def refits(
    folders: tuple[Path, Path],
    loaded: tuple[State, State],
    model: Any,
    receiver: WeightReceiver,
    transports: Sequence[str],
    *,
    other_layouts: bool,
) -> dict[str, Any]:
    """By transport: what share of a full refit each of three took, and what then was not as loaded directly.

    The second folder is the first with a few changes, and comes first and last. Then policies of
    `other_layouts` bring one or the other.
    """
    policy = Policy(folders[0])
    found: dict[str, Any] = {}
    with TemporaryDirectory() as place:
        for first, transport in enumerate(transports):
            exchange = _exchange(policy, receiver, transport, place)
            shares, different = [], set()
            for number, which in enumerate((1, 0, 1)):
                policy.load(folders[which])
                stats = asyncio.run(exchange.refit(10 * first + number + 1))
                shares.append(stats.num_bytes / stats.num_bytes_whole)
                different |= differing(model, loaded[which])
            found[transport] = {"shares": shares, "different": sorted(different)}
    if other_layouts:
        found["layouts"] = _by_other_layouts(receiver, folders, model, loaded)
    found["without base"] = _without_base(policy, receiver, folders[0], model, loaded[0])
    return found


def differing(model: Any, loaded: State) -> set[str]:
    """Parameters that are not those of a model that was loaded directly, to the bit."""
    return {name for name, values in model.named_parameters() if not values.equal(loaded[name])}


def _by_other_layouts(
    receiver: WeightReceiver, folders: tuple[Path, Path], model: Any, loaded: tuple[State, State]
) -> dict[str, list[str]]:
    """What is not as loaded directly after refits by policies of other layouts, of either folder in turn."""
    found = {}
    for number, (name, layout) in enumerate(policies.other_layouts(folders[0]).items()):
        which = number % 2
        asyncio.run(
            _exchange(Policy(folders[which], layout), receiver, "shared_memory", "").refit(50 + number)
        )
        found[name] = sorted(differing(model, loaded[which]))
    return found


def _without_base(
    policy: Policy, receiver: WeightReceiver, folder: Path, model: Any, loaded: State
) -> dict[str, Any]:
    """Another policy brings a version; changes onto the one before it are refused, and all is sent."""
    mine = _exchange(policy, receiver, "shared_memory", "")
    asyncio.run(mine.refit(100))
    asyncio.run(_exchange(Policy(folder), receiver, "shared_memory", "").refit(200))
    error = ""
    try:
        asyncio.run(mine.refit(101))
    except RefitFailed as refused:
        error = str(refused)
    policy.load(folder)
    stats = asyncio.run(mine.refit(102))
    share = stats.num_bytes / stats.num_bytes_whole
    return {"error": error, "share": share, "different": sorted(differing(model, loaded))}


def _exchange(policy: Policy, receiver: WeightReceiver, transport: Any, place: str) -> WeightExchange:
    options = TransportOptions(transport, place, delta=True, full_version_every=10)
    return WeightExchange(policy, Threads([SimpleNamespace(exchange=receiver)]), BUCKET, 60.0, options)
