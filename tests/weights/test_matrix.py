"""Every layout of a policy to every layout of an engine, through real transports between processes.

The reference is a direct load of the HF folder that holds the policy's weights.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import PolicyRank, hf_tensors, policy_rank, policy_slices
from nemorl.models.shape import MlaShape, ModelShape, MoeShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import Part, ReceiveReport, RefitSession
from tests.weights.ranks import SHAPE, Remote, Threads, with_nixl_stand_in

BUCKET = 4096
DENSE = replace(SHAPE, num_layers=4)
MOE = replace(
    DENSE,
    family="deepseek_v3",
    num_key_value_heads=8,
    tied_embeddings=False,
    qkv_bias=False,
    head_dim=12,
    mla=MlaShape(query_rank=24, key_value_rank=20, head_dim=8, rotary_dim=4, value_dim=6),
    moe=MoeShape(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=16,
        first_layer=1,
        shared_ffn_hidden_size=32,
        scores="sigmoid",
        expert_bias=True,
    ),
)
SHAPES = {"dense": DENSE, "moe": MOE}


def layout(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, vpp: int = 1, etp: int = 1) -> LayoutConfig:
    return LayoutConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_parallel_size=vpp,
        sequence_parallel=tp > 1,
    )


COMMON = {
    f"TP{tp} PP{pp} DP{dp}": layout(tp, pp, dp)
    for tp, pp, dp in itertools.product((1, 2), repeat=3)
    if tp * pp * dp <= 4
} | {"PP2 VPP2": layout(pp=2, vpp=2)}
SENDERS = {("dense", name): of for name, of in COMMON.items()}
SENDERS |= {("moe", name): of for name, of in COMMON.items()}
SENDERS |= {
    ("moe", "DP2 EP2"): layout(dp=2, ep=2),
    ("moe", "TP2 EP2"): layout(tp=2, ep=2),
    ("moe", "PP2 DP2 EP2"): layout(pp=2, dp=2, ep=2),
    ("moe", "TP2 DP2 EP2"): layout(tp=2, dp=2, ep=2),
    ("moe", "TP2 ETP2"): layout(tp=2, etp=2),
    ("moe", "DP4 EP2 ETP2"): layout(dp=4, ep=2, etp=2),
}
# an engine's ranks, of all replicas; experts are divided among the ranks of a replica
RECEIVERS = {
    ("dense", "TP1"): [layout()],
    ("dense", "TP2"): [layout(tp=2)],
    ("dense", "TP1 DP2"): [layout()] * 2,
    ("dense", "TP2 DP2"): [layout(tp=2)] * 2,
}
RECEIVERS |= {("moe", name): of for (_, name), of in RECEIVERS.items()}
RECEIVERS |= {
    ("moe", "EP2"): [layout(dp=2, ep=2)],
    ("moe", "TP2 EP2"): [layout(tp=2, ep=2)],
}
TRANSPORTS = ("shared_memory", "gloo", "files", "nixl")


def dtype_of(part: TensorSlice) -> torch.dtype:
    """DeepSeek's engines keep the router's bias in float32."""
    return torch.float32 if part.name.endswith("e_score_correction_bias") else torch.bfloat16


def allocate(slices: Sequence[TensorSlice], *, engine: bool) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for part in slices:
        last = part.offset + sum((n - 1) * step for n, step in zip(part.size, part.strides, strict=True))
        size = max(made[part.param].numel() if part.param in made else 0, last + 1)
        made[part.param] = torch.zeros(size, dtype=dtype_of(part) if engine else torch.float32)
    return made


class Policy:
    """A policy process that takes any place of any layout."""

    def become(self, shape: ModelShape, place: PolicyRank, folder: Path) -> None:
        slices = policy_slices(shape, place)
        parameters = allocate(slices, engine=False)
        HfFolder(folder).load_into(parameters, slices)
        self.exchange = WeightSender(slices, lambda: parameters)


class Engine:
    """A rank of an engine that takes any place of any layout."""

    def become(self, shape: ModelShape, place: PolicyRank) -> None:
        self._slices = policy_slices(shape, place)
        self._weights = allocate(self._slices, engine=True)
        self.exchange = WeightReceiver(
            self._slices, lambda: self._weights, lambda version: None, in_place=True
        )

    def shard_bytes(self) -> int:
        return sum(part.num_elements * dtype_of(part).itemsize for part in self._slices)

    def unlike(self, folder: Path) -> list[str]:
        """Parameters that differ from a direct load of the folder."""
        direct = allocate(self._slices, engine=True)
        HfFolder(folder).load_into(direct, self._slices)
        return [name for name, values in direct.items() if not torch.equal(values, self._weights[name])]


@dataclass
class Reporting(Threads):
    """Receivers whose reports are kept."""

    reports: Sequence[ReceiveReport] = ()

    async def receive(self, session: RefitSession) -> list[ReceiveReport]:
        self.reports = await super().receive(session)
        return list(self.reports)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[list[Remote], list[Remote]]]:
    """Four policy processes and four of engines, for all tests."""
    policy, engines = (
        [Remote(partial(with_nixl_stand_in, kind)) for _ in range(4)] for kind in (Policy, Engine)
    )
    yield policy, engines
    for rank in (*policy, *engines):
        rank.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The HF folder of each family."""
    made = {}
    for family, shape in SHAPES.items():
        made[family] = tmp_path_factory.mktemp(family)
        generator = torch.Generator().manual_seed(len(family))
        tensors = {name: torch.randn(size, generator=generator) for name, size in hf_tensors(shape).items()}
        save_file(tensors, made[family] / "model.safetensors")
    return made


def become(
    processes: Sequence[Remote], shape: ModelShape, layouts: Sequence[LayoutConfig], *folder: Path
) -> list[Remote]:
    """The processes that are now the ranks of these layouts, one layout after the other."""
    places = [policy_rank(of, rank) for of in layouts for rank in range(of.world_size)]
    for process, place in zip(processes, places, strict=False):
        process.call("become", shape, place, *folder)
    return list(processes[: len(places)])


@pytest.mark.parametrize(("family", "sender"), SENDERS, ids=lambda name: name)
def test_every_engine_gets_its_shard_and_nothing_else(
    processes: tuple[list[Remote], list[Remote]],
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    sender: str,
) -> None:
    shape = SHAPES[family]
    policy = become(processes[0], shape, [SENDERS[family, sender]], folders[family])
    first = list(SENDERS).index((family, sender))  # so that all transports meet all kinds of layouts
    of_engines = [(name, found) for (kind, name), found in RECEIVERS.items() if kind == family]
    for turn, (name, replicas) in enumerate(of_engines):
        transport = TRANSPORTS[(first + turn) % len(TRANSPORTS)]
        receivers = Reporting(become(processes[1], shape, replicas))
        options = TransportOptions(transport, str(tmp_path / name))
        stats = asyncio.run(WeightExchange(Threads(policy), receivers, BUCKET, 60.0, options).refit(1))
        due = [engine.call("shard_bytes") for engine in receivers.ranks]
        assert [report.num_bytes for report in receivers.reports] == due, (name, transport)
        assert stats.num_bytes == sum(due)
        for engine in receivers.ranks:
            assert engine.call("unlike", folders[family]) == [], (name, transport)


@pytest.mark.parametrize(
    ("family", "of_policy", "replicas", "late"),
    [
        ("dense", layout(), [layout(tp=2)], layout(tp=4)),
        ("dense", layout(), [layout(tp=4)], layout(tp=2)),
        ("dense", layout(tp=2, pp=2), [layout(tp=2)], layout()),
        ("moe", layout(dp=2, ep=2), [layout()] * 2, layout(tp=2)),
        ("dense", layout(tp=2), [layout(tp=4)], layout()),
    ],
    ids=["TP1 to TP2", "TP1 to TP4", "TP2 PP2 to TP2", "EP2 to 2 x TP1", "TP2 to TP4"],
)
def test_engines_read_of_files_their_shard_and_nothing_else(
    processes: tuple[list[Remote], list[Remote]],
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    of_policy: LayoutConfig,
    replicas: Sequence[LayoutConfig],
    late: LayoutConfig,
) -> None:
    """Engines of another layout that read later also get theirs, in boxes that were not cut for them."""
    shape = SHAPES[family]
    policy = become(processes[0], shape, [of_policy], folders[family])
    receivers = Reporting(become(processes[1], shape, replicas))
    options = TransportOptions("files", str(tmp_path))
    asyncio.run(WeightExchange(Threads(policy), receivers, BUCKET, 60.0, options).refit(1))
    shards = [engine.call("shard_bytes") for engine in receivers.ranks]
    assert [report.num_bytes for report in receivers.reports] == shards
    for engine in receivers.ranks:
        assert engine.call("unlike", folders[family]) == []
    joiner = processes[1][0]
    for rank in range(late.world_size):
        joiner.call("become", shape, policy_rank(late, rank))
        joiner.call("exchange.prepare", Part(9, ()))
        report = joiner.call("exchange.receive", RefitSession(1, "files", str(tmp_path), 60.0))
        assert report.num_bytes >= joiner.call("shard_bytes")
        assert joiner.call("unlike", folders[family]) == []


def test_the_comparison_can_fail(
    processes: tuple[list[Remote], list[Remote]], folders: dict[str, Path]
) -> None:
    engine = processes[1][0]
    engine.call("become", DENSE, PolicyRank())
    parameters = {part.param for part in policy_slices(DENSE, PolicyRank())}
    assert set(engine.call("unlike", folders["dense"])) == parameters
