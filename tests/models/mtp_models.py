"""Models with layers for further tokens (MTP), which transformers does not compute.

Their modules have the names of the published checkpoints; what they compute is written out here by plain
modules, after DeepSeek-V3 (arXiv 2412.19437, section 2.2) and vLLM 0.32's `mimo.py` and `mimo_mtp.py`.
"""

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoMtpLayer(Qwen2DecoderLayer):
    def __init__(self, config: PretrainedConfig, number: int) -> None:
        super().__init__(config, number)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def further(self, hidden: Tensor, embedded: Tensor, *arguments: Tensor) -> Tensor:
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embedded)
        return self.final_layernorm(through(self, self.input_proj(torch.cat(parts, -1)), *arguments))


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if layers := getattr(config, "num_nextn_predict_layers", 0):
            self.model.mtp_layers = nn.ModuleList(MiMoMtpLayer(config, n) for n in range(layers))
        self.post_init()


class DeepseekMtpLayer(DeepseekV3DecoderLayer):
    def __init__(self, config: PretrainedConfig, number: int) -> None:
        super().__init__(config, config.num_hidden_layers + number)
        norms = (DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.enorm, self.hnorm = next(norms), next(norms)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.shared_head = nn.Module()
        self.shared_head.norm = next(norms)
        self.shared_head.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def further(self, hidden: Tensor, embedded: Tensor, *arguments: Tensor) -> Tensor:
        projected = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.shared_head.norm(through(self, projected, *arguments))


class DeepseekV3WithMtp(DeepseekV3ForCausalLM):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        layers = range(config.num_nextn_predict_layers)
        self.model.layers.extend(DeepseekMtpLayer(config, number) for number in layers)
        self.post_init()

    @torch.no_grad()
    def share(self) -> None:
        """Give the layers' copies of embedding and head the values of the model's."""
        for layer in mtp_layers(self):
            layer.embed_tokens.weight.copy_(self.model.embed_tokens.weight)
            layer.shared_head.head.weight.copy_(self.lm_head.weight)


DeepseekV3WithMtp.__name__ = "DeepseekV3ForCausalLM"  # as config.json has it
AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    if isinstance(config, DeepseekV3Config) and getattr(config, "num_nextn_predict_layers", 0):
        return DeepseekV3WithMtp(config)
    return AutoModelForCausalLM.from_config(config)


def mtp_layers(model: PreTrainedModel) -> nn.ModuleList:
    if isinstance(model, MiMoForCausalLM):
        return model.model.mtp_layers
    return model.model.layers[model.config.num_hidden_layers :]


def through(layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """The layer's attention and MLP, each added to its input."""
    normed = layer.input_layernorm(x)
    x = x + layer.self_attn(normed, position_embeddings=angles, attention_mask=mask)[0]
    return x + layer.mlp(layer.post_attention_layernorm(x))


def further_hidden(model: PreTrainedModel, tokens: Tensor, depth: int) -> list[Tensor]:
    """Of a sequence [T] and each depth k: hidden states [T - k, H]; row i predicts token i + k + 1."""
    trunk, before_norm = model.model, []
    with trunk.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0])):
        hidden = trunk(tokens.unsqueeze(0)).last_hidden_state
    if isinstance(model, MiMoForCausalLM):
        (hidden,) = before_norm
    layers, found = mtp_layers(model), []
    for k in range(1, depth + 1):
        size = len(tokens) - k
        if size < 1:
            break
        embedded = trunk.embed_tokens(tokens[k:].unsqueeze(0))
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        angles = trunk.rotary_emb(embedded, torch.arange(size).unsqueeze(0))
        hidden = layers[min(k, len(layers)) - 1].further(hidden[:, :size], embedded, angles, mask)
        found.append(hidden[0])
    return found
