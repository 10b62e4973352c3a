"""The weight exchange over worker groups: each protocol method is one call on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.cluster.group import WorkerGroup
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import Part, ReceiveReport, ReceiverLayout, SendReport
from nemorl.weights.session import RefitSession


@dataclass(frozen=True)
class _Side:
    """One side of the exchange. Its calls block and belong into a thread without an event loop."""

    group: WorkerGroup
    deadline_seconds: float

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.group.call(method, *args, stage="refit", deadline_seconds=self.deadline_seconds)

    def prepare(self, parts: Sequence[Part]) -> None:
        """Give every rank its part of the plan."""
        self.group.call_sharded(
            "prepare_refit", parts, axis="rank", stage="refit", deadline_seconds=self.deadline_seconds
        )


class PolicySenders(_Side):
    """All policy ranks (`SenderGroup`)."""

    def describe(self) -> Sequence[tuple[TensorSlice, ...]]:
        """What each rank holds."""
        return self._call("describe_weights")

    def send(self, session: RefitSession) -> Sequence[SendReport]:
        """Send on every rank."""
        return self._call("send_weights", session)


class GenerationReceivers(_Side):
    """All generation ranks (`ReceiverGroup`)."""

    def describe(self) -> Sequence[ReceiverLayout]:
        """What each rank needs."""
        return self._call("describe_weights")

    def receive(self, session: RefitSession) -> Sequence[ReceiveReport]:
        """Receive on every rank."""
        return self._call("receive_weights", session)

    def commit(self, version: int) -> None:
        """Make what was received the weights in use, on every rank."""
        self._call("commit_weights", version)
