"""A real model: trainer and engine against transformers. Slow, and only where the model was fetched."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine.engine import create_engine
from nemorl.generation.types import EngineOptions, GenerationRequest, SamplingParams
from tests.megatron.cases import start_worker
from tests.megatron.examples import policy_config, ragged_batch, reference_logprobs

FOLDER = Path("models/smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.exists(), reason="run `nemorl models fetch smollm2 models/smollm2` first"),
]


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_trainer_logprobs_equal_transformers(theirs, tmp_path):
    batch = ragged_batch()
    worker = start_worker(0, 1, f"file://{tmp_path}/rendezvous", policy_config(FOLDER))
    try:
        worker.load_batch(batch)
        worker.compute_logprobs([[3, 0, 5], [1, 2], [4, 6, 7]], old=True, reference=False)
        expected = reference_logprobs(theirs, batch, 1.0)
        torch.testing.assert_close(worker.batch.old_logprobs, expected, atol=1e-4, rtol=0)
    finally:
        worker.close()


def test_engine_logprobs_equal_transformers(theirs):
    prompt = AutoTokenizer.from_pretrained(FOLDER)("What is 12 + 7?", return_tensors="np")["input_ids"][0]
    engine = create_engine(TorchGenerationConfig(max_batch_size=1), EngineOptions(FOLDER, FOLDER, 64))
    engine.add(GenerationRequest("one", prompt.astype("int32"), SamplingParams(), max_new_tokens=32, seed=3))
    while not (completions := engine.step()):
        pass
    sampled = torch.from_numpy(completions[0].tokens.astype("int64"))
    whole = torch.cat([torch.from_numpy(prompt.astype("int64")), sampled])
    with torch.no_grad():
        logprobs = theirs(whole[None]).logits[0].log_softmax(-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(1, sampled[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(completions[0].logprobs), expected, atol=1e-4, rtol=0)
