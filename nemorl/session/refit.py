"""The weight exchange over worker groups: each protocol method is one call on all ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.cluster.group import WorkerGroup
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, SenderLayout, SendReport
from nemorl.weights.session import RefitSession

_ABANDON_SECONDS = 30.0


@dataclass(frozen=True)
class _Side:
    """One side of the exchange. A call that fails leaves the processes running with the version they had."""

    group: WorkerGroup
    deadline_seconds: float

    async def _call(self, method: str, *args: Any, deadline_seconds: float | None = None) -> list[Any]:
        return await self.group.call(
            method,
            *args,
            stage="refit",
            deadline_seconds=deadline_seconds or self.deadline_seconds,
            ends_group=False,
        )

    async def _prepare(self, parts: Sequence[Any]) -> None:
        await self.group.call_sharded(
            "prepare_refit",
            parts,
            axis="rank",
            stage="refit",
            deadline_seconds=self.deadline_seconds,
            ends_group=False,
        )


class PolicySenders(_Side):
    """All policy ranks (`SenderGroup`)."""

    async def describe(self) -> Sequence[SenderLayout]:
        """What each rank holds."""
        return await self._call("describe_weights")

    async def prepare(self, parts: Sequence[Part]) -> None:
        """Give every rank its part of the plan."""
        await self._prepare(parts)

    async def send(self, session: RefitSession) -> Sequence[SendReport]:
        """Send on every rank."""
        return await self._call("send_weights", session)


@dataclass(frozen=True)
class GenerationReceivers(_Side):
    """All generation ranks (`ReceiverGroup`).

    A process of the group is a replica, which may have several ranks (tensor parallel and so on) that it
    alone speaks to. Here ranks are numbered through all replicas, one after another.
    """

    _ranks: list[int] = field(default_factory=list)  # of each replica, once they have been asked

    async def describe(self) -> Sequence[ReceiverLayout]:
        """What each rank needs."""
        layouts: list[tuple[ReceiverLayout, ...]] = await self._call("describe_weights")
        self._ranks[:] = map(len, layouts)
        return [layout for of_replica in layouts for layout in of_replica]

    async def prepare(self, parts: Sequence[Part]) -> None:
        """Give every replica its ranks' parts of the plan."""
        left = iter(parts)
        await self._prepare([tuple(itertools.islice(left, count)) for count in self._ranks])

    async def receive(self, session: RefitSession) -> Sequence[ReceiveReport]:
        """Receive on every rank."""
        reports: list[tuple[ReceiveReport, ...]] = await self._call("receive_weights", session)
        return [report for of_replica in reports for report in of_replica]

    async def commit(self, version: int) -> None:
        """Make what was received the weights in use, on every rank."""
        await self._call("commit_weights", version)

    async def abandon(self) -> None:
        """Have every rank forget an update that did not finish."""
        # An engine that stands still has mostly been waited for already, until the refit's own deadline.
        await self._call("abandon_refit", deadline_seconds=min(self.deadline_seconds, _ABANDON_SECONDS))
