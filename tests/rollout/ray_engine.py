"""A stand-in engine for a process of its own: the policy says what the sum is, whatever it is asked."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import load_tokenizer
from nemorl.generation.types import Completion, GenerationRequest
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import completion


class AddingEngine:
    """Answers `a+b=` with the sum, each after some seconds; a sum of `deadly` ends its process."""

    def __init__(self, model_path: Path, deadly: int | None = None, seconds: float = 0.0) -> None:
        self._tokenizer = load_tokenizer(PolicyConfig(model_path=model_path))
        self._deadly, self._seconds = deadly, seconds

    async def generate_batches(
        self, requests: list[GenerationRequest]
    ) -> AsyncGenerator[list[Completion], None]:
        for request in requests:
            left, right = self._tokenizer.decode(request.prompt.tolist()).rstrip("=").split("+")
            total = int(left) + int(right)
            await asyncio.sleep(self._seconds)
            if total == self._deadly:
                os._exit(7)
            yield [completion(request, [*self._tokenizer.encode(str(total)), ENDOFTEXT], version=4)]
