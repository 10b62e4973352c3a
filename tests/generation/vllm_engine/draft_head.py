"""A program: vLLM's own class of an EAGLE-3 head, without an engine.

    python -m tests.generation.vllm_engine.draft_head MEETING MODEL INPUTS HEAD...

It loads the head of each folder for the policy in MODEL, as an engine does, and writes the logits [n, V] of
the `embedded` [n, H] and `states` [n, 3 H] of a sequence in INPUTS next to the folder. Attention is torch's,
as that of vLLM works on the KV cache of an engine.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.generation.vllm_engine.loading import ranks_of_one_engine


class Attention(nn.Module):
    """Causal attention of a sequence that is read in one pass."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def logits(model_path: Path, head: Path, embedded: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Any]]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(model_path), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, distributed_executor_backend="mp", kv_cache_memory_bytes=2**20,
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": 2},
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            initialize_model_parallel(1, 1, backend="gloo")
        model: Any = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        attention = model.model.layers[0].self_attn
        attention.attn = Attention(attention.head_dim)
        count = len(states)
        with torch.no_grad():
            hidden = model.combine_hidden_states(states)
            tokens = torch.zeros(count, dtype=torch.int64)
            output, _ = model(tokens, torch.arange(count), hidden, embedded)
            found: Tensor = model.compute_logits(output).contiguous()
    said = {
        "class": type(model).__name__,
        "own lm_head": getattr(model, "has_own_lm_head", False),
        "own embedding": getattr(model, "has_own_embed_tokens", False),
        "layers": config.speculative_config.draft_model_config.hf_config.eagle_config,
    }
    return found, said


def main(rendezvous: Path, model_path: Path, inputs: Path, *heads: Path) -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do

    torch.set_num_threads(1)
    given = load_file(inputs)
    with ranks_of_one_engine(0, 1, rendezvous):
        for head in heads:
            found, said = logits(model_path, head, given["embedded"], given["states"])
            metadata = {name: str(value) for name, value in said.items()}
            save_file({"logits": found}, head.with_suffix(".logits"), metadata=metadata)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
