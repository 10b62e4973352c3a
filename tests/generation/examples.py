"""Small models, requests and loops that the tests of this package share."""

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.front import EngineFront
from nemorl.generation.torch_engine.engine import ModelRunner, TorchEngine
from nemorl.generation.types import Completion, GenerationRequest, Refusal, RequestRefused, SamplingParams
from nemorl.models.kv_cache import StepTokens
from nemorl.models.shape import ModelShape, Rope

PLAIN = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=12),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.02),
    GREEDY,
]
VOCABULARY = 97
SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    tied_embeddings=True,
    rope=Rope(10000.0),
    rms_norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_ids=(),
    torch_dtype="float32",
)


@dataclass
class Clock:
    """Seconds that pass only when set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class HfModel:
    """A random model as transformers has it, and its folder."""

    folder: Path
    network: Any

    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """One full forward pass: [T, vocabulary], row t for the token after tokens[t]."""
        with torch.no_grad():
            logits = self.network(torch.tensor([list(tokens)])).logits[0].float()
        return (logits / temperature).log_softmax(-1)


@dataclass
class Prompts:
    """Reproducible prompts."""

    seed: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def one(self, length: int) -> NDArray[np.int32]:
        return self.rng.integers(0, VOCABULARY, length).astype(np.int32)

    def several(self, count: int, shortest: int = 1, longest: int = 20) -> list[NDArray[np.int32]]:
        return [self.one(int(self.rng.integers(shortest, longest + 1))) for _ in range(count)]


def request(
    prompt: NDArray[np.int32],
    name: str = "a",
    sampling: SamplingParams = PLAIN,
    max_new_tokens: int = 8,
    seed: int = 0,
    **fields: Any,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, sampling, max_new_tokens, seed, **fields)


def mixed_requests(count: int, **fields: Any) -> list[GenerationRequest]:
    """Prompts of 1 to 40 tokens, `SAMPLINGS` in turn and answers of up to 31 tokens."""
    return [
        request(prompt, f"{i}", SAMPLINGS[i % len(SAMPLINGS)], 1 + (7 * i) % 31, seed=i, **fields)
        for i, prompt in enumerate(Prompts(0).several(count, 1, 40))
    ]


def assert_same(left: Mapping[str, Completion], right: Mapping[str, Completion]) -> None:
    """Tokens and stop reasons, and logprobs up to rounding: drafts change the rows of a product."""
    assert left.keys() == right.keys()
    for name, completion in left.items():
        assert completion.tokens.tolist() == right[name].tokens.tolist(), name
        np.testing.assert_allclose(completion.logprobs, right[name].logprobs, atol=5e-5)
        assert completion.stop == right[name].stop


def take_time(runner: Any, clock: Clock, first: float, each: float, counts: list[int]) -> None:
    """Have a decoding step take `first` seconds and `each` of a row, and count its rows."""
    decode = runner.decode

    def timed(step: StepTokens) -> torch.Tensor:
        clock.now += first + each * sum(step.counts)
        counts.append(sum(step.counts))
        result: torch.Tensor = decode(step)
        return result

    runner.decode = timed


def random_weights(model: ModelRunner, seed: int) -> None:
    """Stage random weights whose logits differ clearly from token to token."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.staging_parameters().values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.4 * noise)


def small_engine(
    seed: int = 0, max_sequence_length: int = 200, shape: ModelShape = SHAPE, **arguments: Any
) -> TorchEngine:
    """An engine with random weights; what is not an argument of the engine goes to its config."""
    own = {name: arguments.pop(name) for name in ("decode", "clock", "draft_shape") if name in arguments}
    engine = TorchEngine(
        shape,
        TorchGenerationConfig(**arguments),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=max_sequence_length,
        **own,
    )
    random_weights(engine.model, seed)
    engine.commit(0)
    return engine


def finish(engine: TorchEngine) -> dict[str, Completion]:
    """Step until nothing is left; completions by id."""
    completions: dict[str, Completion] = {}
    while engine.num_running + engine.num_waiting:
        completions |= {c.id: c for c in engine.step()}
    return completions


def serve(engine: TorchEngine, requests: Iterable[GenerationRequest]) -> dict[str, Completion]:
    """Serve requests that arrive together."""
    for one in requests:
        engine.add(one)
    return finish(engine)


async def completions(
    front: EngineFront, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Completion, None]:
    """Completions as they finish, one by one. Refusals are raised."""
    async with aclosing(front.generate_batches(requests)) as batches:
        async for batch in batches:
            for report in batch:
                if isinstance(report, Refusal):
                    raise RequestRefused(report.reason)
                if isinstance(report, Completion):
                    yield report


def assert_sampled_by_probability(completions: Collection[Completion]) -> None:
    """Chi-square of complete answers to one prompt, against their probabilities by the engine's logprobs."""
    count = len(completions)
    counts = Counter(tuple(c.tokens.tolist()) for c in completions)
    expected = {tuple(c.tokens.tolist()): count * float(np.exp(c.logprobs.sum())) for c in completions}
    likely = [tokens for tokens in expected if expected[tokens] >= 5]
    cells = [(counts[tokens], expected[tokens]) for tokens in likely]
    rest = count - sum(expected[tokens] for tokens in likely)
    if rest >= 5:
        cells.append((count - sum(counts[tokens] for tokens in likely), rest))
    degrees = len(cells) - 1
    assert degrees > 5
    # The 0.999 quantile of chi-square, by Wilson and Hilferty.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert sum((seen - mean) ** 2 / mean for seen, mean in cells) < limit
