"""The likeliest tokens, and logprobs of given tokens with their gradients, against log_softmax in float64."""

import pytest
import torch

from nemorl.megatron.head import VocabularyShard, token_logprobs, top_logprobs
from tests.megatron.topk_cases import heads_over_ranks

TOKENS, HIDDEN, VOCABULARY, PADDED = 13, 8, 21, 24
WHOLE = VocabularyShard(start=0, num_real=VOCABULARY, group=None)


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator) * 2
    ids = torch.randint(0, VOCABULARY, (TOKENS, 4), generator=generator)
    ids[:, 3] = ids[:, 0]  # a token twice
    return hidden, weight, ids, torch.randn(TOKENS, 4, generator=generator)


def log_softmax(hidden, weight, temperature):
    return (hidden @ weight[:VOCABULARY].t() / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_logprobs_of_several_tokens_equal_log_softmax_with_its_gradient(chunk_tokens, temperature):
    hidden, weight, ids, grads = inputs()
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    log_p = log_softmax(*exact, temperature)
    (grads * log_p.gather(1, ids)).sum().backward()
    hidden.requires_grad_()
    weight.requires_grad_()
    found, entropies, _ = token_logprobs(
        hidden, weight, ids, WHOLE, temperature=temperature, chunk_tokens=chunk_tokens, entropy=True
    )
    (grads * found).sum().backward()
    expected = (log_p.gather(1, ids), -(log_p.exp() * log_p).sum(-1), exact[0].grad, exact[1].grad)
    for mine, its in zip((found, entropies, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(mine.double(), its, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
def test_top_is_that_of_the_whole_distribution(k):
    hidden, weight, *_ = inputs()
    ids, logprobs = top_logprobs(hidden, weight, k, WHOLE, temperature=0.7, chunk_tokens=4)
    values, places = log_softmax(hidden.double(), weight.double(), 0.7).topk(k, dim=-1)
    assert torch.equal(ids, places)
    torch.testing.assert_close(logprobs.double(), values, atol=2e-5, rtol=1e-5)


def test_nothing_to_score():
    hidden, weight, *_ = inputs()
    nothing = torch.zeros((0, 4), dtype=torch.long)
    options = {"temperature": 1.0, "chunk_tokens": 4}
    found, entropies, _ = token_logprobs(hidden[:0], weight, nothing, WHOLE, **options, entropy=True)
    assert found.shape == (0, 4)
    assert entropies.shape == (0,)
    assert top_logprobs(hidden[:0], weight, 2, WHOLE, **options)[0].shape == (0, 2)


def test_two_ranks_agree_with_one(pool):
    """12 columns each, of which 3 of the second pad the vocabulary; k is more than a rank's real columns."""
    hidden, weight, ids, grads = inputs()
    (alone,) = pool.run(1, heads_over_ranks, hidden, weight, ids, grads, VOCABULARY, 14)
    both = pool.run(2, heads_over_ranks, hidden, weight, ids, grads, VOCABULARY, 14)
    for rank in both:
        assert torch.equal(rank["top_ids"], alone["top_ids"])
        for name in ("top", "logprobs", "entropies"):
            torch.testing.assert_close(rank[name], alone[name], atol=1e-5, rtol=1e-5)
        squares = log_softmax(hidden.double(), weight.double(), 0.7).exp().square().sum(-1)
        torch.testing.assert_close(rank["collisions"].double(), squares, atol=1e-6, rtol=1e-6)
    # Each has the gradient of its own columns.
    hidden_grad = both[0]["hidden_grad"] + both[1]["hidden_grad"]
    torch.testing.assert_close(hidden_grad, alone["hidden_grad"], atol=1e-5, rtol=1e-5)
    weight_grad = torch.cat([rank["weight_grad"] for rank in both])
    torch.testing.assert_close(weight_grad, alone["weight_grad"], atol=1e-5, rtol=1e-5)
