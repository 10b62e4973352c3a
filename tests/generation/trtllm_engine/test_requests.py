"""Requests of a TensorRT-LLM replica: the protocol that all engines have, over the stand-in."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.generation.types import Completion, Progress, RequestRefused, SamplingParams
from nemorl.trajectories import StopReason
from tests.generation.examples import GREEDY, Prompts, completions, request
from tests.generation.trtllm_engine.setup import group


def greedy(network, prompt, count):
    """Tokens and logprobs by full forward passes."""
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            row = network(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return tokens[len(prompt) :], logprobs


def test_greedy_tokens_and_logprobs_are_transformers(replica, hf_models):
    requests = group("greedy", count=4)
    answers = replica.serve(requests)
    for one in requests:
        tokens, logprobs = greedy(hf_models["llama"].network, one.prompt.tolist(), 8)
        answer = answers[one.id]
        assert answer.tokens.tolist() == tokens
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-4)
        assert answer.versions.tolist() == [0] * 8
        assert answer.stop is StopReason.LENGTH


def test_logprobs_are_of_the_distribution_sampled(replica, hf_models):
    sampling = SamplingParams(temperature=0.7, top_k=5)
    (one,) = group("sampled", count=1, max_new_tokens=12, sampling=sampling)
    answer = replica.serve([one])[one.id]
    rows = hf_models["llama"].logprobs([*one.prompt, *answer.tokens], temperature=0.7)
    for place, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        row = rows[len(one.prompt) - 1 + place]
        best = row.topk(5)
        assert token in best.indices
        expected = row[int(token)] - best.values.logsumexp(0)  # renormalised over the five
        assert logprob == pytest.approx(float(expected), abs=1e-4)


def test_seeds_decide_what_is_drawn(replica):
    prompt = Prompts(3).one(6)
    seeds = {"a": 1, "b": 1, "c": 2}
    answers = replica.serve(
        [request(prompt, name, SamplingParams(), 16, seed) for name, seed in seeds.items()]
    )
    assert answers["a"].tokens.tolist() == answers["b"].tokens.tolist()
    assert answers["a"].tokens.tolist() != answers["c"].tokens.tolist()


def test_a_stop_token_ends_a_turn_and_is_kept(replica, hf_models):
    prompt = Prompts(3).one(6)
    tokens, _ = greedy(hf_models["llama"].network, prompt.tolist(), 8)
    end = tokens[4]
    one = request(prompt, "stopped", GREEDY, 8, stop_token_ids=frozenset({end}))
    answer = replica.serve([one])["stopped"]
    assert answer.tokens.tolist() == tokens[: tokens.index(end) + 1]
    assert answer.stop is StopReason.STOP


def test_a_stop_string_ends_a_turn_behind_the_token_that_completes_it(replica, hf_models, monkeypatch):
    def decode(tokens):
        return "".join(f"<{token}>" for token in tokens)

    engine = replica.host._engine
    monkeypatch.setattr(engine, "limits", replace(engine.limits, decode=decode))
    prompt = Prompts(4).one(6)
    tokens, _ = greedy(hf_models["llama"].network, prompt.tolist(), 30)
    wanted = decode(tokens[2:4])[:-1]
    one = request(prompt, "stopped", GREEDY, 30, stop_strings=(wanted,))
    answer = replica.serve([one])["stopped"]
    end = next(n for n in range(31) if wanted in decode(tokens[:n]))
    assert answer.tokens.tolist() == tokens[:end]
    assert len(answer.logprobs) == len(answer.versions) == end
    assert answer.stop is StopReason.STOP


def test_what_cannot_be_served_is_refused_before_anything_begins(replica):
    fine, long = request(Prompts().one(3), "fine"), request(Prompts().one(250), "long")
    with pytest.raises(RequestRefused, match="a prompt of 250 tokens"):
        replica.serve([fine, long])
    assert replica.host.health().running == 0


def test_what_the_engine_refuses_ends_that_request_alone(replica, monkeypatch):
    monkeypatch.setattr(replica.host._engine.llm.args, "max_num_tokens", 5)
    requests = [request(Prompts().one(3), "fits"), request(Prompts().one(9), "does not")]
    answers = replica.serve(requests)
    assert answers["fits"].stop is StopReason.LENGTH
    assert (answers["does not"].stop, len(answers["does not"].tokens)) == (StopReason.ERROR, 0)
    assert replica.host.health().running == 0


def test_progress_comes_before_the_end(replica):
    (one,) = group("told", count=1, max_new_tokens=20)
    one = replace(one, progress_tokens=6)

    async def collect():
        return [report async for batch in replica.host.generate_batches([one]) for report in batch]

    reports = replica.loop.run(collect())
    *told, last = reports
    assert told
    assert all(isinstance(report, Progress) and len(report.tokens) >= 6 for report in told)
    assert isinstance(last, Completion)
    begun = np.concatenate([report.tokens for report in told])
    assert last.tokens[: len(begun)].tolist() == begun.tolist()


async def first_progress(stream):
    """Tokens of the first report of a stream that continues."""
    async for batch in stream:
        return len(batch[0].tokens)


def test_an_aborted_request_answers_with_what_it_has(replica):
    one = replace(group("cut", count=1, max_new_tokens=200)[0], progress_tokens=3)

    async def cut():
        stream = replica.host.generate_batches([one])
        await first_progress(stream)
        await replica.host.abort([one.id, "unknown"])
        return [report async for batch in stream for report in batch][-1]

    answer = replica.loop.run(cut())
    assert answer.stop is StopReason.ABORT
    assert 3 <= len(answer.tokens) < 200
    assert replica.host.health().running == 0


def test_a_deadline_ends_a_request(replica):
    one = replace(group("late", count=1, max_new_tokens=200)[0], deadline_seconds=0.05)
    answer = replica.serve([one])[one.id]
    assert answer.stop is StopReason.ABORT
    assert len(answer.tokens) < 200


def test_a_frozen_engine_samples_nothing_and_continues_where_it_was(replica):
    one = replace(group("frozen", count=1, max_new_tokens=120)[0], progress_tokens=1)

    async def freeze():
        stream = replica.host.generate_batches([one])
        await first_progress(stream)
        await replica.host.pause("keep")
        (held,) = (await replica.host._engine.call("nemorl_device"))[:1]  # a call goes through meanwhile
        await asyncio.sleep(0.1)  # what was sampled before may still be on its way
        there = len(replica.host._sequences[one.id].sampled.tokens)
        await asyncio.sleep(0.3)
        still = len(replica.host._sequences[one.id].sampled.tokens)
        await replica.host.resume()
        return held, there, still, [report async for batch in stream for report in batch][-1]

    _, there, still, answer = replica.loop.run(freeze())
    assert 0 < there == still < 120
    assert answer.stop is StopReason.LENGTH
    assert answer.tokens.tolist() == replica.serve([replace(one, id="again")])["again"].tokens.tolist()


def test_a_pause_that_waits_lets_what_runs_end_and_holds_what_comes(replica):
    first, second = group("early", count=1, max_new_tokens=30)[0], group("later", count=1)[0]

    async def wait():
        running = asyncio.create_task(anext(completions(replica.host, [first])))
        while not replica.host.health().running:
            await asyncio.sleep(0.01)
        await replica.host.pause("wait")
        ended = running.done() or await running is not None
        waiting = asyncio.create_task(anext(completions(replica.host, [second])))
        await asyncio.sleep(0.1)
        health = replica.host.health()
        await replica.host.resume()
        return ended, health, await waiting

    ended, health, answer = replica.loop.run(wait())
    assert ended
    assert (health.running, health.waiting, health.paused) == (0, 1, True)
    assert answer.stop is StopReason.LENGTH


def test_metrics(replica):
    async def take():
        return await replica.host.stats()

    replica.loop.run(take())
    requests = group("counted", count=3, max_new_tokens=5)
    replica.serve(requests)
    metrics = replica.loop.run(take())
    assert metrics.tokens_generated == 15
    assert metrics.prompt_tokens == sum(len(one.prompt) for one in requests)


def test_memory_is_given_back_and_taken_again(replica):
    host = replica.host
    (one,) = group("woken", count=1)

    async def rest():
        await host.sleep(1)
        waiting = asyncio.create_task(anext(completions(host, [one])))
        await host.wake(("weights",))
        await asyncio.sleep(0.1)
        asleep = host.health()
        await host.wake(("kv_cache",))
        return asleep, await waiting

    asleep, answer = replica.loop.run(rest())
    assert asleep.running == 0
    assert answer.tokens.tolist() == replica.serve([replace(one, id="again")])["again"].tokens.tolist()
