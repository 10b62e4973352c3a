"""One episode of an agent that owns its loop: like a conversation, but for who asks whom.

task ─run▶ agent ⇄ model calls, directly or over HTTP ─▶ Episode ─▶ the sample's branches
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from nemorl.config.generation import LOOPBACK
from nemorl.generation.types import SamplingParams
from nemorl.trajectories import (
    Answer,
    EnvironmentLost,
    Episode,
    EpisodeEnvironment,
    EpisodeTruncated,
    Task,
    called,
    episode_problem,
)

from .endpoint import MODEL_NAME, Address, Endpoint, OpenEpisode
from .model_calls import EpisodeAccount, ModelCalls
from .turn_loop import ConversationFailed, Part, Record, SampleKey, Sampler, TurnLoop

PLAYER_NAME = re.compile(r"[\w-]+")  # a part of the names of metrics


class RecordedModel:
    """A `Model` whose calls are those of one player of an episode, or of a fork of it."""

    name = MODEL_NAME

    def __init__(self, table: "_Table", calls: ModelCalls, address: Address) -> None:
        self.base_url, self.api_key = address.base_url, address.api_key
        self.chat: Callable[..., Coroutine[Any, Any, Answer]] = calls.chat
        self._table, self._calls = table, calls

    def player(self, name: str) -> "RecordedModel":
        if not PLAYER_NAME.fullmatch(name):
            raise ValueError(f"player = {name!r}: names of players have letters, digits, `_` and `-` only")
        return self._table.player(name)

    def fork(self) -> "RecordedModel":
        return self._table.fork(self._calls)


@dataclass(frozen=True)
class _Seat:
    player: str
    fork: int  # of the episode, from 1 on; 0 of a player that was not forked
    posted: OpenEpisode
    model: RecordedModel


class _Table:
    """The players of an episode and their forks. The model that `run` receives is a player without a name."""

    def __init__(
        self, account: EpisodeAccount, sampling: SamplingParams, endpoint: Endpoint, rewards: frozenset[str]
    ) -> None:
        self._account, self._sampling, self._endpoint, self._rewards = account, sampling, endpoint, rewards
        self._seats: list[_Seat] = []
        self._addresses = ExitStack()

    def player(self, name: str) -> RecordedModel:
        known = (seat.model for seat in self._seats if (seat.player, seat.fork) == (name, 0))
        return next(known, None) or self._seat(name, 0, None)

    def fork(self, origin: ModelCalls) -> RecordedModel:
        player = next(seat.player for seat in self._seats if seat.posted.calls is origin)
        return self._seat(player, 1 + max(seat.fork for seat in self._seats), origin)

    def _seat(self, player: str, fork: int, origin: ModelCalls | None) -> RecordedModel:
        calls = ModelCalls(self._account, self._sampling, origin)
        posted = OpenEpisode(calls, self._rewards)
        model = RecordedModel(self, calls, self._addresses.enter_context(self._endpoint.open(posted)))
        self._seats.append(_Seat(player, fork, posted, model))
        return model

    def close(self) -> None:
        self._account.close()
        self._addresses.close()

    @property
    def has_called(self) -> bool:
        return any(seat.posted.calls.has_called for seat in self._seats)

    def parts(self) -> list[Part]:
        """What those who made a call have said, with their rewards so far."""
        found = []
        for seat in self._seats:
            if (calls := seat.posted.calls).has_called:
                part = calls.part(seat.posted.answer_rewards, seat.posted.rewards)
                found.append(replace(part, player=seat.player, fork=seat.fork))
        return found

    def reward(self, episode: Episode) -> None:
        """Take the rewards of an episode. Raises ValueError for an unknown player or answer."""
        if unknown := sorted(episode.player_rewards.keys() - {seat.player for seat in self._seats}):
            raise ValueError(f"rewards of the player {unknown[0]}, which the episode does not have")
        for answer in sorted(episode.answer_rewards):
            if not any(seat.posted.calls.has_answered(answer) for seat in self._seats):
                raise ValueError(f"rewards of the answer {answer}, which the model did not give")
        for seat in self._seats:
            seat.posted.add(episode, seat.player)


class EpisodeLoop(TurnLoop):
    """Runs episodes as `TurnLoop` runs conversations; its endpoint listens from the first one on."""

    def __init__(self, sampler: Sampler, rewards: Iterable[str], host: str = LOOPBACK) -> None:
        """`rewards`: names of those that the environment may give. `host`: where its endpoint listens."""
        super().__init__(sampler)
        self._rewards = frozenset(rewards)
        self._endpoint = Endpoint(sampler.tokenizer, sampler.limits.max_sequence_length, host)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _converse(
        self,
        record: Record,
        task: Task,
        environment: EpisodeEnvironment,  # type: ignore[override]
        key: SampleKey,
        sampling: SamplingParams,
    ) -> None:
        await self._endpoint.start()
        account = EpisodeAccount(self.sampler, key, record)
        table = _Table(account, sampling, self._endpoint, self._rewards)
        running = asyncio.ensure_future(
            called(environment.run, task, table.player(""), problem_of=episode_problem)
        )
        try:
            episode = await self._supervise(running, account)
            if not table.has_called:
                limit = f", since {account.truncated_by} leaves no room" if account.truncated_by else ""
                raise self._failed(record, ValueError(f"it ended without a call of the model{limit}"))
            try:
                table.reward(episode)
            except ValueError as error:
                raise self._failed(record, error) from None
            record.columns = dict(episode.columns)
        finally:
            running.cancel()  # nothing when it is done
            table.close()
            record.seats = table.parts()  # also where it has failed

    async def _supervise(self, running: "asyncio.Future[Episode]", account: EpisodeAccount) -> Episode:
        """Wait for the end of `run`. After a limit was met, whatever it raises is due to that."""
        while not running.done() and not account.failure.done():
            left = account.environment_seconds_left
            if left <= 0:
                late = TimeoutError("no call of the model and no end within the seconds of the environment")
                raise self._failed(account.record, late)
            waited_for: set[asyncio.Future[Any]] = {running, account.failure}
            await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if account.failure.done():
            raise account.failure.result()
        if running.cancelled():
            raise self._failed(account.record, RuntimeError("cancelled itself"))
        error = running.exception()
        if not isinstance(error, EnvironmentLost | TimeoutError):
            account.sampler.service.answered()
        if error is None:
            return running.result()
        if account.truncated_by is not None or isinstance(error, EpisodeTruncated):
            return Episode()
        raise self._failed(account.record, error)

    @staticmethod
    def _failed(record: Record, error: BaseException) -> ConversationFailed:
        record.failure = error
        return ConversationFailed(f"environment run: {type(error).__name__}: {error}")
