"""One engine of one process and one of two, for all tests: each takes half a minute to start."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.generation.vllm_engine.models import make, write_tokenizer
from tests.required import require_vllm

T = TypeVar("T")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_vllm()
    return tmp_path_factory.mktemp("vllm_models")


@pytest.fixture(scope="session")
def dense(model_folder: Path) -> tuple[Path, Any]:
    """Folder and network of a dense model, which has a tokenizer."""
    network = make("llama", model_folder / "llama")
    write_tokenizer(model_folder / "llama")
    return model_folder / "llama", network


@pytest.fixture(scope="session")
def mixture(model_folder: Path) -> tuple[Path, Any]:
    """Folder and network of a mixture of experts."""
    return model_folder / "qwen3_moe", make("qwen3_moe", model_folder / "qwen3_moe")


class Running:
    """A host in an event loop of its own."""

    def __init__(self, folder: Path, lora: Any = None, quantization: Any = None, **config: Any) -> None:
        self.folder = folder
        self._lora, self._quantization = lora, quantization
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.host = self.run(self._make(folder, config), 300)

    async def _make(self, folder: Path, config: dict[str, Any]) -> Any:
        from nemorl.config.generation import VllmGenerationConfig
        from nemorl.generation.types import EngineOptions
        from nemorl.generation.vllm_engine.arguments import LEARNED_LAYOUT, ONE_PROCESS, QUANTIZATION
        from nemorl.generation.vllm_engine.host import VllmHost

        host = VllmHost(
            VllmGenerationConfig(backend="vllm", max_num_seqs=8, **config),
            EngineOptions(folder, folder, 200, rank=3, commit_seconds=60),
            lora=self._lora,
            quantization=self._quantization,
        )
        await host.start()
        for variable in (LEARNED_LAYOUT, ONE_PROCESS, QUANTIZATION):  # not for the next engine
            os.environ.pop(variable, None)
        return host

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 120) -> T:
        return self.submit(work).result(seconds)

    @property
    def processes(self) -> dict[str, int]:
        """vLLM's that live, by what they are."""
        told = (what.rsplit(" (process ", 1) for what in self.host._vllm._processes.values())
        return {name: int(process[:-1]) for name, process in told}

    def close(self) -> None:
        # Whole runs let engines end as they should; that takes each of them five seconds.
        for process in self.processes.values():
            os.kill(process, signal.SIGKILL)
        self.run(self.host.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="session")
def one(dense: tuple[Path, Any]) -> Iterator[Running]:
    """A dense model on one process, updated next to the weights in use."""
    engine = Running(dense[0], max_num_batched_tokens=200)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def two(mixture: tuple[Path, Any]) -> Iterator[Running]:
    """A mixture on two processes, updated in place. A test kills one of them: it comes last."""
    engine = Running(mixture[0], tensor_parallel_size=2, update="in_place", on_update="continue")
    yield engine
    engine.close()
