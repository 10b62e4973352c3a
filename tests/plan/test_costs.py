"""Costs of kernels and messages, computed by hand, and their monotonicity."""

from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.models.registry import shape_from_config
from nemorl.plan.costs import Attained, Cost, at_least, message_cost, product_cost, roofline
from nemorl.plan.hardware import HARDWARE, Hardware
from nemorl.plan.operations import (
    Product,
    attention_width,
    cached_width,
    forward_attention,
    forward_products,
    layer_products,
)
from tests.plan.models import CONFIG
from tests.plan.published import MODELS, shape_of

# 100 operations a second in bfloat16, 4 multiprocessors, 10 bytes a second of memory, pairs by a link of 5.
DEVICE = Hardware("made-up", "made-up", 100.0, 200.0, 4, 1e6, 10.0, 2, 5.0, 1.0, 2.0)
ALL = Attained(matmul=1, attention=1, memory=1, link=1, refit=1, message=0.25, far_message=0.5)


def test_costs_add_up_by_what_bounds_them() -> None:
    cost = (Cost(compute=1, memory=2) + Cost(memory=1, bubble=0.5)) * 2
    assert cost == Cost(compute=2, memory=6, bubble=1)
    assert (cost.seconds, cost.bound) == (9, "memory")
    assert cost.waiting("straggler") == Cost(straggler=9)
    assert (Cost().seconds, Cost().bound) == (0, "nothing")


def test_work_takes_as_long_as_its_slower_resource() -> None:
    assert roofline(2.0, 19.0, DEVICE, ALL) == Cost(compute=2.0)
    assert roofline(2.0, 30.0, DEVICE, ALL) == Cost(memory=3.0)
    assert roofline(2.0, 30.0, DEVICE, replace(ALL, memory=0.5)) == Cost(memory=6.0)
    assert at_least(Cost(compute=2.0), 3.0) == Cost(compute=2.0, latency=1.0)
    assert at_least(Cost(compute=2.0), 1.0) == Cost(compute=2.0)


def test_a_product_is_computed_in_waves_of_tiles() -> None:
    """200 x 64 x 300: 2 x 3 tiles of 128 x 128, in two waves of four."""
    fast_memory = replace(DEVICE, memory_rate=1e12)
    work = 2 * 4 * 2 * 128 * 128 * 64
    product = Product("mlp", 64, 300)
    assert product_cost(200, product, fast_memory, ALL) == Cost(compute=work / 100)
    assert product_cost(200, product, fast_memory, ALL, fp8=True) == Cost(compute=work / 200)
    assert product_cost(200, product, fast_memory, replace(ALL, matmul=0.5)) == Cost(compute=work / 50)
    # 10 of these: 60 tiles in 15 waves; 20 rows are a tile of 64; 2,048 elements are added up in two parts.
    ten = product_cost(200, product, fast_memory, ALL, groups=10)
    assert ten.seconds == pytest.approx(15 * 4 * 2 * 128 * 128 * 64 / 100)
    few = product_cost(20, Product("mlp", 2048, 128), fast_memory, ALL)
    assert few == Cost(compute=4 * 2 * 64 * 128 * 1024 / 100)
    assert product_cost(0, product, DEVICE, ALL) == Cost()


def test_a_product_with_few_rows_reads_its_matrix() -> None:
    fast = replace(DEVICE, operations=1e15)
    assert product_cost(1, Product("mlp", 64, 300), fast, ALL) == Cost(memory=2 * (64 + 300 + 64 * 300) / 10)


def test_messages_within_a_domain_and_between_them() -> None:
    assert message_cost(10, 1, DEVICE, ALL) == Cost()
    assert message_cost(10, 2, DEVICE, ALL, count=3) == Cost(link=2.0, latency=0.75)
    assert message_cost(10, 8, DEVICE, ALL) == Cost(link=10.0, latency=0.5)
    # Two of eight destinations are in the same domain.
    assert message_cost(10, 8, DEVICE, ALL, scattered=True) == Cost(link=7.5, latency=0.5)


def test_products_of_a_dense_layer_and_their_parts() -> None:
    """Hidden 128, 8 query and 4 key-value heads of 16, an MLP of 384, a vocabulary of 1,000, 6 layers."""
    shape = shape_from_config(CONFIG, "config.json")
    assert [(p.inner, p.columns) for p in layer_products(shape, 0)] == [
        (128, (8 + 4 + 4) * 16),
        (128, 128),
        (128, 768),
        (384, 128),
    ]
    halves = [part.on_rank(2) for part in layer_products(shape, 0)]
    assert [(p.inner, p.columns) for p in halves] == [(128, 128), (64, 128), (128, 384), (192, 128)]
    assert forward_products(shape) == 2 * (6 * (128 * 256 + 128 * 128 + 3 * 128 * 384) + 128 * 1000)
    assert (attention_width(shape), cached_width(shape)) == (2 * 128, 2 * 64)
    assert forward_attention(shape, 10) == 6 * 2 * 10 * 256


@pytest.mark.parametrize(
    ("model", "active"),
    [
        # Active parameters of the model cards, in billions, without the embedding of the input.
        ("Llama-3.1-8B", 8.03 - 0.53),
        ("Qwen3-32B", 32.8 - 0.78),
        ("Qwen3-30B-A3B", 3.3 - 0.31),
        ("Qwen3-235B-A22B", 22.2 - 0.62),
        ("DeepSeek-V3", 37.0 - 0.93),
    ],
)
def test_operations_are_twice_the_active_parameters(model: str, active: float) -> None:
    assert forward_products(shape_of(model)) / 2e9 == pytest.approx(active, rel=0.025)


def test_latents_are_what_mla_keeps() -> None:
    assert set(MODELS) == {"Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3"}
    shape = shape_of("DeepSeek-V3")
    assert cached_width(shape) == 512 + 64
    assert attention_width(shape) == 128 * (128 + 64 + 128)


_RATES = ("operations", "operations_fp8", "memory_rate", "domain_rate", "network_rate", "host_rate")


@given(
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from(_RATES),
    st.floats(1.0, 10.0),
    st.integers(1, 20000),
    st.sampled_from([64, 768, 4096, 28672]),
    st.sampled_from([64, 768, 4096, 28672]),
    st.integers(1, 128),
)
def test_faster_hardware_is_never_slower(
    name: str, rate: str, times: float, rows: int, inner: int, columns: int, span: int
) -> None:
    slow = HARDWARE[name]
    fast = replace(slow, **{rate: getattr(slow, rate) * times})
    product, attained = Product("mlp", inner, columns), Attained()
    costs = [
        product_cost(rows, product, device, attained).seconds
        + message_cost(rows * inner, span, device, attained).seconds
        for device in (slow, fast)
    ]
    assert costs[1] <= costs[0] * (1 + 1e-12)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_more_rows_and_more_bytes_are_never_faster(rows: int, more: int, inner: int, columns: int) -> None:
    device, attained, product = HARDWARE["h100"], Attained(), Product("mlp", inner, columns)
    costs = [product_cost(count, product, device, attained).seconds for count in (rows, rows + more)]
    assert costs[0] <= costs[1] * (1 + 1e-12)
    sent = [message_cost(count, 16, device, attained).seconds for count in (rows, rows + more)]
    assert sent[0] <= sent[1]


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_the_table_is_in_units(name: str) -> None:
    """Rates in operations and bytes per second: a wrong power of ten would leave these ranges."""
    device = HARDWARE[name]
    assert 1e14 < device.operations < 1e16
    assert device.operations_fp8 == pytest.approx(2 * device.operations, rel=0.01)
    assert 5e10 < device.memory_bytes < 3e11
    assert 1e12 < device.memory_rate < 2e13
    assert device.memory_rate > device.domain_rate > device.network_rate > 1e10
    assert device.host_rate > 1e10
    assert all(getattr(device, field.name) for field in fields(device) if field.default is MISSING)
