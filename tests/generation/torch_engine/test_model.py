"""The decoder against transformers, in float32."""

import pytest
import torch

from nemorl.device import upload
from nemorl.generation.torch_engine.engine import ModelRunner
from nemorl.models.kv_cache import Prompt, StepTokens, padded_slots
from nemorl.models.registry import load_shape
from tests.generation.examples import SHAPE, Prompts


def runner_of(model, dtype=torch.float32):
    runner = ModelRunner(
        load_shape(model.folder),
        max_kv_tokens=4096,
        max_positions=256,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    runner.load(model.folder)
    return runner


def step_of(tokens, positions):
    counts = [1] * len(tokens)
    uploaded = upload(torch.device("cpu"), tokens, positions, padded_slots(counts))
    return StepTokens(tokens, positions, counts, uploaded)


def logits_of_every_position(runner, texts, num_prompt_tokens):
    """Prefill the beginnings of `texts` and feed the rest token by token; [texts, steps, vocabulary]."""
    runner.cache.reserve(len(texts), max(map(len, texts)))
    prompts = [Prompt(text[:num_prompt_tokens], [row]) for row, text in enumerate(texts)]
    first = runner.logits(runner.prefill(prompts))
    rest = [
        runner.decode(step_of([int(text[position]) for text in texts], [position] * len(texts)))
        for position in range(num_prompt_tokens, len(texts[0]))
    ]
    return torch.stack([first, *rest], dim=1)


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 70])
def test_logits_equal_transformers_at_every_position(hf_model, num_prompt_tokens):
    texts = [Prompts(seed).one(num_prompt_tokens + 12) for seed in range(3)]
    got = logits_of_every_position(runner_of(hf_model), texts, num_prompt_tokens)
    for text, rows in zip(texts, got, strict=True):
        with torch.no_grad():
            want = hf_model.network(torch.tensor([text.tolist()])).logits[0, num_prompt_tokens - 1 :]
        assert want.std() > 0.5, "logits this flat would hide a mistake"
        torch.testing.assert_close(rows, want, atol=1e-4, rtol=0)


def test_prompts_of_different_lengths_are_read_together(hf_model):
    prompts = Prompts(3).several(12, 1, 90)
    runner = runner_of(hf_model)
    runner.cache.reserve(len(prompts), 90)
    got = runner.logits(runner.prefill([Prompt(p, [row]) for row, p in enumerate(prompts)]))
    want = torch.stack([hf_model.logprobs(p.tolist())[-1] for p in prompts])
    torch.testing.assert_close(got.log_softmax(-1), want, atol=1e-4, rtol=0)


def test_bfloat16_is_close_to_float32(hf_model):
    texts = [Prompts(seed).one(30) for seed in range(2)]
    exact = logits_of_every_position(runner_of(hf_model), texts, 20)
    rounded = logits_of_every_position(runner_of(hf_model, torch.bfloat16), texts, 20)
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_a_runner_without_weights_says_so():
    runner = ModelRunner(
        SHAPE, max_kv_tokens=64, max_positions=64, device=torch.device("cpu"), dtype=torch.float32
    )
    runner.cache.reserve(1, 8)
    with pytest.raises(RuntimeError, match="no weights"):
        runner.prefill([Prompt(Prompts().one(4), [0])])
