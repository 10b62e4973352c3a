"""Logprobs of the distribution that top-k, top-p and min-p keep, against their definition in float64."""

import math

import pytest
import torch

from nemorl.config.generation import SamplingConfig
from nemorl.generation.sampling import Sampler
from nemorl.generation.types import SamplingParams
from nemorl.megatron import head
from nemorl.megatron.head import VocabularyShard
from tests.megatron.topk_cases import filtered_heads_over_ranks

TOKENS, HIDDEN, VOCABULARY, PADDED = 40, 8, 61, 64
WHOLE = VocabularyShard(start=0, num_real=VOCABULARY, group=None)
FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 9, "min_p": 0.2},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.1},
]


def inputs(scale=0.5):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator) * scale
    weight[40:50] = weight[30:40]  # tokens as likely as others, of another rank's columns
    # Of each row the most likely tokens, of which some are kept, and any.
    likely = (hidden @ weight[:VOCABULARY].t()).topk(20, dim=-1).indices[:, ::5]
    ids = torch.cat((likely, torch.randint(0, VOCABULARY, (TOKENS, 2), generator=generator)), dim=1)
    return hidden, weight, ids, torch.randn(2, TOKENS, ids.shape[1], generator=generator)


def kept_by_definition(logits, filters):
    """[M, V] bool, token by token: its rank, the mass of those above it, and its ratio to the first."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, values in enumerate(logits.tolist()):
        order = sorted(values, reverse=True)
        lowest = order[min(filters.get("top_k", len(order)), len(order)) - 1]
        weights = [math.exp(value - order[0]) if value >= lowest else 0.0 for value in values]
        total = sum(weights)
        for token, value in enumerate(values):
            above = sum(w for w, other in zip(weights, values, strict=True) if other > value)
            kept[row, token] = (
                value >= lowest
                and above < filters.get("top_p", 2.0) * total
                and math.exp(value - order[0]) >= filters.get("min_p", 0.0)
            )
    return kept


def expected(filters, temperature, scale=0.5):
    """Logprobs (-inf where dropped), entropies, and gradients by autograd in float64."""
    hidden, weight, ids, grads = inputs(scale)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight[:VOCABULARY].t() / temperature
    kept = kept_by_definition(logits.detach(), filters)
    total = logits.masked_fill(~kept, -math.inf).logsumexp(-1, keepdim=True)
    log_p = torch.where(kept, logits - total, 0.0)
    entropies = -torch.where(kept, log_p.exp() * log_p, 0.0).sum(-1)
    logprobs = log_p.gather(1, ids)
    ((grads[0] * logprobs).sum() + (grads[1, :, 0] * entropies).sum()).backward()
    logprobs = logprobs.detach().masked_fill(~kept.gather(1, ids), -math.inf)
    return logprobs, entropies.detach(), hidden.grad, weight.grad


def computed(filters, temperature, chunk_tokens, dtype, scale=0.5):
    hidden, weight, ids, grads = inputs(scale)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    logprobs, entropies, _ = head.token_logprobs(
        *(hidden, weight, ids, WHOLE),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=True,
        filters=SamplingConfig.model_validate(filters),
    )
    taken = logprobs.masked_fill(logprobs.isneginf(), 0.0)
    ((grads[0] * taken).sum() + (grads[1, :, 0] * entropies).sum()).backward()
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("temperature", "chunk_tokens"), [(1.0, 100), (0.7, 7)])
def test_logprobs_entropies_and_gradients_are_those_of_what_is_kept(filters, temperature, chunk_tokens):
    found = computed(filters, temperature, chunk_tokens, torch.float32)
    definition = expected(filters, temperature)
    assert definition[0].isneginf().any() or filters == {"top_k": 1000}, "some tokens are dropped"
    for mine, its in zip(found, definition, strict=True):
        torch.testing.assert_close(mine.double(), its, atol=1e-6, rtol=1e-6)


def test_top_p_takes_more_candidates_where_few_do_not_reach_its_mass(monkeypatch):
    monkeypatch.setattr(head, "_FIRST_CANDIDATES", 1)
    monkeypatch.setattr(head, "_CANDIDATE_GROWTH", 2)
    monkeypatch.setattr(head, "_FILTERED_ELEMENTS", 5 * PADDED)  # five rows at a time
    for scale in (0.1, 0.5):  # nearly equal probabilities, and few likely ones
        for filters in ({"top_p": 0.9}, {"top_k": 30, "top_p": 0.99}):
            found = computed(filters, 1.0, 16, torch.float32, scale)
            for mine, its in zip(found, expected(filters, 1.0, scale), strict=True):
                torch.testing.assert_close(mine.double(), its, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_embedded_engine_samples_from_what_is_kept(filters):
    hidden, weight, *_ = inputs()
    logits = hidden @ weight[:VOCABULARY].t()
    sampler = Sampler([SamplingParams(0.7, **filters)] * TOKENS, list(range(TOKENS)), torch.device("cpu"))
    sampled = sampler(logits, torch.from_numpy(sampler.uniform_bits([0] * TOKENS)))
    found, *_ = head.token_logprobs(
        *(hidden, weight, sampled.tokens[:, None], WHOLE),
        temperature=0.7,
        chunk_tokens=7,
        entropy=False,
        filters=SamplingConfig.model_validate(filters),
    )
    torch.testing.assert_close(found.squeeze(1), sampled.logprobs, atol=1e-5, rtol=1e-5)


def test_filters_that_keep_everything_change_nothing():
    plain = computed({}, 0.7, 7, torch.float32)
    for filters in ({"top_k": PADDED}, {"min_p": 1e-30}):
        for mine, its in zip(computed(filters, 0.7, 7, torch.float32), plain, strict=True):
            torch.testing.assert_close(mine, its, atol=0, rtol=0)


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.8}], ids=str)
def test_two_ranks_agree_with_one(pool, filters):
    """32 columns each; equal logits are on both ranks, and the second one has padding."""
    hidden, weight, ids, grads = inputs()
    arguments = (hidden, weight, ids, grads, VOCABULARY, SamplingConfig.model_validate(filters))
    (alone,) = pool.run(1, filtered_heads_over_ranks, *arguments)
    both = pool.run(2, filtered_heads_over_ranks, *arguments)
    definition = dict(zip(("logprobs", "entropies"), expected(filters, 0.7), strict=False))
    for rank in both:
        for name in ("logprobs", "entropies"):
            torch.testing.assert_close(rank[name], alone[name], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rank[name].double(), definition[name], atol=1e-6, rtol=1e-6)
    hidden_grad = both[0]["hidden_grad"] + both[1]["hidden_grad"]  # each has that of its own columns
    torch.testing.assert_close(hidden_grad, alone["hidden_grad"], atol=1e-5, rtol=1e-5)
    weight_grad = torch.cat([rank["weight_grad"] for rank in both])
    torch.testing.assert_close(weight_grad, alone["weight_grad"], atol=1e-5, rtol=1e-5)
