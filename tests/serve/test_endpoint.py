"""The endpoint over a torch engine, called as any client does."""

import asyncio
import json
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemorl.data.tokenizer import Tokenizer, TokenizerError
from nemorl.data.tool_calls import FORMATS
from nemorl.generation.router import Replica
from nemorl.generation.tokens import RequestLimits
from nemorl.generation.types import GenerationRequest, Progress, RequestRefused, SamplingParams
from nemorl.serve.requests import ChatRequest, CompletionRequest
from nemorl.serve.sampling import Served, completion_work, engine_requests, stream
from nemorl.trajectories import StopReason
from tests.generation.examples import completions
from tests.rollout.stand_ins import completion
from tests.serve.conftest import LENGTH, engine


def scripted(tokenizer, *texts: str, end: str = "<|im_end|>") -> Replica:
    """A replica that says these texts, each to the next request, token by token."""
    left = list(texts)

    async def generate(requests):
        for request in requests:
            whole = completion(request, tokenizer.encode(left.pop(0) + end), version=7)
            for i in range(len(whole.tokens) - 1):
                one = slice(i, i + 1)
                yield [Progress(request.id, whole.tokens[one], whole.logprobs[one], whole.versions[one])]
            yield [whole]

    return Replica("scripted", generate)


def run(open_endpoint, talk, *replicas, **config):
    async def main():
        async with open_endpoint(*replicas, **config) as endpoint:
            return await talk(endpoint)

    return asyncio.run(asyncio.wait_for(main(), 60))


async def events(endpoint, path: str, body: dict) -> list:
    """The events of a stream; the last is the word DONE."""
    headers = {"Authorization": f"Bearer {endpoint.at.api_key}"}
    async with endpoint.http.post(f"{endpoint.at.url}{path}", json=body, headers=headers) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = (await response.read()).decode().split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


PROMPT = [70, 71, 72]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 5}


def test_a_completion_is_what_the_engine_draws(endpoint, served_model, served_tokenizer):
    async def directly():
        worker = engine(served_model)
        request = GenerationRequest(
            "r", np.array(PROMPT, np.int32), SamplingParams(0.9, 40, 0.95), 12, 5, frozenset({0, 2})
        )
        try:
            return await anext(completions(worker, [request]))
        finally:
            worker.close()

    async def talk(e):
        body = {**BODY, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
        return await e.post("/completions", {**body, "logprobs": 1, "return_token_ids": True})

    status, answer = run(endpoint, talk)
    expected = asyncio.run(directly())
    (choice,) = answer["choices"]
    assert status == 200
    assert choice["token_ids"] == expected.tokens.tolist()
    assert choice["logprobs"]["token_logprobs"] == expected.logprobs.tolist()  # to the last bit
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["weight_versions"] == [0] * len(expected.tokens)
    assert choice["finish_reason"] == str(expected.stop)
    assert choice["text"] == served_tokenizer.decode([t for t in expected.tokens.tolist() if t not in (0, 2)])
    sampled = len(expected.tokens)
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": sampled, "total_tokens": 3 + sampled,
    }  # fmt: skip


def test_an_echo_has_the_logprobs_of_the_prompt(endpoint, served_model, served_tokenizer):
    """Those of transformers, and of the engine when it samples the same tokens."""
    tokens = served_tokenizer.encode("9 + 5 = 14 and more")
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0, "echo": True, "seed": 1}

    async def talk(e):
        drawing = {**BODY, "temperature": 1, "logprobs": 1, "return_token_ids": True}
        _, drawn = await e.post("/completions", drawing)
        (choice,) = drawn["choices"]
        both = {**body, "prompt": [tokens, tokens[:4], tokens[:1]], "logprobs": 1}
        plain = {**body, "prompt": tokens}
        again = {**body, "prompt": [*PROMPT, *choice["token_ids"]], "logprobs": 1}
        return choice, *[await e.post("/completions", one) for one in (both, plain, again)]

    drawn, (status, answer), (_, plain), (_, again) = run(endpoint, talk)
    assert status == 200
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    first, short, single = answer["choices"]
    for choice, given in ((first, tokens), (short, tokens[:4])):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(given) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        for place, token in enumerate(given[1:]):
            logprob = found["token_logprobs"][place + 1]
            assert logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
            (top,) = found["top_logprobs"][place + 1].values()
            assert top == pytest.approx(expected[place].max().item(), abs=1e-4)
            assert (logprob == top) == (expected[place].argmax().item() == token)
    assert single["logprobs"]["token_logprobs"][0] is None
    assert first["text"].startswith("9 + 5 = 14 and more")
    assert plain["choices"][0]["text"] == first["text"]
    assert plain["choices"][0]["logprobs"] is None
    repeated = again["choices"][0]["logprobs"]["token_logprobs"][3:-1]
    assert repeated == pytest.approx(drawn["logprobs"]["token_logprobs"], abs=1e-4)


def test_engines_that_do_not_score_prompts_refuse():
    request = GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(), 1, 5, scores_prompt=True)
    with pytest.raises(RequestRefused, match=r"serve the model with generation.backend: torch"):
        RequestLimits(100, 50, 1000).check(request)
    RequestLimits(100, 50, 1000, scores_prompts=True).check(request)


def test_texts_that_cannot_become_prompts_are_refused(endpoint, monkeypatch):
    def cannot(text):
        raise TokenizerError("the tokenizer tiny cannot encode the text: Missing [UNK] token")

    async def talk(e):
        long = await e.post("/completions", {**BODY, "prompt": "a" * (256 * LENGTH + 1)})
        monkeypatch.setattr(Tokenizer, "_encode", lambda self, text, **_: cannot(text))
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "h\u00e4llo"}]}
        return (
            long,
            await e.post("/completions", {**BODY, "prompt": "h\u00e4llo"}),
            await e.post("/chat/completions", chat),
        )

    long, odd, chat = run(endpoint, talk)
    assert (long[0], odd[0], chat[0]) == (400, 400, 400)
    assert "characters are more than" in long[1]["error"]["message"]
    assert "Missing [UNK] token" in odd[1]["error"]["message"]
    assert (odd[1]["error"]["param"], chat[1]["error"]["param"]) == ("prompt", "messages")


def test_several_prompts_with_several_choices_each(endpoint):
    async def talk(e):
        body = {**BODY, "prompt": ["ab", [70]], "n": 3, "return_token_ids": True}
        _, together = await e.post("/completions", {**body, "prompt": [[68, 69], [70]]})
        _, alone = await e.post("/completions", {**body, "prompt": [68, 69], "n": 1})
        _, text = await e.post("/completions", {**body, "prompt": ["ab", "12"], "n": 1})
        status, mixed = await e.post("/completions", body)
        return together, alone, text, status, mixed

    together, alone, text, status, mixed = run(endpoint, talk)
    choices = together["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert [c["prompt_token_ids"] for c in choices] == [[68, 69]] * 3 + [[70]] * 3
    assert len({tuple(c["token_ids"]) for c in choices}) == 6  # a seed for each
    assert choices[0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert [len(c["prompt_token_ids"]) for c in text["choices"]] == [1, 1]  # "ab" and "12" are merges
    assert (status, mixed["error"]["type"]) == (400, "invalid_request_error")


def test_a_stream_says_the_same_as_the_whole(endpoint):
    async def talk(e):
        body = {**BODY, "max_tokens": 40, "logprobs": 1, "return_token_ids": True, "n": 2}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return await e.post("/completions", body), await events(e, "/completions", body | options)

    (_, whole), streamed = run(endpoint, talk)
    usage = streamed.pop()
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts = [c for event in streamed for c in event["choices"] if c["index"] == choice["index"]]
        # One by one; with the first comes what was sampled while the prompt was read.
        assert all(len(p["token_ids"]) <= 1 for p in parts[1:])
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
        logprobs = [x for p in parts for x in p["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[0]["prompt_token_ids"] == PROMPT


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab?"}]}


def chat_of(content: object) -> dict:
    return {**CHAT, "messages": [{"role": "user", "content": content}]}


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}, "return": {"type": "number"}},
}


def test_tools_reach_the_template_as_they_were_sent():
    assert ChatRequest.model_validate({**CHAT, "tools": [TOOL]}).tools_for_template == [TOOL]


def test_a_chat_is_rendered_by_the_template_and_ends_before_its_end_token(endpoint, served_tokenizer):
    async def talk(e):
        body = {**CHAT, "logprobs": True, "return_token_ids": True}
        return await e.post("/chat/completions", body)

    status, answer = run(endpoint, talk, scripted(served_tokenizer, "hé 12"))
    assert status == 200
    expected = "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n"
    assert served_tokenizer.decode(answer["prompt_token_ids"]) == expected
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hé 12", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert served_tokenizer.decode(choice["token_ids"]) == "hé 12<|im_end|>"
    assert choice["weight_versions"] == [7] * len(choice["token_ids"])
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx([-t / 1000 for t in choice["token_ids"]])


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'


def test_tool_calls_are_read(endpoint, served_tokenizer):
    replica = scripted(served_tokenizer, f"Well. {CALL}\n{CALL}", "<tool_call>{oops", CALL)
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
    ]  # fmt: skip

    async def talk(e):
        body = {**CHAT, "tools": [TOOL], "return_token_ids": True}
        _, called = await e.post("/chat/completions", {**body, "messages": history})
        _, garbled = await e.post("/chat/completions", body)
        _, off = await e.post("/chat/completions", {**body, "tool_choice": "none"})
        return called, garbled, off

    called, garbled, off = run(endpoint, talk, replica)
    prompt = served_tokenizer.decode(called["prompt_token_ids"])
    assert prompt.startswith("<|im_start|>system\nTools: add in")
    assert "<tool_call>add 3</tool_call><|im_end|>\n<|im_start|>tool\n4<|im_end|>" in prompt
    (choice,) = called["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Well.")
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1, "b": "x"}'}
    assert first["id"] != second["id"]
    # What cannot be read is text, and so is a call where tools were not enabled.
    assert garbled["choices"][0]["message"]["content"] == "<tool_call>{oops"
    assert off["choices"][0]["message"]["content"] == CALL
    assert "Tools:" not in served_tokenizer.decode(off["prompt_token_ids"])


def test_an_answer_in_channels_is_reasoning_content_and_calls(endpoint, served_tokenizer):
    tokenizer = copy(served_tokenizer)
    tokenizer.tool_format = FORMATS["harmony"]
    channels = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    call = f"{channels}commentary to=functions.add<|message|>{{}}"

    async def talk(e):
        _, plain = await e.post("/chat/completions", CHAT)
        streamed = await events(e, "/chat/completions", {**CHAT, "tools": [TOOL], "stream": True})
        return plain, streamed

    answer = f"{channels}final<|message|>It is 3."
    plain, streamed = run(endpoint, talk, scripted(tokenizer, answer, call), tokenizer=tokenizer)
    message = plain["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is 3.")
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert "".join(delta["content"] for delta in deltas) == ""
    assert deltas[-1]["reasoning_content"] == "Hm."
    (called,) = deltas[-1]["tool_calls"]
    assert (called["index"], called["function"]) == (0, {"name": "add", "arguments": "{}"})


def test_tool_calls_in_a_stream_are_complete(endpoint, served_tokenizer):
    async def talk(e):
        body = {**CHAT, "tools": [TOOL], "stream": True}
        return await events(e, "/chat/completions", body), await events(e, "/chat/completions", body)

    called, plain = run(
        endpoint, talk, scripted(served_tokenizer, f"Look: {CALL}", "a < b, <tool is no call")
    )
    deltas = [event["choices"][0]["delta"] for event in called]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d["content"] for d in deltas) == "Look: "
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    assert [(c["index"], c["function"]["name"]) for c in calls] == [(0, "add")]
    assert called[-1]["choices"][0]["finish_reason"] == "tool_calls"
    text = "".join(event["choices"][0]["delta"]["content"] for event in plain)
    assert text == "a < b, <tool is no call"


def test_a_stop_string_is_no_part_of_the_text(endpoint, served_tokenizer):
    async def talk(e):
        body = {**CHAT, "stop": ["END", "<|x"]}
        _, whole = await e.post("/chat/completions", body)
        return whole, await events(e, "/chat/completions", {**body, "stream": True})

    whole, streamed = run(endpoint, talk, scripted(served_tokenizer, "one ENEND", "one ENEND", end=""))
    assert whole["choices"][0]["message"]["content"] == "one EN"
    assert "".join(e["choices"][0]["delta"]["content"] for e in streamed) == "one EN"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/completions", b"{", 400, "The body is not JSON"),
        ("/completions", b"[]", 400, "not a JSON object"),
        ("/completions", {**BODY, "model": "gpt"}, 404, "`gpt` is not served; `tiny` is"),
        ("/completions", {"model": "tiny"}, 400, "prompt is missing."),
        ("/completions", {**BODY, "best_of": 2}, 400, "best_of is not served here: leave it out."),
        ("/completions", {**BODY, "temperature": -1}, 400, "= -1: expected a value of at least 0."),
        ("/completions", {**BODY, "temperature": float("inf")}, 400, "= Infinity: expected a finite number"),
        ("/completions", {**BODY, "n": 1.5}, 400, "n = 1.5: expected an integer."),
        ("/completions", {**BODY, "stream": "x"}, 400, 'stream = "x": expected true or false.'),
        ("/completions", {**BODY, "echo": True, "stream": True}, 400, "echo is for whole answers"),
        ("/completions", {**BODY, "prompt": [1, "a"]}, 400, 'prompt = [1, "a"]: expected a string, token'),
        ("/completions", {**BODY, "stop": [""]}, 400, 'stop = [""]: expected a string that is not empty'),
        ("/completions", {**BODY, "presence_penalty": 0.5}, 400, "presence_penalty = 0.5"),
        ("/completions", {**BODY, "top_k": 2**70}, 400, f"top_k = {2**70}: "),
        ("/completions", {**BODY, "stop_token_ids": [2**70]}, 400, f"stop_token_ids.0 = {2**70}: "),
        ("/completions", {**BODY, "prompt": [2**31]}, 400, "prompt"),
        ("/completions", {**BODY, "max_tokens": LENGTH}, 400, f"have {LENGTH} tokens at most"),
        ("/completions", {**BODY, "prompt": [9999]}, 400, "the model's vocabulary has 263"),
        ("/completions", {**BODY, "prompt": ""}, 400, "prompt has no tokens"),
        ("/completions", {**BODY, "prompt": [[70]] * 100, "n": 2}, 400, "200 samples"),
        ("/chat/completions", {**CHAT, "messages": []}, 400, "messages = []: expected a list with a length"),
        ("/chat/completions", chat_of(5), 400,
         'messages.0.content = 5: expected a string, or a list of {"type": "text", "text": ...}.'),
        ("/chat/completions", chat_of([{"type": "image_url"}]), 400,
         'messages.0.content.0.type = "image_url": expected "text".'),
        ("/chat/completions", chat_of([{"type": "text"}]), 400, "messages.0.content.0.text is missing."),
        ("/chat/completions", {**CHAT, "top_logprobs": 5, "logprobs": True}, 400, "top_logprobs = 5"),
        ("/chat/completions", {**CHAT, "tool_choice": "required"}, 400, 'expected "auto" or "none".'),
        ("/nowhere", {}, 404, "POST /v1/nowhere: Not Found."),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_what_is_wrong(endpoint, path, body, status, says):
    answered, answer = run(endpoint, lambda e: e.post(path, body))
    assert answered == status
    assert says in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_the_coldest_temperature_is_greedy(endpoint):
    async def talk(e):
        answers = [await e.post("/completions", {**BODY, "temperature": t}) for t in (0, 1e-300, 1e-39)]
        assert [status for status, _ in answers] == [200] * 3
        return [answer["choices"][0]["text"] for _, answer in answers]

    texts = run(endpoint, talk)
    assert texts == [texts[0]] * 3


@pytest.mark.parametrize(("under_way", "n", "piece"), [(0, 1, 1), (6, 2, 1), (7, 2, 2), (200, 1, 26)])
def test_pieces_of_streams_grow_with_the_answers_under_way(served_tokenizer, under_way, n, piece):
    served = Served(SimpleNamespace(num_unanswered=under_way), served_tokenizer, "tiny", LENGTH, 60)
    request = CompletionRequest(**BODY, n=n, stream=True)

    asked = engine_requests(request, completion_work(request, served), served)

    assert [one.progress_tokens for one in asked] == [piece] * n


def test_a_stream_whose_request_fails_ends():
    class Broken:
        async def generate(self, request, on_progress):
            raise LookupError("not foreseen")

    async def follow():
        request = GenerationRequest("r", np.array(PROMPT, np.int32), SamplingParams(), 12, 5)
        return [item async for item in stream([request], Broken())]

    with pytest.raises(LookupError, match="not foreseen"):
        asyncio.run(asyncio.wait_for(follow(), 60))


def test_the_key_is_required_everywhere_but_for_health(endpoint, served_tokenizer):
    async def talk(e):
        for key in ("", "wrong", e.at.api_key + "x", "ключ"):
            status, answer = await e.post("/completions", BODY, key=key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with e.http.get(f"{e.at.url}/models") as response:
            assert response.status == 401
        async with e.http.get(e.at.url.replace("/v1", "/health")) as response:
            assert (response.status, await response.json()) == (
                200, {"status": "ok", "replicas": 1, "lost": 0},
            )  # fmt: skip
        for key, status in (("wrong", 401), (e.at.api_key, 200)):  # counts before `Authorization`
            other = {"Authorization": "Bearer EMPTY", "X-API-Key": key}
            async with e.http.get(f"{e.at.url}/models", headers=other) as response:
                assert response.status == status
        headers = {"Authorization": f"Bearer {e.at.api_key}"}
        async with e.http.get(f"{e.at.url}/models", headers=headers) as response:
            return await response.json()

    models = run(endpoint, talk, scripted(served_tokenizer))
    assert [m["id"] for m in models["data"]] == ["tiny"]


def test_limits_on_bodies_and_on_requests_at_a_time(endpoint, served_tokenizer):
    async def main():
        held = asyncio.Event()

        async def generate(requests):
            await held.wait()
            yield [completion(request, [5]) for request in requests]

        async with endpoint(Replica("held", generate), max_concurrent_requests=2, max_body_megabytes=1) as e:
            waiting = [asyncio.create_task(e.post("/completions", BODY)) for _ in range(2)]
            await asyncio.sleep(0.2)
            status, answer = await e.post("/completions", BODY)
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            held.set()
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
            status, answer = await e.post("/completions", {**BODY, "prompt": "a" * 2**20})
            assert (status, answer["error"]["code"]) == (413, "body_too_large")
            assert (await e.post("/completions", BODY))[0] == 200

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_goes_away_ends_what_was_asked(endpoint):
    async def main():
        ended, began = [], asyncio.Event()

        async def generate(requests):
            began.set()
            await asyncio.Event().wait()
            yield []

        async def abort(ids):
            ended.extend(ids)

        async with endpoint(Replica("held", generate, abort)) as e:
            asked = asyncio.create_task(e.post("/completions", {**BODY, "n": 2}))
            await began.wait()
            asked.cancel()
            async with asyncio.timeout(10):
                while len(ended) < 2:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_engines_cannot_do_has_a_status_of_its_own(endpoint):
    async def late(requests):
        yield [completion(request, [5], StopReason.ABORT) for request in requests]

    async def dead(requests):
        raise ConnectionError("gone")
        yield

    async def broken(requests):
        yield [object()]

    status, answer = run(endpoint, lambda e: e.post("/completions", BODY), Replica("late", late))
    assert (status, answer["error"]["code"]) == (504, "timeout")
    for replica in (dead, broken):
        status, answer = run(endpoint, lambda e: e.post("/completions", BODY), Replica("dead", replica))
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "gone" not in answer["error"]["message"]
