"""The policy samples its own tokens: what it samples is what its own forward pass says, in every layout."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nemorl.cluster.group import Mesh
from nemorl.config.policy import LayoutConfig, MoeConfig
from nemorl.generation.types import Completion, GenerationRequest, SamplingParams
from nemorl.megatron.decode import copies_that_share_experts, copy_leaders
from nemorl.trajectories import StopReason
from tests.megatron.conftest import Model
from tests.megatron.decode_cases import (
    Sampled,
    cache_that_grew,
    logits_with_and_without_cache,
    request,
    sample,
    sample_and_train,
    two_stages,
)
from tests.megatron.examples import VOCABULARY, layout, policy_config
from tests.megatron.pool import Pool
from tests.selection import in_all

GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(VOCABULARY) for _ in range(length)] for length in (5, 9, 5, 1, 20, 5)]
PROMPTS[2] = PROMPTS[0]  # read once for both
PROMPTS[5] = PROMPTS[2]  # copied from the row of one that runs
NEW_TOKENS = (4, 10, 12, 7, 10, 10)  # rows end at different times, and others move into their place

FAMILIES = (
    "llama-rope3",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3",
    "deepseek-v3",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
)
LAYOUTS = {
    "TP2": ("llama-tied", layout(tp=2)),
    "TP2 of three heads": ("qwen2", layout(tp=2)),
    "TP2-SP of windows": ("gemma3", layout(tp=2, sp=True)),
    "TP2-SP of latents": ("deepseek-v3", layout(tp=2, sp=True)),
    "TP2-SP of sinks": ("gpt-oss", layout(tp=2, sp=True)),
    "PP2": ("llama-tied", layout(pp=2)),
    "DP2": ("qwen3", layout(dp=2)),
    "DP2 EP2": ("qwen3-moe", layout(dp=2, ep=2)),
    "PP2 DP2 EP2": ("gpt-oss", layout(pp=2, dp=2, ep=2)),
    "TP2-SP PP2": ("qwen3-moe", layout(tp=2, sp=True, pp=2)),
    "TP2-SP ETP2": ("mixtral", layout(tp=2, sp=True, etp=2)),
}

# Rounding of a logprob in float32. It depends on which requests are batched together, and so on timing.
# Metrics near 0 such as `logprob_gap/k1` consist of nothing else and are compared absolutely.
ROUNDING = 1e-5

Sample = Callable[[str, LayoutConfig, SamplingParams], dict[str, Completion]]


def asked(sampling: SamplingParams) -> list[GenerationRequest]:
    return [request(str(i), prompt, sampling, NEW_TOKENS[i]) for i, prompt in enumerate(PROMPTS)]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens by transformers, the whole sequence again for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(
    pool: Pool, model: Model, family: str, where: LayoutConfig, sampling: SamplingParams
) -> tuple[list[Sampled], dict[str, Completion]]:
    config = policy_config(model(family)[1], layout=where)
    ranks = pool.run(where.world_size, sample, config, asked(sampling))
    return ranks, {name: c for rank in ranks for name, c in rank.completions.items()}


def assert_greedy(model: PreTrainedModel, completions: dict[str, Completion]) -> None:
    assert len(completions) == len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        assert completions[str(i)].tokens.tolist() == greedy(model, prompt, NEW_TOKENS[i]), f"prompt {i}"


def assert_own_logprobs(ranks: list[Sampled]) -> None:
    assert all(rank.gap.gap_max < 1e-4 for rank in ranks)
    assert ranks[0].gap.num_tokens == sum(NEW_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_the_argmax_of_the_full_forward_pass(
    pool: Pool, model: Model, family: str
) -> None:
    ranks, completions = run(pool, model, family, layout(), GREEDY)
    assert_greedy(model(family)[0].eval(), completions)
    assert_own_logprobs(ranks)
    assert ranks[0].kv_tokens == 0, "a stage that ends with nothing in flight gives its memory back"


@pytest.mark.parametrize(("family", "where"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_samples_what_one_process_does(
    pool: Pool, model: Model, family: str, where: LayoutConfig
) -> None:
    ranks, completions = run(pool, model, family, where, GREEDY)
    assert_greedy(model(family)[0].eval(), completions)
    assert_own_logprobs(ranks)
    assert [rank for rank, seen in enumerate(ranks) if seen.leads] == list(copy_leaders(where))

    ranks, warm = run(pool, model, family, where, WARM)
    _, alone = run(pool, model, family, layout(), WARM)
    assert_own_logprobs(ranks)
    for name, completion in warm.items():
        assert completion.tokens.tolist() == alone[name].tokens.tolist()
        assert set(completion.versions.tolist()) == {7}
    assert any(warm[name].tokens.tolist() != completions[name].tokens.tolist() for name in warm)


@pytest.mark.parametrize(
    ("family", "where", "format"),
    [
        ("llama-tied", layout(tp=2), "int8"),
        pytest.param("qwen3-moe", layout(dp=2, ep=2), "int8", marks=pytest.mark.ci),
        pytest.param("llama-wide", layout(tp=2, sp=True, pp=2), "fp8_block", marks=pytest.mark.ci),
    ],
)
def test_rounded_weights_sample(
    pool: Pool, model: Model, family: str, where: LayoutConfig, format: str
) -> None:
    """The gap to the trainer, which rounds them in its passes, is that of unquantized weights."""
    quantization = {"format": format, "train": "fake"}
    config = policy_config(model(family)[1], layout=where, quantization=quantization)
    ranks = pool.run(where.world_size, sample, config, asked(WARM))
    assert_own_logprobs(ranks)


def test_rounded_inputs_sample(pool: Pool, model: Model) -> None:
    """A few lie at the border of two values, where the order of a sum decides."""
    family, where = LAYOUTS["TP2"]
    quantization = {"format": "int8", "train": "fake", "activations": True}
    config = policy_config(model(family)[1], layout=where, quantization=quantization)
    ranks = pool.run(where.world_size, sample, config, asked(WARM))
    assert ranks[0].gap.gap_mean < 1e-3


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3", "gpt-oss"])
def test_a_step_from_the_cache_is_the_pass_over_the_whole(pool: Pool, model: Model, family: str) -> None:
    tokens = [DRAW.randrange(VOCABULARY) for _ in range(20)]
    config = policy_config(model(family)[1])
    ((cached, drafted, alone),) = pool.run(1, logits_with_and_without_cache, config, tokens, 7)
    assert cached.shape == drafted.shape == alone.shape == (14, VOCABULARY)
    torch.testing.assert_close(cached, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafted, alone, rtol=1e-4, atol=1e-4)


def test_a_request_ends_by_its_own_tokens_limits_and_deadline(pool: Pool, model: Model) -> None:
    _, whole = run(pool, model, "qwen3", layout(), GREEDY)
    expected = whole["1"].tokens.tolist()
    stop = expected[4]
    requests = [
        request("1", PROMPTS[1], GREEDY, 10, stop_token_ids=frozenset({stop})),
        request("2", PROMPTS[1], GREEDY, 3),
        request("3", [1] * 45, GREEDY, 10),  # policy.max_sequence_length is 48
        request("4", PROMPTS[1], GREEDY, 10, deadline_seconds=0.0),
    ]
    ((ended, *_),) = (pool.run(1, sample, policy_config(model("qwen3")[1]), requests),)
    found = ended.completions
    assert found["1"].tokens.tolist() == expected[: expected.index(stop) + 1]
    assert (found["1"].stop, found["2"].stop) == (StopReason.STOP, StopReason.LENGTH)
    assert found["2"].tokens.tolist() == expected[:3]
    assert (len(found["3"].tokens), found["3"].stop) == (3, StopReason.LENGTH)
    assert (len(found["4"].tokens), found["4"].stop) == (0, StopReason.ABORT)


@pytest.mark.parametrize(
    ("family", "where"), [("qwen3", layout(tp=2)), ("qwen3-moe", layout(pp=2))], ids=["TP2", "PP2 of experts"]
)
@torch.no_grad()
def test_what_is_in_flight_continues_in_the_next_stage(
    pool: Pool, model: Model, family: str, where: LayoutConfig
) -> None:
    original, folder = model(family)
    config = policy_config(folder, layout=where, moe=MoeConfig(router_replay=family == "qwen3-moe"))
    long = request("1", PROMPTS[1], GREEDY, 30, progress_tokens=4)
    found = [answer for answer in pool.run(2, two_stages, config, long) if answer is not None]
    ((completion, progress),) = found
    tokens, versions = completion.tokens.tolist(), completion.versions.tolist()
    assert tokens[:10] == greedy(original.eval(), PROMPTS[1], 10)
    assert len(tokens) == 30
    assert versions == sorted(versions)
    assert set(versions) == {3, 4}
    if family == "qwen3-moe":
        experts = own_experts(original.eval(), [*PROMPTS[1], *tokens][:-1]).numpy()
        np.testing.assert_array_equal(completion.routed_experts, experts)
        told = np.concatenate([p.routed_experts for p in progress])
        read = len(PROMPTS[1]) + sum(len(p.tokens) for p in progress) - 1
        np.testing.assert_array_equal(told, experts[:read])


def own_experts(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, layers with experts, 2] those that transformers' routers choose, in order of their numbers."""
    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort().values for layer in logits], 1)


@pytest.mark.parametrize(
    "where",
    [layout(), layout(dp=2, ep=2), *in_all(layout(tp=2, sp=True, pp=2))],
    ids=["one", "DP2 EP2", "TP2-SP PP2"],
)
@torch.no_grad()
def test_what_the_routers_chose_is_returned_and_replayed(
    pool: Pool, model: Model, where: LayoutConfig
) -> None:
    original, folder = model("qwen3-moe")
    seen = {}
    for replay in (False, True):
        config = policy_config(folder, layout=where, moe=MoeConfig(router_replay=replay))
        seen[replay] = pool.run(where.world_size, sample_and_train, config, asked(SamplingParams()))
    completions = {name: c for rank in seen[True] for name, c in rank[0].items()}
    assert len(completions) == len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        completion = completions[str(i)]
        read = [*prompt, *completion.tokens.tolist()][:-1]  # the last token was not
        assert completion.routed_experts is not None
        assert completion.routed_experts.dtype == np.int16
        np.testing.assert_array_equal(completion.routed_experts, own_experts(original.eval(), read))
    for (plain, _, without), (_, gap, stats) in zip(seen[False], seen[True], strict=True):
        assert all(completion.routed_experts is None for completion in plain.values())
        assert gap.gap_max < ROUNDING
        assert stats.grad_norm == pytest.approx(without.grad_norm, rel=1e-4)
        rounding = 2 * ROUNDING * where.data_parallel_size  # both runs round; each copy's weights sum to 1
        assert stats.sums == pytest.approx(without.sums, rel=1e-4, abs=rounding)
        assert stats.experts is not None
        assert without.experts is not None
        assert stats.experts == pytest.approx(without.experts)


def test_replay_takes_the_gap_that_rounding_makes_of_choices(pool: Pool, model: Model) -> None:
    """In bfloat16 some tokens go to other experts when the whole sequence is read at once."""
    asked = [request(str(i), [DRAW.randrange(VOCABULARY) for _ in range(6)], WARM, 40) for i in range(12)]
    gaps = []
    for replay in (False, True):
        moe = MoeConfig(router_replay=replay)
        config = policy_config(model("deepseek-v3")[1], precision="bfloat16", moe=moe)
        gaps.append(pool.run(1, sample, config, asked)[0].gap)
    plain, replayed = gaps
    assert plain.num_tokens == replayed.num_tokens == 12 * 40
    assert replayed.gap_mean <= plain.gap_mean
    assert replayed.gap_max < min(0.2, plain.gap_max)


def test_experts_are_reported_from_where_they_are_unknown(pool: Pool, model: Model) -> None:
    config = policy_config(model("qwen3-moe")[1], moe=MoeConfig(router_replay=True))
    whole = request("1", PROMPTS[1], GREEDY, 6)
    later = request("1", PROMPTS[1], GREEDY, 6, routed_experts_from=7)
    both = [pool.run(1, sample, config, [one])[0].completions["1"].routed_experts for one in (whole, later)]
    assert [len(rows) for rows in both] == [14, 7]
    np.testing.assert_array_equal(both[0][7:], both[1])


def test_a_leader_is_where_the_mesh_says_that_outputs_are() -> None:
    for where in (layout(), layout(tp=2, dp=2, pp=2), layout(dp=4), layout(pp=3, dp=2)):
        assert copy_leaders(where) == Mesh.of(where).output_ranks


@pytest.mark.parametrize(
    ("where", "copies"),
    [
        (layout(tp=2, dp=2), 1),
        (layout(dp=4, ep=2), 2),
        (layout(tp=2, dp=4, ep=2), 1),
        (layout(tp=2, dp=4, ep=4, etp=2), 4),
        (layout(tp=2, dp=3, ep=3), 3),  # the middle copy has experts with both others
    ],
)
def test_copies_share_experts_where_their_groups_overlap(where: LayoutConfig, copies: int) -> None:
    assert copies_that_share_experts(where) == copies


@pytest.mark.parametrize(("rows", "length"), [(1, 100), (5, 3), (4, 500)])
def test_a_cache_that_grows_keeps_what_it_has(rows: int, length: int) -> None:
    kept, cache = cache_that_grew(rows, length)
    key, value = cache.read(0, range(1), 3)
    assert cache.length >= length
    np.testing.assert_array_equal(key[0].transpose(0, 1)[1:4], kept)
    np.testing.assert_array_equal(value[0].transpose(0, 1)[1:4], -kept)
    assert not key[0, :, 0].any(), "the place before the first token is empty"


def test_rows_are_copied_up_to_a_length() -> None:
    kept, cache = cache_that_grew(3, 3)
    cache.copy_rows([0], [2], 2)
    key, _ = cache.read(0, range(3), 3)
    np.testing.assert_array_equal(key[2].transpose(0, 1)[1:3], kept[:2])
    assert not key[2, :, 3].any()
    assert not key[1].any()


def test_a_cache_says_what_fits() -> None:
    _, cache = cache_that_grew(3, 3)
    assert cache.fits(64, 64)
    assert not cache.fits(65, 64)
    cache.release()
    assert cache.num_tokens == 0
