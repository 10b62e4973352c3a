"""Random models of every family, made once."""

import pytest
import torch

from tests.generation.examples import VOCABULARY, HfModel

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = ("llama", "llama-untied-scaled", "mistral-yarn", "qwen2", "qwen3")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    configs = {
        "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
        "llama-untied-scaled": LlamaConfig(**COMMON, tie_word_embeddings=False, rope_parameters=scaling),
        # A window that no text of these tests fills.
        "mistral-yarn": MistralConfig(**COMMON, sliding_window=256, rope_parameters=yarn),
        "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=False),
    }
    models = {}
    for name, config in configs.items():
        torch.manual_seed(7)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in network.parameters():
            # Norms and biases too: at their initial ones and zeros a mistake in them would not show.
            mean = 1.0 if parameter.dim() == 1 else 0.0
            torch.nn.init.normal_(parameter, mean, 0.2)
        folder = tmp_path_factory.mktemp(name)
        network.save_pretrained(folder)
        models[name] = HfModel(folder, network)
    return models


@pytest.fixture(params=FAMILIES)
def hf_model(request, hf_models):
    return hf_models[request.param]
