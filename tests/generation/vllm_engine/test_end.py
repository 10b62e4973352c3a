"""An engine that is ended is not one that died."""

import asyncio
from typing import Any

from nemorl.generation.tokens import RequestLimits
from nemorl.generation.vllm_engine.backend import VllmBackend


class Engine:
    """vLLM's front with the task that takes outputs, which must receive nothing of the processes' end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[str] = asyncio.Queue()
        self.heard: list[str] = []
        self.output_handler = asyncio.create_task(self._take())

    async def _take(self) -> None:
        self.heard.append(await self._outputs.get())

    def shutdown(self) -> None:
        told = asyncio.run_coroutine_threadsafe(self._outputs.put("EngineDeadError"), self._loop)
        told.result(10)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(10)


def test_the_handler_of_outputs_ends_before_the_processes() -> None:
    async def main() -> Any:
        backend = VllmBackend(
            {}, {}, RequestLimits(100, 64, 64), name="engine 0", recompute_kv_cache=True
        )  # fmt: skip
        backend._engine = engine = Engine()  # type: ignore[assignment]
        await asyncio.sleep(0)  # the handler waits
        await asyncio.to_thread(backend.close)
        return engine

    engine = asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.output_handler.cancelled()
    assert engine.heard == []
