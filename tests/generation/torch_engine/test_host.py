"""The generation process's side of a refit, with an engine that does not answer."""

import asyncio

import pytest

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine.host import GenerationHost, GenerationWorker
from nemorl.weights.messages import RefitDeadline


async def never(self: GenerationWorker, version: int) -> None:
    """An engine that hangs in its step."""
    await asyncio.Event().wait()


def test_an_engine_that_never_takes_its_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationWorker, "__init__", lambda self, **options: None)
    monkeypatch.setattr(GenerationWorker, "slices", lambda self: [])
    monkeypatch.setattr(GenerationWorker, "commit", never)

    async def refit() -> None:
        host = GenerationHost(TorchGenerationConfig(max_new_tokens=8), rank=3, commit_seconds=0.05)
        host._receiver._received = 2
        await host.commit_weights(2)

    message = r"refit to version 2: generation rank 3 has received the weights, .* within 0\.05 s"
    with pytest.raises(RefitDeadline, match=message):
        asyncio.run(refit())
