"""A teacher behind an endpoint: it is sent token ids and tells logprobs of the prompt, as vLLM's server does.

`prompt_logprobs: k` of a request gives at each token its own logprob and the k likeliest tokens with theirs.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.data.packed import PackedBatch
from nemorl.errors import RunError
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.types import EngineFailed, RequestRefused

Told = Mapping[str, Mapping[str, Any]]  # by token id: `logprob` and `rank`


class EndpointTeacher:
    """Asks one server."""

    def __init__(self, config: EndpointTeacherConfig, name: str) -> None:
        """`name` is that of the teacher, for messages. Raises MissingKey."""
        self._config = config
        self._section = f"teachers.{name}"

    async def tell(
        self, batch: PackedBatch, sequences: Sequence[int], top_k: int | None, seconds: float
    ) -> dict[str, Tensor]:
        """The fields of the batch that the teacher fills, of these sequences; the others' stay as they are.

        `reference_logprobs` [N], or with `top_k` `top_ids` and `top_logprobs` [N, k]. Raises RunError when
        the server does not answer, or not with that.
        """
        client = OpenAIClient(
            self._config.base_url,
            api_key_env=self._config.api_key_env,
            max_concurrent=self._config.max_concurrent_requests,
            max_retries=self._config.max_retries,
            key_field=f"{self._section}.api_key_env",
        )
        try:
            async with asyncio.timeout(seconds):
                spans = _spans(batch, sequences)
                answers = await asyncio.gather(
                    *(self._ask(client, batch.tokens[span].tolist(), top_k) for span in spans)
                )
        except (EngineFailed, RequestRefused, TimeoutError) as error:
            what = f"no answer within {seconds:g} s (cluster.deadlines.logprobs)" * (
                isinstance(error, TimeoutError)
            )
            raise RunError(f"{self._section}: {what or error}") from error
        finally:
            await client.close()
        return filled(batch, spans, answers, top_k)

    async def _ask(self, client: OpenAIClient, tokens: list[int], top_k: int | None) -> list[Told]:
        """What is told of each token but the first."""
        body = {"model": self._config.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        answer = await client.post("/completions", {**body, "prompt_logprobs": top_k or 0})
        choices = answer.get("choices") or [{}]
        told = choices[0].get("prompt_logprobs")
        if not told:
            raise RunError(
                f"{self._section}.base_url: {self._config.base_url} answers without prompt_logprobs: serve "
                "the teacher by vLLM, whose server tells them, or in processes of the run (kind: model)"
            )
        if len(told) != len(tokens):
            raise RunError(
                f"{self._section}.base_url: {self._config.base_url} was sent {len(tokens)} tokens and tells "
                f"of {len(told)}: it has to take prompts as token ids as they are"
            )
        return list(told[1:])


def filled(
    batch: PackedBatch, spans: Sequence[slice], answers: Sequence[Sequence[Told]], top_k: int | None
) -> dict[str, Tensor]:
    """The teacher's fields with what is told of the tokens of the loss mask in these spans."""
    if top_k is None:
        logprobs = _kept(batch.reference_logprobs, (batch.num_tokens,))
        for place, told in _told(batch, spans, answers):
            logprobs[place] = told[str(int(batch.tokens[place]))]["logprob"]
        return {"reference_logprobs": logprobs}
    ids = _kept(batch.top_ids, (batch.num_tokens, top_k), torch.int32)
    of_top = _kept(batch.top_logprobs, (batch.num_tokens, top_k))
    for place, told in _told(batch, spans, answers):
        # The token that stands there is told of too, wherever it ranks.
        top = sorted(told.items(), key=lambda item: -item[1]["logprob"])[:top_k]
        if len(top) < top_k:
            raise RunError(f"a teacher's server tells {len(top)} of {top_k} likeliest tokens: ask for fewer")
        ids[place] = torch.tensor([int(token) for token, _ in top], dtype=torch.int32)
        of_top[place] = torch.tensor([known["logprob"] for _, known in top])
    return {"top_ids": ids, "top_logprobs": of_top}


def _told(
    batch: PackedBatch, spans: Sequence[slice], answers: Sequence[Sequence[Told]]
) -> list[tuple[int, Told]]:
    """Places of the loss mask, each with what is told of it."""
    return [
        (place, told)
        for span, answer in zip(spans, answers, strict=True)
        for place, told in zip(range(span.start + 1, span.stop), answer, strict=True)
        if batch.loss_mask[place]
    ]


def _spans(batch: PackedBatch, sequences: Sequence[int]) -> list[slice]:
    """Where the sequences lie that have anything to be told of."""
    starts = batch.cu_seqlens.tolist()
    spans = [slice(starts[s], starts[s + 1]) for s in sequences]
    return [span for span in spans if bool(batch.loss_mask[span].any())]


def _kept(field: Tensor | None, size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype) if field is None else field.clone()
