"""An engine that is sent a policy's adapters, and computes them next to the weights it loaded."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.config.policy import LayoutConfig, LoraConfig
from nemorl.models.adapters import adapter_slices, adapter_tensors, peft_names
from nemorl.models.layout import policy_rank
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.models.tensors import local_view
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.exchange import WeightExchange
from tests.generation.examples import Prompts, request
from tests.generation.vllm_engine.conftest import Running
from tests.generation.vllm_engine.exchange import Receivers
from tests.generation.vllm_engine.test_engine import PLAIN, collect, gaps, group, until_sampled
from tests.weights.ranks import Threads, allocate

LORA = LoraConfig(rank=3, alpha=6.0)  # of a rank that vLLM has no room of exactly that size for


class _Rank:
    def __init__(self, shape: ModelShape, number: int) -> None:
        layout = LayoutConfig(tensor_parallel_size=2)
        self.slices = adapter_slices(shape, LORA, policy_rank(layout, number))
        self.parameters = allocate(self.slices, torch.float32)
        self.exchange = WeightSender(self.slices, lambda: self.parameters)


class Policy(Threads):
    """Two tensor-parallel ranks with adapters, which are drawn."""

    def __init__(self, folder: Path, seed: int) -> None:
        shape = load_shape(folder)
        super().__init__([_Rank(shape, number) for number in range(2)])
        generator = torch.Generator().manual_seed(seed)
        tensors = adapter_tensors(shape, LORA)
        self.whole = {name: torch.randn(size, generator=generator) * 0.1 for name, size in tensors.items()}
        for rank in self.ranks:
            for part in rank.slices:
                local_view(rank.parameters, part).copy_(self.whole[part.name][part.box])


def adapted(network: Any, adapters: dict[str, Tensor]) -> Any:
    """transformers' network with `alpha / rank * B A` added to each matrix that has adapters."""
    merged = copy.deepcopy(network)
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            names = peft_names(name)
            if names.a in adapters:
                weight += LORA.alpha / LORA.rank * adapters[names.b] @ adapters[names.a]
    return merged


@pytest.fixture(scope="module")
def engine(dense: tuple[Path, Any]) -> Iterator[Running]:
    running = Running(dense[0], LORA, adapters="separate")
    yield running
    running.close()


def test_adapters_come_alone_and_part_the_tokens_in_flight(engine: Running, dense: tuple[Path, Any]) -> None:
    folder, network = dense
    policy = Policy(folder, 1)
    exchange = WeightExchange(policy, Receivers(engine), 2**12, 60.0)
    requests = group("", 3, 120, PLAIN)
    running = engine.submit(collect(engine.host, requests))
    engine.run(until_sampled(engine.host, 30))
    stats = asyncio.run(exchange.refit(4))
    completions = running.result(120)
    assert stats.num_bytes == sum(4 * tensor.numel() for tensor in policy.whole.values())
    networks = {0: network, 4: adapted(network, policy.whole)}
    for asked in requests:
        got = completions[asked.id]
        assert set(got.versions.tolist()) == {0, 4}
        for version, of_version in networks.items():
            own = torch.tensor([v == version for v in got.versions.tolist()])
            gap = gaps(of_version, asked.prompt, got)
            assert gap[own].max() < 1e-3
            assert gap[~own].max() > 1e-2, "the other version's logprobs are others"


def test_the_next_adapters_take_the_place_of_the_last(engine: Running, dense: tuple[Path, Any]) -> None:
    folder, network = dense
    policy = Policy(folder, 2)
    asyncio.run(WeightExchange(policy, Receivers(engine), 2**12, 60.0).refit(engine.host.version + 1))
    prompt = Prompts(13).one(20)
    got = engine.run(collect(engine.host, [request(prompt, "a", PLAIN, 12, seed=1)]))["a"]
    assert gaps(adapted(network, policy.whole), prompt, got).max() < 1e-3
