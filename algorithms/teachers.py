"""Teachers: frozen models, or servers that the policy's ranks query, which score the policy's tokens.

Results go to the policy's ranks by object reference; the driver only assigns sequences to teachers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemorl.config.algorithm.aligned import TeacherScore
from nemorl.config.auxiliary import (
    EndpointTeacherConfig,
    TeacherConfig,
    default_teacher,
    teachers_by_key,
)
from nemorl.config.facts import group_name
from nemorl.data.packed import PackedBatch
from nemorl.data.shards import Column, Field, SequencePlace
from nemorl.errors import RunError
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.types import EngineFailed, RequestRefused
from nemorl.rewards.scored import Attempts, Service
from nemorl.session.handles import BatchKind
from nemorl.session.session import Session
from nemorl.trajectories import Task

Answer = Mapping[Field, Sequence[tuple[object, int]]]  # of a teacher: stores and rows of its sequences


@dataclass(frozen=True)
class TeacherCalls:
    """Calls that score the sequences of a batch; by default none."""

    calls: Sequence[tuple[str, Callable[[], Awaitable[Answer]]]] = ()  # by model, for `Session.run_and_take`
    rows: Sequence[int] = ()  # of the batch, in the order of the calls and of their answers
    fields: Mapping[Field, Field] = field(default_factory=dict)  # of a teacher's batch, as the policy's

    def columns(self, answers: Sequence[Answer]) -> Iterator[tuple[Field, Column]]:
        """Fields of the policy's batch, from the answers to all calls."""
        for of_teacher, of_policy in self.fields.items():
            places = [place for answer in answers for place in answer[of_teacher]]
            by_row = dict(zip(self.rows, places, strict=True))
            yield of_policy, Column(tuple(by_row[row] for row in range(len(places))))


@dataclass(frozen=True)
class Teachers:
    session: Session
    configs: Mapping[str, TeacherConfig]
    multiples: Mapping[str, int]  # of those in processes: of sequences into which a batch of theirs is laid
    top_k: int | None  # number of likeliest tokens; None: the logprob of each token of the sequence
    scaled: bool = False  # probabilities of the likeliest tokens of aligned examples, to sum to 1
    score: TeacherScore | None = None  # what teachers of aligned examples say of themselves

    async def fill(self, places: Sequence[SequencePlace], teachers: Sequence[str], kind: BatchKind) -> None:
        """Fill the batch that the policy has loaded with the results of each sequence's teacher."""
        asked = self.asked(places, teachers, kind)

        async def take(answers: Sequence[Answer]) -> None:
            for of_policy, column in asked.columns(answers):
                await self.session.learner.take(of_policy, column)

        await self.session.run_and_take(asked.calls, take)

    def asked(
        self, places: Sequence[SequencePlace], teachers: Sequence[str], kind: BatchKind
    ) -> TeacherCalls:
        """The calls of each sequence's teacher. One behind an endpoint is queried by the policy's ranks."""
        rows = {name: [i for i, one in enumerate(teachers) if one == name] for name in self.configs}
        asked = {name: own for name, own in rows.items() if own}
        calls = [(self._model(name), partial(self._ask, name, asked[name], places, kind)) for name in asked]
        return TeacherCalls(calls, [i for own in asked.values() for i in own], self._fields)

    @property
    def _fields(self) -> Mapping[Field, Field]:
        """Fields of a teacher's batch, and what they are to the policy."""
        if self.top_k is None:
            return {"old_logprobs": "reference_logprobs"}
        names: list[Field] = ["top_ids", "top_logprobs"]
        names += ["teacher_scores"] if self.score is not None else []
        return {name: name for name in names}

    def _model(self, name: str) -> str:
        """The model whose processes query a teacher."""
        return "policy" if self.configs[name].kind == "endpoint" else group_name(f"teachers.{name}")

    async def _ask(
        self, name: str, rows: Sequence[int], places: Sequence[SequencePlace], kind: BatchKind
    ) -> dict[Field, list[tuple[object, int]]]:
        config = self.configs[name]
        if config.kind == "endpoint":
            policy = self.session.learner
            await policy.fill(set(rows), EndpointTeacher(config, name, self.top_k), stage="teachers")
            shared = {name: await policy.share(of_policy) for name, of_policy in self._fields.items()}
            return {name: [column.places[row] for row in rows] for name, column in shared.items()}
        own, teacher = [places[row] for row in rows], self.session.model(self._model(name))
        # The result of the padding is not used.
        padded = [*own, *[replace(own[0], weight=0.0)] * (-len(own) % self.multiples[name])]

        async def compute() -> dict[Field, list[tuple[object, int]]]:
            await teacher.load([replace(place, compared=None) for place in padded], kind=kind)
            if self.top_k is None:
                await teacher.logprobs(old=True, reference=False)
            else:
                await teacher.top(self.top_k, scaled=self.scaled, score=self.score)
            return {name: list((await teacher.share(name)).places[: len(own)]) for name in self._fields}

        return await teacher.outlasting(compute)


def teachers_of_tasks(
    tasks: Sequence[Task], key: str | None, teachers: Mapping[str, TeacherConfig]
) -> list[str]:
    """The name of each task's teacher, or of the only one. Raises RunError for a task without one.

    `key` is the column whose value is of one of the teachers; the default one has the tasks of other values.
    """
    if key is None:
        return list(teachers)[:1] * len(tasks)
    names, default = teachers_by_key(teachers), default_teacher(teachers)
    named = []
    for task in tasks:
        value = task.columns.get(key)
        name = None if value is None else names.get(value, default)
        if name is None:
            problem = f"is {value!r}" if key in task.columns else "is missing"
            raise RunError(
                f"task {task.index}: the column `{key}`, which algorithm.teacher_key names, {problem}; "
                f"set it to one of the teachers: {', '.join(names)}"
            )
        named.append(name)
    return named


Scores = Mapping[str, Mapping[str, Any]]  # of one position, by token id: `logprob` and `rank`


class EndpointTeacher:
    """A teacher behind an endpoint that returns logprobs of prompts of token ids, as vLLM's server does."""

    def __init__(self, config: EndpointTeacherConfig, name: str, top_k: int | None) -> None:
        self._config = config
        self._section = f"teachers.{name}"
        self._top_k = top_k

    def __call__(self, batch: PackedBatch, sequences: Sequence[int], *, seconds: float) -> dict[str, Tensor]:
        """The fields of the batch that the teacher fills, of these sequences; the others keep their values.

        `reference_logprobs` [N], or with `top_k` `top_ids` and `top_logprobs` [N, k]. Raises MissingKey, and
        RunError when the server does not answer, or not with logprobs.
        """
        n, k = batch.num_tokens, self._top_k
        scores = asyncio.run(self._scores(batch, sequences, seconds))
        if k is None:
            kept = batch.reference_logprobs
            logprobs = torch.zeros(n) if kept is None else kept.clone()
            for place, of_place in scores:
                logprobs[place] = of_place[str(int(batch.tokens[place]))]["logprob"]
            return {"reference_logprobs": logprobs}
        ids = torch.zeros((n, k), dtype=torch.int32) if batch.top_ids is None else batch.top_ids.clone()
        of_top = torch.zeros((n, k)) if batch.top_logprobs is None else batch.top_logprobs.clone()
        for place, of_place in scores:
            # The scores include the token of the prompt, at any rank.
            top = sorted(of_place.items(), key=lambda item: -item[1]["logprob"])[:k]
            if len(top) < k:
                raise RunError(
                    f"a teacher's server returns {len(top)} of {k} likeliest tokens: request fewer"
                )
            ids[place] = torch.tensor([int(token) for token, _ in top], dtype=torch.int32)
            of_top[place] = torch.tensor([score["logprob"] for _, score in top])
        return {"top_ids": ids, "top_logprobs": of_top}

    async def _scores(
        self, batch: PackedBatch, sequences: Sequence[int], seconds: float
    ) -> list[tuple[int, Scores]]:
        """Places of the loss mask in the batch, with the scores there."""
        config, starts = self._config, batch.cu_seqlens.tolist()
        client = OpenAIClient(
            config.base_url,
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent_requests,
            max_retries=config.max_retries,
            key_field=f"{self._section}.api_key_env",
        )
        spans = [range(starts[s], starts[s + 1]) for s in sequences]
        spans = [span for span in spans if bool(batch.loss_mask[span.start : span.stop].any())]
        prompts = [batch.tokens[span.start : span.stop].tolist() for span in spans]
        service = Service(f"{self._section} at {config.base_url}", seconds)
        try:
            async with asyncio.timeout(seconds):
                answers = await asyncio.gather(*(self._ask(client, service, prompt) for prompt in prompts))
        except TimeoutError as error:
            problem = f"no answer within {seconds:g} s (cluster.deadlines.logprobs)"
            raise RunError(f"{self._section}: {problem}") from error
        except (EngineFailed, RequestRefused) as error:
            raise RunError(f"{self._section}: {error}") from error
        finally:
            await client.close()
        return [
            (place, scores)
            for span, answer in zip(spans, answers, strict=True)
            for place, scores in zip(span[1:], answer, strict=True)
            if batch.loss_mask[place]
        ]

    async def _ask(self, client: OpenAIClient, service: Service, tokens: list[int]) -> list[Scores]:
        """The scores at each token but the first. A server that does not answer is waited for."""
        body = {"model": self._config.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        answer, attempts = None, Attempts(service)
        while answer is None:
            try:
                answer = await client.post("/completions", {**body, "prompt_logprobs": self._top_k or 0})
                service.answered()
            except EngineFailed as error:
                if not await attempts.repeat(str(error)):
                    raise
        scores = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        server = f"{self._section}.base_url = {self._config.base_url}: the server"
        if not scores:
            raise RunError(
                f"{server} answers without prompt_logprobs; serve the teacher with vLLM, whose server "
                "returns them, or in processes of the run (kind: model)"
            )
        if len(scores) != len(tokens):
            raise RunError(
                f"{server} received {len(tokens)} tokens and returns prompt_logprobs of {len(scores)}; use a "
                "server that does not change prompts of token ids"
            )
        return list(scores[1:])
