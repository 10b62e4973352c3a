"""Logprobs, entropies and their gradients against log_softmax of the whole logits in float64."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.megatron import head
from nemorl.megatron.head import VocabularyShard
from tests.algorithms.packed import ragged

TOKENS, HIDDEN, VOCABULARY, PADDED = 13, 8, 21, 24
WHOLE = VocabularyShard(start=0, num_real=VOCABULARY, group=None)


def token_logprobs(hidden, weight, labels, shard, **options):
    """Of one id for each hidden state."""
    logprobs, entropies, _ = head.token_logprobs(hidden, weight, labels[:, None], shard, **options)
    return logprobs.squeeze(1), entropies


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator) * 2
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    grads = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, labels, grads


def expected(temperature):
    """Logprobs, entropies, and gradients of hidden states and weight, by autograd in float64."""
    hidden, weight, labels, grads = inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight[:VOCABULARY].t() / temperature).log_softmax(-1)
    logprobs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    (grads[0] * logprobs + grads[1] * entropies).sum().backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
def test_any_chunk_size_equals_log_softmax(chunk_tokens, temperature):
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropies = token_logprobs(
        hidden, weight, labels, WHOLE, temperature=temperature, chunk_tokens=chunk_tokens, entropy=True
    )
    (grads[0] * logprobs + grads[1] * entropies).sum().backward()

    for mine, its in zip((logprobs, entropies, hidden.grad, weight.grad), expected(temperature), strict=True):
        torch.testing.assert_close(mine.double(), its, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 13])
def test_collisions_are_sums_of_squared_probabilities_without_a_gradient(chunk_tokens):
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    options = {"temperature": 0.7, "chunk_tokens": chunk_tokens, "entropy": False, "collision": True}
    found = head.token_logprobs(hidden, weight, labels[:, None], WHOLE, **options)
    p = (hidden.detach().double() @ weight[:VOCABULARY].double().t() / 0.7).softmax(-1)
    torch.testing.assert_close(found.collisions.double(), (p * p).sum(-1), atol=1e-6, rtol=1e-6)
    assert found.entropies is None
    assert not found.collisions.requires_grad

    (grads[0] * found.logprobs.squeeze(1)).sum().backward()
    alone = inputs()[0].requires_grad_()
    logprobs, _ = token_logprobs(alone, weight, labels, WHOLE, **options | {"collision": False})
    (grads[0] * logprobs).sum().backward()
    assert torch.equal(hidden.grad, alone.grad)


def test_many_chunks_round_no_more_than_one_in_bfloat16():
    """The weight's gradient of 4,096 tokens in chunks of 8, against the same in float64."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4096, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).bfloat16()
    labels = torch.randint(0, VOCABULARY, (4096,), generator=generator)

    exact = weight.double().requires_grad_()
    log_p = (hidden.double() @ exact[:VOCABULARY].t()).log_softmax(-1)
    log_p.gather(1, labels[:, None]).sum().backward()

    errors = {}
    for chunk_tokens in (4096, 8):
        rounded = weight.clone().requires_grad_()
        logprobs, _ = token_logprobs(
            hidden, rounded, labels, WHOLE, temperature=1.0, chunk_tokens=chunk_tokens, entropy=False
        )
        logprobs.sum().backward()
        errors[chunk_tokens] = float((rounded.grad.double() - exact.grad).norm() / exact.grad.norm())
    assert errors[8] < 1.2 * errors[4096] < 0.01


def test_products_in_float32_lose_nothing_of_the_weight_gradient_between_chunks(monkeypatch):
    """Error of the head's bfloat16 gradient, by the norm, against the same sum in float64."""
    generator = torch.Generator().manual_seed(0)
    tokens, columns = 4096, VocabularyShard(start=0, num_real=64, group=None)
    hidden = torch.randn(tokens, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 64, (tokens,), generator=generator)
    rounded: list[torch.Tensor] = []  # gradients of logits, as the product takes them
    matrix_product = torch.mm

    def product(left, right, **options):
        if options.pop("out_dtype", None) is not None:
            rounded.append(left)
            return matrix_product(left.float(), right.float())
        return matrix_product(left, right, **options)

    monkeypatch.setattr(head.torch, "mm", product)

    def gradient(float32_products):
        monkeypatch.setattr(head, "has_float32_products", lambda device: float32_products)
        weight = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True)
        logprobs, _ = token_logprobs(
            hidden, weight, labels, columns, temperature=1.0, chunk_tokens=16, entropy=False
        )
        logprobs.sum().backward()
        return weight.grad.double()

    found = {products: gradient(products) for products in (False, True)}
    exact = torch.cat(rounded, dim=1).double() @ hidden.double()
    error = {products: float((one - exact).norm() / exact.norm()) for products, one in found.items()}
    nearest = float((exact.bfloat16().double() - exact).norm() / exact.norm())
    assert error[True] == pytest.approx(nearest, rel=1e-3)
    assert error[False] > 1.3 * error[True], error


@pytest.mark.parametrize("chunk_tokens", [4, 13])
def test_without_entropy_only_logprobs_have_gradients(chunk_tokens):
    hidden, weight, labels, grads = inputs()
    hidden.requires_grad_()
    logprobs, entropies = token_logprobs(
        hidden, weight, labels, WHOLE, temperature=1.0, chunk_tokens=chunk_tokens, entropy=False
    )
    assert entropies is None
    (grads[0] * logprobs).sum().backward()

    exact = inputs()[0].double().requires_grad_()
    log_p = (exact @ weight[:VOCABULARY].double().t()).log_softmax(-1)
    (grads[0] * log_p.gather(1, labels[:, None]).squeeze(1)).sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=2e-5, rtol=1e-5)


class HostReads(TorchDispatchMode):
    """Counts values that the host waits for: each ends what a GPU has queued."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_no_value_is_read_by_the_host_between_the_forward_and_the_backward_pass(coefficient):
    batch = ragged(0)
    hidden = torch.randn(batch.num_tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, requires_grad=True)
    loss = PolicyLoss(ClipLossConfig(), entropy_coefficient=coefficient)
    with HostReads() as reads:
        logprobs, entropies = token_logprobs(
            *(hidden, weight, batch.tokens, WHOLE), temperature=1.0, chunk_tokens=7, entropy=True
        )
        loss(batch, logprobs, entropies).loss.backward()
    assert hidden.grad.abs().max() > 0
    assert reads.count == 0


def test_no_tokens_give_no_logprobs_and_zero_gradients():
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(PADDED, HIDDEN, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.long)
    logprobs, _ = token_logprobs(
        hidden, weight, labels, WHOLE, temperature=1.0, chunk_tokens=4, entropy=False
    )
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_exist_for_one_chunk_only():
    tokens, vocabulary, chunk = 512, 300, 16
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    shard = VocabularyShard(0, vocabulary, None)
    with LargestTensor() as largest:
        logprobs, entropies = token_logprobs(
            hidden, weight, labels, shard, temperature=1.0, chunk_tokens=chunk, entropy=True
        )
        (logprobs.sum() + entropies.sum()).backward()
    # Next to a chunk's logits there are hidden states and weights, which are smaller here.
    assert max(tokens, vocabulary) * HIDDEN < chunk * vocabulary < tokens * vocabulary
    assert largest.elements == chunk * vocabulary


MODES = ["logprobs", "backward", "entropy"]


def peak_bytes(tokens: int, vocabulary: int, chunk: int, mode: str) -> int:
    """What a process of its own has most in memory for its logprobs, beyond their inputs and gradients."""
    numbers = map(str, (tokens, vocabulary, chunk))
    command = [sys.executable, "-m", "tests.megatron.head_memory", *numbers, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("mode", MODES)
def test_two_chunks_of_logits_are_in_memory_at_one_time(mode):
    tokens, vocabulary, chunk = 4096, 20_000, 512
    bytes_of_chunk = chunk * vocabulary * 4

    # Less than half a chunk is for the gradients of this pass and what torch allocates once.
    assert peak_bytes(tokens, vocabulary, chunk, mode) < 2.5 * bytes_of_chunk
    assert tokens / chunk > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_memory_of_a_long_batch_and_a_large_vocabulary(mode):
    """All logits would take 19.7 GB in float32."""
    assert peak_bytes(32_768, 150_000, 1024, mode) < 2.5 * 1024 * 150_000 * 4
