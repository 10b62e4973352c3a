"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over packed tokens.

Queries, and keys and values together, pass through a narrow latent that is normed. Keys have two parts: one
of each head, from the latent, without positions, and one that positions turn and that all heads share.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from .attention import rotate
from .packing import PackedLayout

# DeepSeek's norms of the latents have this epsilon whatever `rms_norm_eps` says; transformers follows it.
LATENT_NORM_EPS = 1e-6

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine Megatron has stand-ins for its classes, and takes them for the real here.
    multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):
    """Megatron's module and parameters with our rotary angles.

    Megatron's own forward pass turns positions by the place in the packed batch, and without sequence
    parallelism it does not sum the gradient of the shared key over the tensor-parallel ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Megatron knows a scale of its own yarn's only.
        self.core_attention.softmax_scale = self.config.softmax_scale
        for module in self.children():
            if hasattr(module, "eps"):  # a norm, or a projection with the norm before it
                module.eps = LATENT_NORM_EPS

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedLayout | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Queries and keys [N, heads, dim + rotary dim] and values [N, heads, value dim], this rank's heads.

        `hidden_states` [N, 1, H], of N / TP tokens under sequence parallelism. The two latents of Megatron's
        sparse attention are not given.
        """
        assert packed_seq_params is not None, "tokens come packed"
        assert packed_seq_params.rotary is not None, "a packed layout carries its rotary angles"
        # All channels [N, 1, C], of which each tensor-parallel rank computes some.
        joint = gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared_key = joint.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1)
        shared_key = copy_to_tensor_model_parallel_region(shared_key)  # sums the gradient over ranks
        query_input = hidden_states
        if self.config.q_lora_rank is not None:
            query_latent = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden_states)[0])
            query_input = self.q_layernorm(self._own_tokens(query_latent))
        normed = self.kv_layernorm(self._own_tokens(latent))
        inputs = (query_input, normed, shared_key, *packed_seq_params.rotary)
        if not self.recompute_up_proj:
            return *self._project_up(*inputs), None, None
        # Megatron's forward frees the outputs once attention has taken them.
        self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput()
        return *self.qkv_up_checkpoint.checkpoint(self._project_up, *inputs), None, None

    def _project_up(
        self, query_input: Tensor, latent: Tensor, shared_key: Tensor, *angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, from what is narrow."""
        config = self.config
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = self._heads(project(query_input)[0])
        plain, positioned = query.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        both = self._heads(self.linear_kv_up_proj(latent)[0])
        key, value = both.split((config.qk_head_dim, config.v_head_dim), -1)
        turned = _rotate_pairs(shared_key, angles).expand(-1, key.shape[1], -1)
        return (
            torch.cat((plain, _rotate_pairs(positioned, angles)), -1),
            torch.cat((key, turned), -1),
            value.contiguous(),
        )

    def _heads(self, x: Tensor) -> Tensor:
        """[N, 1, heads * dim] -> [N, heads, dim]."""
        return x.view(x.shape[0], self.num_attention_heads_per_partition, -1)

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """This rank's tokens: the projections up collect those of all ranks."""
        if not self.config.sequence_parallel:
            return latent
        return scatter_to_sequence_parallel_region(latent)  # type: ignore[no-any-return]


def _rotate_pairs(x: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
    """Rotate neighboring channels [N, heads, dim]; they end up as halves, both in queries and keys."""
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    cos, sin = angles
    return rotate(halves, cos, sin)
