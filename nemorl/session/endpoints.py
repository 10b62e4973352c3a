"""HTTP endpoints: over a run's engines, over engines alone, and over a reward model; and teachers behind one.

A reward model runs in the same worker as policies and critics (`PolicyHost`), so every family and layout can
be served, and an answer's score is the one that training a policy or the reward model itself computes. It has
no optimizer.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from torch import Tensor

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import EndpointConfig
from nemorl.data.examples import Example
from nemorl.data.packed import PackedBatch
from nemorl.data.tokenizer import load_tokenizer
from nemorl.errors import RunError
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.router import Replica, Router, RouterMetrics
from nemorl.generation.types import EngineFailed, NoReplicaLeft, RequestRefused
from nemorl.rollout.worker import PooledRouter
from nemorl.serve.app import Listening, answering, listening
from nemorl.serve.sampling import Served

from .handles import ModelHandle
from .scoring import RewardScorer, reward_app
from .session import Starter, open_engines

_POLL_SECONDS = 1.0  # between two checks whether an engine is left


def served(experiment: Experiment, endpoint: EndpointConfig, router: Router) -> Served:
    """What an endpoint serves. Raises TokenizerError."""
    return Served(
        router,
        load_tokenizer(experiment.policy),
        endpoint.model_name or experiment.policy.model_path.absolute().name,
        experiment.policy.max_sequence_length,
        endpoint.timeout,
    )


class EndpointHost(PooledRouter):
    """The endpoint of a run, in its own process. Belongs to one event loop."""

    def __init__(self, experiment: Experiment, engines: Sequence[Replica]) -> None:
        endpoint = experiment.generation.endpoint
        assert endpoint is not None, "this process is for experiments with an endpoint"
        self._config = endpoint
        self._router = Router(list(engines))
        self._served = served(experiment, endpoint, self._router)
        self._open = AsyncExitStack()

    async def listen(self) -> Listening:
        """Answer from now on. Raises RunError when the address is not available."""
        return await self._open.enter_async_context(listening(self._config, self._served))

    async def close(self) -> None:
        """Stop answering."""
        await self._open.aclose()


class _LocalRouter:
    """The router of this process (`Routers`)."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def take_metrics(self, deadline_seconds: float) -> list[RouterMetrics]:
        return [self._router.take_metrics()]

    async def lost_replicas(self, deadline_seconds: float) -> list[dict[str, str]]:
        return [dict(self._router.lost)]

    async def add(self, replica: Replica, deadline_seconds: float) -> None:
        self._router.add(replica)


def serve(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start the engines of an experiment and answer over HTTP until the process receives SIGINT or SIGTERM.

    `announce` receives the address once the endpoint answers. Raises NemorlError, among them NoReplicaLeft.
    """
    asyncio.run(_serve(experiment, announce))


async def _serve(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    engines = [request for request in worker_requests(experiment) if request.group == "generation"]
    async with AsyncExitStack() as stack:
        runtime = stack.enter_context(ClusterRuntime(experiment.cluster, engines))
        placement = await runtime.reserve()
        stack.callback(placement.release)
        replicas = await stack.enter_async_context(open_engines(experiment, placement))
        router = Router([engine.as_replica() for engine in replicas.engines])
        replicas.connect(_LocalRouter(router))
        end = asyncio.Event()
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        announce(await stack.enter_async_context(listening(endpoint, served(experiment, endpoint, router))))
        while not await _set_within(end, _POLL_SECONDS):
            replicas.check_watch()
            if replicas.exhausted:
                raise NoReplicaLeft(dict(replicas.losses))
            replicas.log_losses()  # at once: nothing else reports why no engine answers


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


TokenScores = Mapping[str, Mapping[str, Any]]  # by token id: `logprob` and `rank`


class EndpointTeacher:
    """Asks one server."""

    def __init__(self, config: EndpointTeacherConfig, name: str) -> None:
        """`name` is that of the teacher, for messages. Raises MissingKey."""
        self._config = config
        self._section = f"teachers.{name}"

    async def score(
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

    async def _ask(self, client: OpenAIClient, tokens: list[int], top_k: int | None) -> list[TokenScores]:
        """Logprobs of every token but the first."""
        body = {"model": self._config.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        answer = await client.post("/completions", {**body, "prompt_logprobs": top_k or 0})
        choices = answer.get("choices") or [{}]
        scores = choices[0].get("prompt_logprobs")
        if not scores:
            raise RunError(
                f"{self._section}.base_url: {self._config.base_url} answers without prompt_logprobs: serve "
                "the teacher by vLLM, whose server returns them, or in processes of the run (kind: model)"
            )
        if len(scores) != len(tokens):
            raise RunError(
                f"{self._section}.base_url: {self._config.base_url} was sent {len(tokens)} tokens and "
                f"returned logprobs of {len(scores)}: use a server that keeps token ids as they are"
            )
        return list(scores[1:])


def filled(
    batch: PackedBatch, spans: Sequence[slice], answers: Sequence[Sequence[TokenScores]], top_k: int | None
) -> dict[str, Tensor]:
    """The teacher's fields for the tokens of the loss mask in these spans."""
    if top_k is None:
        logprobs = _kept(batch.reference_logprobs, (batch.num_tokens,))
        for place, scores in _scored(batch, spans, answers):
            logprobs[place] = scores[str(int(batch.tokens[place]))]["logprob"]
        return {"reference_logprobs": logprobs}
    ids = _kept(batch.top_ids, (batch.num_tokens, top_k), torch.int32)
    of_top = _kept(batch.top_logprobs, (batch.num_tokens, top_k))
    for place, scores in _scored(batch, spans, answers):
        # The token of the prompt itself is included whatever its rank.
        top = sorted(scores.items(), key=lambda item: -item[1]["logprob"])[:top_k]
        if len(top) < top_k:
            raise RunError(
                f"a teacher's server returned {len(top)} of {top_k} likeliest tokens: set a smaller top_k"
            )
        ids[place] = torch.tensor([int(token) for token, _ in top], dtype=torch.int32)
        of_top[place] = torch.tensor([known["logprob"] for _, known in top])
    return {"top_ids": ids, "top_logprobs": of_top}


def _scored(
    batch: PackedBatch, spans: Sequence[slice], answers: Sequence[Sequence[TokenScores]]
) -> list[tuple[int, TokenScores]]:
    """Places of the loss mask, each with its scores."""
    return [
        (place, scores)
        for span, answer in zip(spans, answers, strict=True)
        for place, scores in zip(range(span.start + 1, span.stop), answer, strict=True)
        if batch.loss_mask[place]
    ]


def _spans(batch: PackedBatch, sequences: Sequence[int]) -> list[slice]:
    """Spans of the sequences that have scored tokens."""
    starts = batch.cu_seqlens.tolist()
    spans = [slice(starts[s], starts[s + 1]) for s in sequences]
    return [span for span in spans if bool(batch.loss_mask[span].any())]


def _kept(field: Tensor | None, size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype) if field is None else field.clone()


def serve_rewards(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    """Start an experiment's reward model and answer over HTTP until the process receives SIGINT or SIGTERM.

    `announce` receives the address once the endpoint answers. Raises NemorlError.
    """
    asyncio.run(_serve_rewards(experiment, announce))


async def _serve_rewards(experiment: Experiment, announce: Callable[[Listening], None]) -> None:
    endpoint = experiment.generation.endpoint or EndpointConfig()
    async with AsyncExitStack() as stack:
        scorer = await _open(experiment, stack)
        end, failures = asyncio.Event(), []

        async def score(examples: Sequence[Example]) -> list[float]:
            try:
                return await scorer.score(examples)
            except ClusterError as error:  # nothing can be served without its processes
                failures.append(error)
                end.set()
                raise

        chat = experiment.data.chat
        app_of = reward_app(experiment.policy, endpoint, chat=chat, score=score)
        # After Ray's start, which takes the signals for itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end.set)
        announce(await stack.enter_async_context(answering(endpoint, app_of)))
        await end.wait()
        if failures:
            raise failures[0]


async def _open(experiment: Experiment, stack: AsyncExitStack) -> RewardScorer:
    """The processes, which end with the stack."""
    policy, cluster = experiment.policy, experiment.cluster
    processes = [request for request in worker_requests(experiment) if request.group == "policy"]
    runtime = stack.enter_context(ClusterRuntime(cluster, processes))
    placement = await runtime.reserve()
    stack.callback(placement.release)
    spec = ModelSpec("policy", "policy", policy, trains=False)
    group = await stack.enter_async_context(Starter(experiment, placement).model(spec))
    stack.push_async_callback(group.shutdown)
    model = ModelHandle(group, policy, cluster.deadlines, trains=False)
    return RewardScorer(model, policy.layout.fewest_units)
