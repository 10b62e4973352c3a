"""The process of the embedded engine: its threads, and a refit with an engine that does not answer."""

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.tokens import load_decoder
from nemorl.generation.torch_engine import engine as module
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import EngineOptions
from nemorl.models.create import create_tiny_model
from nemorl.weights.messages import RefitDeadline


def openmp_threads() -> int:
    """Threads of this process that Python did not start; others than OpenMP's do not come and go here."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def test_only_the_engines_thread_keeps_openmp_threads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_tiny_model(folder, hidden=512, layers=1, heads=4, kv_heads=4, seed=1)  # loaded by several threads
    load_decoder(folder)  # starts the threads of the tokenizers' library
    before = openmp_threads()
    options = EngineOptions(folder, folder, 64, threads=3, commit_seconds=60)
    host = TorchHost(TorchGenerationConfig(max_new_tokens=8), options)
    deadline = time.monotonic() + 10  # the thread that loaded the model ends after its answer
    while openmp_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert openmp_threads() <= before
    host.close()


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
