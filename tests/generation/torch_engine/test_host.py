"""The generation process's side of a refit, with an engine that does not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine import engine as module
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import EngineOptions
from nemorl.weights.messages import RefitDeadline


def test_an_engine_that_never_takes_its_weights_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    engine = SimpleNamespace(model=SimpleNamespace(slices=lambda drafts: [], staging_parameters=dict))
    monkeypatch.setattr(module, "create_engine", lambda *args, **options: engine)
    monkeypatch.setattr(TorchHost, "_run", lambda self: None)  # an engine that hangs in its step

    async def refit() -> None:
        host = TorchHost(
            TorchGenerationConfig(max_new_tokens=8),
            EngineOptions(tmp_path, tmp_path, 64, rank=3, commit_seconds=0.05),
        )
        host._receiver._received = 2
        await host.commit_weights(2)

    message = r"refit to version 2: generation rank 3 has received the weights, .* within 0\.05 s"
    with pytest.raises(RefitDeadline, match=message):
        asyncio.run(refit())
