"""Operations of a step against counts by hand and those of torch, and the metrics made of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from nemorl.models.adapters import adapter_tensors
from nemorl.models.create import create_tiny_model
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.plan.utilization import ModelWork, peak_tflops, utilization
from tests.plan.conftest import Configure

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden": HIDDEN, "ffn": FFN, "layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}
    create_tiny_model(tmp_path / "tiny", **sizes)
    return tmp_path / "tiny"


@pytest.fixture
def shape(folder: Path) -> ModelShape:
    return load_shape(folder)


def by_hand(shape: ModelShape, start: int, end: int) -> tuple[int, int]:
    """Operations of a forward pass over these tokens in products, without the head, and in attention."""
    size = shape.head_dim
    products = attention = 0
    for place in range(start, end):
        for _ in range(LAYERS):
            products += 2 * HIDDEN * (HEADS + 2 * KV_HEADS) * size  # queries, keys, values
            products += 2 * HEADS * size * HIDDEN + 3 * 2 * HIDDEN * FFN
            attention += 2 * 2 * HEADS * size * (place + 1)  # scores, and sums of values
    return products, attention


def test_training_counts_three_forward_passes(shape: ModelShape) -> None:
    products, attention = map(sum, zip(by_hand(shape, 0, 7), by_hand(shape, 0, 3), strict=True))
    head = 6 * 2 * HIDDEN * shape.vocab_size

    assert ModelWork.of(shape).training([(0, 7), (0, 3)], 6) == 3 * (products + head + attention)


def test_torch_counts_the_same_products_and_gradients(folder: Path, shape: ModelShape) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokens = torch.arange(12).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    linear = counts["aten.mm"]  # attention is in `bmm`, for all pairs of tokens and not only those seen

    products, seen = by_hand(shape, 0, 12)
    assert linear == 3 * (products + 12 * 2 * HIDDEN * shape.vocab_size)
    assert ModelWork.of(shape).training([(0, 12)], 12) == linear + 3 * seen


def test_shared_tokens_count_once_and_windows_limit_what_is_seen(shape: ModelShape) -> None:
    work = ModelWork.of(shape)
    apart = work.training([(0, 9), (0, 9)], 0)
    shared = work.training([(0, 5), (5, 9), (5, 9)], 0)
    assert apart - shared == 3 * sum(by_hand(shape, 0, 5))

    narrow = replace(shape, windows=(4,) * LAYERS)
    limited = ModelWork.of(narrow).training([(0, 3), (2, 9)], 0)
    seen = sum(min(place + 1, 4) for place in [*range(3), *range(2, 9)])
    products = by_hand(shape, 0, 3)[0] + by_hand(shape, 2, 9)[0]
    assert limited == 3 * (products + LAYERS * 2 * 2 * HEADS * shape.head_dim * seen)


def test_frozen_weights_have_no_gradient(configure: Configure, shape: ModelShape) -> None:
    policy = configure("policy.lora={rank: 2, alpha: 4, targets: [q_proj, down_proj]}").policy
    work = ModelWork.of(shape, policy.lora)
    assert policy.lora is not None
    sizes = adapter_tensors(shape, policy.lora).values()
    elements = LAYERS * (2 * HIDDEN + 2 * HEADS * shape.head_dim + 2 * FFN + 2 * HIDDEN)

    assert work.adapters == elements == sum(rows * columns for rows, columns in sizes)
    products, attention = by_hand(shape, 0, 5)
    head = 3 * 2 * HIDDEN * shape.vocab_size
    assert work.training([(0, 5)], 3) == 2 * (products + head) + 3 * attention + 6 * elements * 5


def test_scoring_is_a_forward_pass(configure: Configure, shape: ModelShape) -> None:
    segments, scored = [(0, 7), (3, 9)], 5
    products, attention = map(sum, zip(by_hand(shape, 0, 7), by_hand(shape, 3, 9), strict=True))
    forward = products + attention + scored * 2 * HIDDEN * shape.vocab_size
    work = ModelWork.of(shape)
    assert work.scoring(segments, scored) == forward == work.training(segments, scored) / 3

    policy = configure("policy.lora={rank: 2, alpha: 4, targets: [q_proj, down_proj]}").policy
    adapted = ModelWork.of(shape, policy.lora)
    elements = LAYERS * (2 * HIDDEN + 2 * HEADS * shape.head_dim + 2 * FFN + 2 * HIDDEN)
    assert adapted.scoring(segments, scored) == forward + 2 * elements * (7 + 6)
    assert adapted.scoring(segments, scored, adapters=False) == forward  # of the frozen model, the reference


def test_torch_counts_the_same_in_a_forward_pass(folder: Path, shape: ModelShape) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(12).unsqueeze(0))
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    assert ModelWork.of(shape).scoring([(0, 12)], 12) == counts["aten.mm"] + by_hand(shape, 0, 12)[1]


def test_experts_count_those_of_a_token() -> None:
    from tests.plan.published import shape_of

    shape = shape_of("Qwen3-30B-A3B")
    assert shape.moe is not None
    size = shape.head_dim
    products = shape.num_layers * (
        2 * shape.hidden_size * (shape.num_attention_heads + 2 * shape.num_key_value_heads) * size
        + 2 * shape.num_attention_heads * size * shape.hidden_size
        + 3 * 2 * shape.hidden_size * shape.moe.ffn_hidden_size * shape.moe.top_k
    )
    attention = shape.num_layers * 4 * shape.num_attention_heads * size

    assert ModelWork.of(shape).training([(0, 1)], 0) == 3 * (products + attention)


def test_generation_reads_the_prompt_of_a_group_once(shape: ModelShape) -> None:
    head = 2 * HIDDEN * shape.vocab_size
    group = [(9, 4), (7, 2)]  # prompts of 5
    parts = [(0, 5), (5, 8), (5, 6)]  # what is sampled last is not read
    expected = sum(sum(by_hand(shape, *part)) for part in parts) + 6 * head
    assert ModelWork.of(shape).generation([group]) == expected

    turns = [(9, 4), (9, 2)]  # what an environment says is of each sample
    expected = sum(sum(by_hand(shape, 0, 8)) for _ in turns) + 6 * head
    assert ModelWork.of(shape).generation([turns]) == expected
    assert ModelWork.of(shape).generation([[(5, 0)]]) == sum(by_hand(shape, 0, 5))


def test_the_peak_is_known_of_named_devices_only(configure: Configure) -> None:
    policy = configure("policy.precision=bfloat16").policy
    assert peak_tflops(policy, "NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops(policy, "NVIDIA H100 PCIe") is None
    assert peak_tflops(policy, None) is None
    assert peak_tflops(configure().policy, "NVIDIA H100 80GB HBM3") is None  # float32
    assert peak_tflops(configure("policy.peak_tflops=0.2").policy, None) == 0.2


def test_rates_are_of_a_device_and_its_stage(configure: Configure) -> None:
    values = {
        **{"flops/training": 6e12, "time/training": 2.0, "time/generation": 4.0, "time/step": 8.0},
        **{"flops/generation": 24e12, "generation/replicas": 3.0, "tflops/peak": 5.0},
    }
    gpus = ("policy.precision=bfloat16", "cluster.gpus_per_node=8", "policy.layout={data_parallel_size: 2}")
    vllm = "generation={backend: vllm, max_new_tokens: 8, replicas: 3, tensor_parallel_size: 2}"
    experiment = configure(*gpus, vllm)

    found = utilization(values, experiment)
    ahead = utilization(values, configure(*gpus, vllm, "algorithm.max_staleness=1"))
    unknown = utilization({k: v for k, v in values.items() if k != "tflops/peak"}, experiment)

    assert found == pytest.approx(
        {
            **{"tflops/training": 6 / 2 / 2, "mfu/training": 6 / 2 / 2 / 5},
            **{"tflops/generation": 24 / 4 / 6, "mfu/generation": 24 / 4 / 6 / 5},
        }
    )
    assert ahead["tflops/generation"] == pytest.approx(24 / 8 / 6)
    assert set(unknown) == {"tflops/training", "tflops/generation"}
    assert utilization({"time/training": 1.0}, experiment) == {}


def test_passes_before_an_update_have_rates(configure: Configure) -> None:
    values = {
        **{"flops/logprobs": 6e12, "flops/reference": 2e12, "flops/values": 3e12, "tflops/peak": 5.0},
        **{"time/logprobs": 2.0, "time/reference": 4.0, "time/values": 1.0, "time/training": 8.0},
    }
    gpus = ("policy.precision=bfloat16", "cluster.gpus_per_node=8", "policy.layout={data_parallel_size: 2}")
    vllm = "generation={backend: vllm, max_new_tokens: 8}"
    inside = configure(*gpus, vllm, "algorithm.kl.coefficient=0.1")
    own = configure(
        *(*gpus, vllm, "algorithm.name=ppo", "algorithm.kl.coefficient=0.1"),
        *("critic={layout: {}}", "reference={layout: {data_parallel_size: 4}}"),
    )
    # The policy's processes compute both within the stage of the logprobs.
    assert utilization(values, inside) == pytest.approx(
        {"tflops/logprobs": 8 / 2 / 2, "mfu/logprobs": 8 / 2 / 2 / 5}
    )
    assert utilization(values, own) == pytest.approx(
        {
            **{"tflops/logprobs": 6 / 2 / 2, "mfu/logprobs": 6 / 2 / 2 / 5},
            **{"tflops/reference": 2 / 4 / 4, "mfu/reference": 2 / 4 / 4 / 5},
            **{"tflops/values": 3 / 1 / 1, "mfu/values": 3 / 1 / 1 / 5},
        }
    )
    learned = configure(
        *(*gpus, "algorithm={name: dpo, num_steps: 1, batch_size: 2, reference: live}"),
        "data.train={name: arithmetic, digits: 2, size: 100}",
    )
    found = utilization(values | {"flops/training": 14e12}, learned)
    assert found["tflops/training"] == pytest.approx((14 + 2) / 8 / 2)
