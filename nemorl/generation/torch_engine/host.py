"""The embedded engine's process: the worker and its side of the weight exchange."""

import asyncio
from typing import Any

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.worker import GenerationWorker
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout
from nemorl.weights.session import RefitDeadline, RefitSession


class GenerationHost(GenerationWorker):
    """A generation rank as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self, config: TorchGenerationConfig, *, rank: int, commit_seconds: float, **options: Any
    ) -> None:
        """`commit_seconds` is the most that the swap of staged weights may wait for the engine's step."""
        super().__init__(config=config, rank=rank, **options)
        loop = asyncio.get_running_loop()

        def commit(version: int) -> None:
            # The receiver commits from a thread of its own, so that sampling goes on until the swap.
            swap = asyncio.run_coroutine_threadsafe(self.commit(version), loop)
            try:
                swap.result(commit_seconds)
            except TimeoutError as error:
                swap.cancel()
                raise RefitDeadline(
                    f"refit to version {version}: generation rank {rank} has received the weights, and its "
                    f"engine has not taken them within {commit_seconds:g} s (cluster.deadlines.refit)"
                ) from error

        self._receiver = WeightReceiver(self.slices(), self.staging_parameters, commit)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """What this engine's one rank needs, for the plan of the exchange."""
        return (self._receiver.describe(),)

    def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        """Keep this rank's part of the plan."""
        (part,) = parts
        self._receiver.prepare(part)

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """This rank's side of a refit; the event loop goes on serving meanwhile."""
        return (await asyncio.to_thread(self._receiver.begin(session)),)

    async def commit_weights(self, version: int) -> None:
        """Sample with what was received."""
        await asyncio.to_thread(self._receiver.commit, version)

    def abandon_refit(self) -> None:
        """Stay on the version in use."""
        self._receiver.abandon()
