"""A server's prompt logprobs become fields of the batch; what it does not return is an error with a fix."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from aiohttp import web

from nemorl.algorithms.teachers import EndpointTeacher
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.data.packed import PackedBatch
from nemorl.errors import RunError
from nemorl.rewards import scored

VOCABULARY = 6
BATCH = PackedBatch(
    tokens=torch.tensor([0, 3, 1, 5, 2, 2, 4]),
    cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32),
    position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]),
    loss_mask=torch.tensor([False, True, True, False, False, True, True]),
    weights=torch.zeros(7),
)


def log_p(before: list[int]) -> torch.Tensor:
    """A model of our own: logprobs of the next token by the sum of those before it."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(sum(before))).log_softmax(-1)


def vllm_like(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM's server answers: the token itself, and the likeliest ones."""
    told: list[dict[str, Any] | None] = [None]
    tokens, k = body["prompt"], body["prompt_logprobs"]
    for place in range(1, len(tokens)):
        logprobs = log_p(tokens[:place])
        order = logprobs.argsort(descending=True).tolist()
        ids = {tokens[place], *order[:k]}
        told.append(
            {
                str(i): {"logprob": float(logprobs[i]), "rank": order.index(i) + 1, "decoded_token": "?"}
                for i in sorted(ids)
            }
        )
    return {"choices": [{"text": "x", "prompt_logprobs": told}]}


@asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def ask(
    batch: PackedBatch,
    sequences: list[int],
    top_k: int | None,
    answer: Callable[[dict[str, Any]], dict[str, Any]] = vllm_like,
) -> dict[str, torch.Tensor]:
    async def main() -> dict[str, torch.Tensor]:
        async with serving(answer) as url:
            config = EndpointTeacherConfig(kind="endpoint", base_url=url, model="m", max_retries=0)
            teacher = EndpointTeacher(config, "sums", top_k)
            return await asyncio.to_thread(teacher, batch, sequences, seconds=20.0)

    return asyncio.run(main())


def test_logprobs_of_the_tokens_of_the_prompt() -> None:
    (logprobs,) = ask(BATCH, [0, 1], None).values()
    expected = torch.zeros(7)
    for place, before in ((1, [0]), (2, [0, 3]), (5, [5, 2]), (6, [5, 2, 2])):
        expected[place] = log_p(before)[BATCH.tokens[place]]
    torch.testing.assert_close(logprobs, expected)


def test_the_likeliest_tokens_without_the_one_of_the_prompt() -> None:
    fields = ask(BATCH, [0, 1], 2)
    for place, before in ((1, [0]), (2, [0, 3]), (5, [5, 2]), (6, [5, 2, 2])):
        values, ids = log_p(before).topk(2)
        assert fields["top_ids"][place].tolist() == ids.tolist()
        torch.testing.assert_close(fields["top_logprobs"][place], values)
    assert not fields["top_ids"][[0, 3, 4]].any()


def test_sequences_of_other_teachers_stay_as_they_are() -> None:
    first = ask(BATCH, [0], None)
    both = ask(replace(BATCH, **first), [1], None)
    torch.testing.assert_close(both, ask(BATCH, [0, 1], None))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            lambda body: {"choices": [{"text": "x"}]},
            "answers without prompt_logprobs; serve",
        ),
        (
            lambda body: {"choices": [{"prompt_logprobs": [None, {}]}]},
            "received 3 tokens and returns prompt_logprobs of 2",
        ),
    ],
)
def test_what_it_does_not_return_is_an_error(answer: Any, problem: str) -> None:
    with pytest.raises(RunError, match=rf"teachers\.sums\.base_url = .*{problem}"):
        ask(BATCH, [0], None, answer)


def test_a_server_that_is_down_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.01)
    failures = iter(range(3))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if next(failures, None) is not None:
            raise web.HTTPServiceUnavailable
        return vllm_like(body)

    (logprobs,) = ask(BATCH, [0, 1], None, answer).values()
    torch.testing.assert_close(logprobs, *ask(BATCH, [0, 1], None).values())
