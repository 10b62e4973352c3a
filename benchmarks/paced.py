"""Parts that give runs on a CPU the times of an accelerator: real processes and tokens, injected seconds.

- A decode step takes the same time whatever the size of its batch, as where memory bandwidth bounds it.
- Completions have drawn lengths (log-normal) and end nowhere else.
- Training takes a time proportional to its tokens.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nemorl.algorithms.objective import TokenLoss
from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.front import ReportStream
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import Completion, EngineOptions, GenerationRequest

STEP_SECONDS = 0.03  # of a decode step
BATCH = 16  # sequences that an engine decodes together
TOKENS_PER_SECOND = BATCH / STEP_SECONDS  # of an engine whose batch is full
MEDIAN, SIGMA, LONGEST = 24, 0.8, 110  # tokens of a completion


def drawn_length(seed: int) -> int:
    """Tokens of the completion of a request with this seed."""
    return max(1, min(LONGEST, round(MEDIAN * random.Random(seed).lognormvariate(0, SIGMA))))


class PacedConfig(TorchGenerationConfig):
    host_class = "paced:PacedHost"


class PacedHost(TorchHost):
    def __init__(self, config: PacedConfig, options: EngineOptions) -> None:
        super().__init__(config, options)
        step = self.engine.step

        def paced(admit: bool = True) -> list[Completion]:
            begun = time.monotonic()
            ended = step(admit)
            if ended or self.engine.num_running:
                time.sleep(max(0.0, begun + STEP_SECONDS - time.monotonic()))
            return ended

        self.engine.step = paced  # type: ignore[method-assign]

    async def submit(self, requests: Sequence[GenerationRequest], stream: ReportStream) -> None:
        await super().submit([_with_length(request) for request in requests], stream)


def _with_length(request: GenerationRequest) -> GenerationRequest:
    left = max(1, drawn_length(request.seed) - request.sampled_before)
    return replace(request, max_new_tokens=left, stop_token_ids=frozenset(), stop_strings=())


def loss(
    batch: Any, logprobs: Tensor, old: Tensor, advantages: Tensor, seconds_per_token: float
) -> TokenLoss:
    """The policy gradient, after a pause for the tokens of the micro-batch."""
    time.sleep(seconds_per_token * len(logprobs))
    ratio = (logprobs - old).exp()
    return TokenLoss(-ratio * advantages, ratio)


def reward(completions: list[str], **_: Any) -> list[float]:
    """0 or 1 by the text alone, so that no group is without a gradient for long."""
    return [float(sum(map(ord, text)) % 2) for text in completions]
