"""Continuous batching: what is sampled, no matter who shares the batch."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemorl.config.generation import TorchGenerationConfig
from nemorl.device import prefill_tokens
from nemorl.generation.torch_engine.engine import TorchEngine
from nemorl.generation.types import RequestRefused, SamplingParams
from nemorl.models import kv_cache
from nemorl.models.kv_cache import PAGE_TOKENS, share_beginnings
from nemorl.models.registry import load_shape
from nemorl.trajectories import StopReason
from tests.generation.examples import (
    GREEDY,
    VOCABULARY,
    Clock,
    Prompts,
    assert_sampled_by_probability,
    finish,
    random_weights,
    request,
    serve,
    small_engine,
)
from tests.generation.test_sampling import allowed_by_loop

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=12),
    SamplingParams(temperature=1.4, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.02),
    GREEDY,
]


def engine_of(model, **config):
    engine = TorchEngine(
        load_shape(model.folder),
        TorchGenerationConfig(**config),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=256,
    )
    engine.model.load(model.folder)
    return engine


def mixed_requests(count, seed=0, **fields):
    prompts = Prompts(seed).several(count, 1, 40)
    return [
        request(prompt, f"{i}", SAMPLINGS[i % len(SAMPLINGS)], 1 + (7 * i) % 23, seed=i, **fields)
        for i, prompt in enumerate(prompts)
    ]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, completion in left.items():
        assert completion.tokens.tolist() == right[name].tokens.tolist(), name
        # Other neighbors in a batch mean other kernels: float32 rounding of logits of size 10.
        np.testing.assert_allclose(completion.logprobs, right[name].logprobs, atol=5e-5)
        assert completion.stop == right[name].stop


def test_greedy_equals_transformers_generate(hf_model):
    prompts = Prompts(1).several(6, 3, 30)
    got = serve(
        engine_of(hf_model, max_batch_size=4),
        [request(p, f"{i}", GREEDY, max_new_tokens=20) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.tolist()])
        with torch.no_grad():
            whole = hf_model.network.generate(
                ids, do_sample=False, max_new_tokens=20, attention_mask=ids * 0 + 1
            )
        assert got[f"{i}"].tokens.tolist() == whole[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_one_forward_pass_over_the_whole(hf_model):
    requests = mixed_requests(18)
    completions = serve(engine_of(hf_model, max_batch_size=5), requests)
    for one in requests:
        completion = completions[one.id]
        text = [*one.prompt.tolist(), *completion.tokens.tolist()]
        rows = hf_model.logprobs(text)[len(one.prompt) - 1 : -1]
        for row, token, logprob in zip(rows, completion.tokens, completion.logprobs, strict=True):
            if one.sampling.temperature == 0:
                want = row[token].item()
                assert token == row.argmax()
            else:
                want = np.log(allowed_by_loop(row, one.sampling)[int(token)])
            assert logprob == pytest.approx(want, abs=1e-4)


def test_many_seeds_on_one_prompt_give_the_distribution():
    draws = 4000
    prompt = Prompts(5).one(9)
    params = SamplingParams(temperature=1.5, top_k=8)
    engine = small_engine(max_batch_size=512)
    completions = serve(
        engine, [request(prompt, f"{i}", params, max_new_tokens=1, seed=i) for i in range(draws)]
    )
    counts = Counter(int(c.tokens[0]) for c in completions.values())
    want = {}
    for completion in completions.values():
        want[int(completion.tokens[0])] = float(np.exp(completion.logprobs[0]))
    assert len(want) == 8
    assert sum(want.values()) == pytest.approx(1, abs=1e-5)
    assert sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in want.items()) < 7 + 4 * np.sqrt(14)


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 16, 64])
def test_results_do_not_depend_on_the_batch(max_batch_size):
    requests = mixed_requests(40)
    alone = {}
    for one in requests:
        alone |= serve(small_engine(), [one])
    assert_same(serve(small_engine(max_batch_size=max_batch_size), requests), alone)
    assert_same(serve(small_engine(max_batch_size=max_batch_size), requests[::-1]), alone)


@pytest.mark.parametrize("longest", [40, 380])
def test_logprobs_do_not_depend_on_who_shares_the_batch(longest):
    requests = [
        request(prompt, f"{i}", SAMPLINGS[i % len(SAMPLINGS)], 1 + (7 * i) % 23, seed=i)
        for i, prompt in enumerate(Prompts(2).several(24, 1, longest))
    ]
    small = small_engine(max_batch_size=3, max_sequence_length=500)
    large = small_engine(max_batch_size=24, max_sequence_length=500)
    left, right = serve(small, requests), serve(large, requests[::-1])
    for name, completion in left.items():
        # Equal to the bit on the processors tried; another one's kernels may round the last digit again.
        np.testing.assert_allclose(completion.logprobs, right[name].logprobs, rtol=0, atol=2e-6, err_msg=name)


def test_sequences_join_and_leave_at_any_step():
    requests = mixed_requests(30, seed=4)
    together = serve(small_engine(), requests)
    engine = small_engine(max_batch_size=6)
    completions, line, most = {}, iter(requests), 0
    for step in itertools.count():
        for one in itertools.islice(line, 1 + step % 3):
            engine.add(one)
        completions |= {c.id: c for c in engine.step()}
        most = max(most, engine.num_running)
        if len(completions) == len(requests):
            break
    assert_same(completions, together)
    assert most == 6


def test_identical_prompts_are_read_once_and_sampled_as_if_each_were_alone():
    prompt, other = Prompts(6).one(21), Prompts(7).one(13)
    group = [request(prompt, f"{i}", max_new_tokens=12, seed=i) for i in range(10)]
    requests = [*group[:5], request(other, "other", max_new_tokens=30), *group[5:]]
    engine = small_engine(max_batch_size=64)
    shared = serve(engine, requests)
    assert engine.take_stats().prompt_tokens == 21 + 13
    alone = {}
    for one in requests:
        alone |= serve(small_engine(), [one])
    assert_same(shared, alone)
    assert len({tuple(shared[f"{i}"].tokens) for i in range(10)}) > 5


@pytest.mark.parametrize("restart", [False, True])
def test_groups_read_their_prompts_once_in_a_step_and_sample_what_they_would_have_sampled(
    monkeypatch, restart
):
    """Rows move as sequences end, new groups join, and new weights come in the middle."""
    shared = []

    def watched(*arguments):
        found = share_beginnings(*arguments)
        shared.append(found is not None)
        return found

    def sampled(fewest):
        monkeypatch.setattr(kv_cache, "_FEWEST_PLACES", fewest)
        engine = small_engine(max_batch_size=7, max_sequence_length=500)
        for group, prompt in enumerate(Prompts(5).several(4, 100, 300)):
            for sample in range(4):
                name, tokens = f"{group}-{sample}", 3 + 5 * sample + group
                engine.add(request(prompt, name, SAMPLINGS[sample], tokens, seed=4 * group + sample))
        completions = {c.id: c for _ in range(9) for c in engine.step()}
        random_weights(engine.model, 1)
        engine.commit(1, restart=restart)
        return completions | finish(engine)

    monkeypatch.setattr(kv_cache, "share_beginnings", watched)
    apart = sampled(10**9)
    assert not any(shared)
    together = sampled(0)
    assert shared.count(True) > 10
    assert_same(together, apart)


def test_sequences_of_a_suspended_engine_continue_when_its_cache_was_freed():
    requests = [replace(one, deadline_seconds=5.0) for one in mixed_requests(8)]
    clock = Clock()
    engine = small_engine(max_batch_size=3, clock=clock)
    for one in requests:
        engine.add(one)
    completions = {}
    for version in range(1, 60):
        completions |= {c.id: c for _ in range(2) for c in engine.step()}
        engine.suspend()
        engine._runner.cache.release()
        clock.now += 60.0
        engine.revive(version)
    assert_same(completions, serve(small_engine(), mixed_requests(8)))
    versions = completions["3"].versions.tolist()  # of 22 tokens
    assert versions == sorted(versions)
    assert len(set(versions)) > 9

    late = replace(requests[3], id="late")
    engine.add(late)
    engine.step()
    engine.suspend()
    clock.now += 60.0
    engine.revive(60)
    clock.now += 4.9
    assert engine.step() == []
    clock.now += 0.2
    assert [(c.id, c.stop) for c in engine.step()] == [("late", StopReason.ABORT)]


def test_a_prompt_that_runs_already_is_copied_from_pages_while_the_weights_are_the_same():
    prompt = Prompts(6).one(21)
    group = [request(prompt, f"{i}", max_new_tokens=10 + i, seed=i) for i in range(9)]
    engine = small_engine(max_batch_size=3)
    shared = serve(engine, group)
    assert engine.take_stats().prompt_tokens == 21 + 6 * (21 - 2 * PAGE_TOKENS)
    assert_same(shared, serve(small_engine(max_batch_size=64), group))

    engine.add(group[0])
    engine.step()
    random_weights(engine.model, seed=1)
    engine.commit(1)
    engine.add(request(prompt, "new", GREEDY, max_new_tokens=5))
    completions = finish(engine)
    assert engine.take_stats().prompt_tokens == 21 - 2 * PAGE_TOKENS + 21
    expected = serve(small_engine(seed=1), [request(prompt, "new", GREEDY, max_new_tokens=5)])
    assert completions["new"].tokens.tolist() == expected["new"].tokens.tolist()


def test_the_next_turn_of_a_conversation_begins_with_the_pages_of_the_last():
    engine, plain = small_engine(), small_engine(max_cached_tokens=0)
    text, read = Prompts(3).one(30), []
    for turn in range(4):
        ask = request(text, f"{turn}", max_new_tokens=9, seed=turn)
        (got,), (want,) = serve(engine, [ask]).values(), serve(plain, [ask]).values()
        assert got.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=5e-5)
        read.append((engine.take_stats().prompt_tokens, plain.take_stats().prompt_tokens))
        text = np.concatenate([text, got.tokens, Prompts(turn).one(5)])
    # All but the last token of a turn have keys and values, in pages of 8: 38, 52, 66 of 44, 58, 72.
    assert read == [(30, 30), (44 - 32, 44), (58 - 48, 58), (72 - 64, 72)]


def test_prompts_with_a_common_beginning_wait_for_the_first_of_them_and_read_their_own_ends():
    begin = Prompts(4).one(40)
    prompts = [np.concatenate([begin, Prompts(i).one(3 + i)]) for i in range(5)]
    requests = [request(prompt, f"{i}", seed=i) for i, prompt in enumerate(prompts)]
    engine = small_engine()
    assert_same(serve(engine, requests), serve(small_engine(max_cached_tokens=0), requests))
    assert engine.take_stats().prompt_tokens == 40 + sum(range(3, 8))


def test_pages_hold_no_more_than_their_limit_and_are_lost_in_time():
    engine = small_engine(max_cached_tokens=10 * PAGE_TOKENS)
    requests = [request(prompt, f"{i}", seed=i) for i, prompt in enumerate(Prompts(2).several(30, 20, 150))]
    assert_same(serve(engine, requests), serve(small_engine(max_cached_tokens=0), requests))
    assert all(stored.shape[1] == 10 for stored in engine.model.cache._pages.values())


def test_pages_of_other_weights_are_never_read():
    prompt = Prompts(6).one(50)
    engine = small_engine()
    running = request(prompt, "running", GREEDY, max_new_tokens=20)
    engine.add(running)
    engine.step()
    random_weights(engine.model, seed=1)
    engine.commit(1)
    finish(engine)  # over keys and values of both versions
    ask = request(prompt, "new", GREEDY, max_new_tokens=5)
    assert_same(serve(engine, [ask]), serve(small_engine(seed=1), [ask]))


@dataclass
class KnowingDrafter:
    """Drafts what is known to follow, one token in five of it wrong."""

    expected: list[int]
    rng: np.random.Generator
    place: int = 0

    def draft(self, limit, *, worth):
        draft = self.expected[self.place : self.place + min(limit, int(self.rng.integers(0, 9)))]
        return [token if self.rng.random() < 0.8 else (token + 1) % VOCABULARY for token in draft]

    def update(self, tokens, drafted, right):
        assert right == len(tokens) - 1 <= drafted
        self.place += len(tokens)


def know(monkeypatch, expected):
    """Let engines draft what `expected`, completions by request, have after their prompts."""
    rng = np.random.default_rng(0)

    def drafter(config, prompt):
        return KnowingDrafter(expected[prompt.tobytes()], rng)

    monkeypatch.setattr("nemorl.generation.batching.PromptLookup", drafter)


@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_drafts_change_nothing_that_is_sampled(monkeypatch, max_batch_size):
    requests = mixed_requests(30, stop_token_ids=frozenset({5, 6}))
    plain = serve(small_engine(), requests)
    know(monkeypatch, {r.prompt.tobytes(): plain[r.id].tokens.tolist() for r in requests})
    engine = small_engine(speculation={}, max_batch_size=max_batch_size)
    drafted = serve(engine, requests)
    stats = engine.take_stats()
    assert stats.tokens_generated == sum(len(c.tokens) for c in drafted.values())
    assert 0.2 * stats.tokens_generated < stats.accepted_tokens < stats.drafted_tokens
    assert_same(drafted, plain)


def test_a_draft_gives_several_tokens_in_a_step(monkeypatch, hf_model):
    engine = engine_of(hf_model, speculation={})
    ask = request(Prompts(0).one(9), sampling=GREEDY, max_new_tokens=60)
    expected = hf_model.network.generate(
        torch.tensor([ask.prompt.tolist()]),
        max_new_tokens=60,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 9:].tolist()
    know(monkeypatch, {ask.prompt.tobytes(): expected})
    engine.add(ask)
    steps, completions = 0, []
    while not completions:
        completions, steps = engine.step(), steps + 1
    assert completions[0].tokens.tolist() == expected
    assert steps < 40


def test_drafts_leave_the_distribution_of_continuations_as_it_is(monkeypatch):
    """Chi-square of three tokens, over many seeds, against the model's own probabilities."""
    prompt, count = Prompts(3).one(9), 4000
    asked = [request(prompt, f"{i}", SamplingParams(top_k=3), 3, seed=i) for i in range(count)]
    (first,) = serve(small_engine(), asked[:1]).values()
    know(monkeypatch, {prompt.tobytes(): first.tokens.tolist()})
    engine = small_engine(speculation={})
    found = serve(engine, asked)
    assert engine.take_stats().accepted_tokens > 100
    assert_sampled_by_probability(found.values())


def test_every_token_carries_the_version_that_sampled_it():
    engine = small_engine()
    engine.add(request(Prompts().one(5), "a", max_new_tokens=9))
    engine.step()  # the first two tokens
    engine.step()
    random_weights(engine.model, seed=1)
    engine.step()  # staged, not committed
    engine.commit(7)
    engine.add(request(Prompts(1).one(5), "b", max_new_tokens=2))
    completions = finish(engine)
    assert completions["a"].versions.tolist() == [0] * 4 + [7] * 5
    assert completions["b"].versions.tolist() == [7] * 2
    assert engine.version == 7


def test_an_end_token_ends_the_turn_and_is_kept():
    prompt = Prompts().one(6)
    free = serve(small_engine(), [request(prompt, max_new_tokens=20)])["a"]
    end = int(free.tokens[6])
    first = free.tokens.tolist().index(end)
    ended = serve(small_engine(), [request(prompt, max_new_tokens=20, stop_token_ids=frozenset({end, 500}))])[
        "a"
    ]
    assert ended.tokens.tolist() == free.tokens.tolist()[: first + 1]
    assert (free.stop, ended.stop) == (StopReason.LENGTH, StopReason.STOP)


def test_a_stop_string_over_several_tokens_ends_the_turn():
    def decode(tokens):
        return "".join(f"<{token}>" for token in tokens)

    prompt = Prompts().one(6)
    free = serve(small_engine(), [request(prompt, max_new_tokens=20)])["a"].tokens.tolist()
    stop = f"{free[8]}><{free[9]}"
    ended = serve(
        small_engine(decode=decode), [request(prompt, max_new_tokens=20, stop_strings=("never", stop))]
    )["a"]
    assert ended.tokens.tolist() == free[:10]
    assert ended.stop == StopReason.STOP


def test_lengths():
    engine = small_engine(max_sequence_length=16)
    prompt = Prompts().one(6)
    completions = serve(
        engine,
        [request(prompt, "turn", max_new_tokens=4), request(prompt, "sequence", max_new_tokens=400)],
    )
    assert [len(completions[name].tokens) for name in ("turn", "sequence")] == [4, 10]
    assert {c.stop for c in completions.values()} == {StopReason.LENGTH}


def test_abort_ends_running_and_waiting_requests_with_what_they_have():
    engine = small_engine(max_batch_size=2)
    requests = [request(p, f"{i}", max_new_tokens=9, seed=i) for i, p in enumerate(Prompts().several(3))]
    for one in requests:
        engine.add(one)
    engine.step()
    running, waiting = engine.abort("0"), engine.abort("2")
    assert running is not None
    assert waiting is not None
    assert (len(running.tokens), len(waiting.tokens)) == (2, 0)
    assert {running.stop, waiting.stop} == {StopReason.ABORT}
    assert engine.abort("0") is None
    rest = finish(engine)
    assert rest.keys() == {"1"}
    assert_same(rest, serve(small_engine(), [requests[1]]))


def test_a_deadline_ends_a_turn_with_what_it_has():
    clock = Clock(100.0)
    engine = small_engine(max_batch_size=1, clock=clock)
    for name, seconds in (("runs", 10.0), ("waits", 5.0), ("later", 50.0)):
        engine.add(request(Prompts().one(4), name, max_new_tokens=90, deadline_seconds=seconds))
    assert engine.next_expiry == 105.0
    clock.now = 104.0
    assert engine.step() == []
    clock.now = 105.0
    assert [c.id for c in engine.step()] == ["waits"]
    clock.now = 110.5
    (late,) = engine.step()
    assert (late.id, late.stop, len(late.tokens)) == ("runs", StopReason.ABORT, 3)
    assert late.seconds == pytest.approx(5.0)
    clock.now = 111.0
    assert finish(engine)["later"].stop == StopReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": np.zeros(0, np.int32)}, r"has 0 prompt tokens"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0; both must be at least 1"),
        ({"prompt": np.array([3, VOCABULARY], np.int32)}, r"from 3 to 97; the model's vocabulary has 97"),
        ({"prompt": np.zeros(200, np.int32)}, r"200 tokens, which leaves nothing .*max_sequence_length=200"),
        ({"max_new_tokens": 60}, r"may grow to 65 tokens, .*max_kv_tokens=64"),
        ({"stop_strings": ("x",)}, r"stop strings, and there is no tokenizer.json"),
        ({"name": "taken"}, r"request 'taken' is in flight already"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_reason(fields, message):
    engine = small_engine(max_kv_tokens=64)
    engine.add(request(Prompts().one(4), "taken"))
    with pytest.raises(RequestRefused, match=message):
        engine.add(request(**{"prompt": Prompts().one(5), **fields}))
    assert finish(engine).keys() == {"taken"}


def test_memory_stays_below_its_limit_and_everyone_is_served():
    requests = mixed_requests(60, seed=9)
    engine = small_engine(max_batch_size=32, max_kv_tokens=300)
    for one in requests:
        engine.add(one)
    completions, most = {}, 0
    while engine.num_running + engine.num_waiting:
        completions |= {c.id: c for c in engine.step()}
        most = max(most, engine.model.cache.num_tokens)
    assert 150 < most <= 300
    assert_same(completions, serve(small_engine(), requests))


def test_stats_count_since_they_were_last_taken():
    engine = small_engine(max_batch_size=3)
    prompts = [Prompts(seed).one(10) for seed in range(4)]
    serve(engine, [request(p, f"{i}", max_new_tokens=5) for i, p in enumerate(prompts)])
    stats = engine.take_stats()
    assert (stats.tokens_generated, stats.prompt_tokens) == (20, 40)
    again = engine.take_stats()
    assert (again.tokens_generated, again.prompt_tokens) == (0, 0)


def test_a_request_that_continues_elsewhere_draws_what_it_would_have_drawn():
    # At temperature 1 with random weights every draw depends on its uniform number.
    whole = request(Prompts(3).one(7), max_new_tokens=12, seed=9)
    (drawn,) = serve(small_engine(), [whole]).values()
    before = drawn.tokens[:5]
    rest = replace(
        whole, prompt=np.concatenate([whole.prompt, before]), max_new_tokens=7, sampled_before=len(before)
    )
    (continued,) = serve(small_engine(), [rest]).values()
    assert continued.tokens.tolist() == drawn.tokens[5:].tolist()
    np.testing.assert_allclose(continued.logprobs, drawn.logprobs[5:], atol=1e-5)
    (anew,) = serve(small_engine(), [replace(rest, sampled_before=0)]).values()
    assert anew.tokens.tolist() != continued.tokens.tolist()


def test_a_stop_string_may_begin_before_a_request_moves():
    def decode(tokens):
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    prompt = Prompts(3).one(7)
    (drawn,) = serve(small_engine(), [request(prompt, max_new_tokens=12, seed=9)]).values()
    stop = decode(drawn.tokens[3:6])
    assert decode(drawn.tokens).find(stop) == 3
    rest = request(
        np.concatenate([prompt, drawn.tokens[:5]]),
        max_new_tokens=7,
        seed=9,
        stop_strings=(stop,),
        sampled_before=5,
    )
    (continued,) = serve(small_engine(decode=decode), [rest]).values()
    assert (continued.stop, continued.tokens.tolist()) == (StopReason.STOP, [drawn.tokens[5]])


def test_progress_comes_by_tokens_and_misses_none():
    engine = small_engine()
    prompts = Prompts(5)
    engine.add(request(prompts.one(4), "told", max_new_tokens=20, seed=1, progress_tokens=4))
    engine.add(request(prompts.one(4), "silent", max_new_tokens=20, seed=2))
    told, completions, reports = [], [], 0
    while engine.num_running + engine.num_waiting:
        completions += engine.step()
        progress = engine.take_progress()
        reports += bool(progress)
        told += progress
    assert {p.id for p in told} == {"told"}
    assert reports == 4  # after 4, 8, 12 and 16 tokens; the last four come with the completion
    (whole,) = (c for c in completions if c.id == "told")
    for name in ("tokens", "logprobs", "versions"):
        reported = np.concatenate([getattr(p, name) for p in told])
        np.testing.assert_array_equal(reported, getattr(whole, name)[:16])


class HostCopies(TorchFunctionMode):
    """Counts copies of the host's values to a device, and reads of a device's values by the host."""

    READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, on_device = getattr(func, "__name__", ""), (kwargs or {}).get("device") is not None
        if name in self.READS:
            self.counts["reads"] += 1
        if (name == "to" and isinstance(args[1], torch.device)) or (name == "tensor" and on_device):
            self.counts["uploads"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.7)], ids=str)
def test_a_decoding_step_has_one_upload_and_one_download(sampling):
    engine = small_engine()
    for i, prompt in enumerate(Prompts(1).several(5, 3, 9)):
        engine.add(request(prompt, f"{i}", sampling, max_new_tokens=9))
    engine.step()
    with HostCopies() as copies:
        engine.step()
    assert copies.counts == {"uploads": 1, "reads": 1}


def test_the_tokens_of_a_prefill_depend_on_the_device():
    counts = {device: prefill_tokens(torch.device(device, 0)) for device in ("cpu", "cuda")}
    assert counts == {"cpu": 2048, "cuda": 16384}
