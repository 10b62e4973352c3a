"""The host of a server that another process runs."""

# ruff: noqa: F811 (fixtures of another package are imported by their names)

import asyncio
from pathlib import Path

import numpy as np

from nemorl.config.generation import OpenAIGenerationConfig
from nemorl.generation.openai_engine import OpenAIHost
from nemorl.generation.types import EngineOptions
from nemorl.session.supervisor import hanging
from tests.generation.examples import completions, request
from tests.serve.conftest import served_model  # noqa: F401


def test_a_long_answer_is_no_hanging_engine(served_model: Path) -> None:
    async def main() -> None:
        accepted = asyncio.Event()

        async def answers_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answers_nothing, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        url = f"http://{host}:{port}/v1"
        client = OpenAIHost(
            OpenAIGenerationConfig(backend="openai", base_url=url, model="tiny"),
            EngineOptions(served_model, served_model, 64),
        )
        asked = completions(client, [request(np.array([70, 71], np.int32), "long")])
        answer = asyncio.ensure_future(anext(asked))
        await accepted.wait()
        client._last_chunk -= 1000.0
        health = client.health()
        assert health.running == 1
        assert hanging(health, 600.0) is None
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await client.close()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
