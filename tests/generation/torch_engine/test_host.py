"""The generation process's side of a refit, with an engine that does not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine import host as module
from nemorl.generation.torch_engine.host import TorchHost
from nemorl.weights.messages import RefitDeadline


def test_an_engine_that_never_takes_its_weights_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    engine = SimpleNamespace(model=SimpleNamespace(slices=list, staging_parameters=dict))
    monkeypatch.setattr(module, "create_engine", lambda *args, **options: engine)
    monkeypatch.setattr(TorchHost, "_run", lambda self: None)  # an engine that hangs in its step

    async def refit() -> None:
        host = TorchHost(
            tmp_path,
            TorchGenerationConfig(max_new_tokens=8),
            rank=3,
            device="cpu",
            threads=None,
            tokenizer_path=tmp_path,
            max_sequence_length=64,
            precision="float32",
            commit_seconds=0.05,
        )
        host._receiver._received = 2
        await host.commit_weights(2)

    message = r"refit to version 2: generation rank 3 has received the weights, .* within 0\.05 s"
    with pytest.raises(RefitDeadline, match=message):
        asyncio.run(refit())
