"""Layers that predict further tokens: multi-token prediction (MTP; arXiv 2412.19437, section 2.2).

With t[i] the tokens of a sequence, E their embeddings and h_0 the model's hidden states, depth k computes

    h_k[i] = norm(layer(W [norm(E[t[i + k]]); norm(h_(k-1)[i])]))      p_k[i] = softmax(head(h_k[i]))

and p_k[i] predicts t[i + k + 1]; places that have no such token predict nothing. Positions and attention are
those of the token i. Embedding and head are the model's. Megatron's own layers find the later tokens by
shifting what each rank has, sequence by sequence; here `MicroBatchMaker` names them, so packing, padding and
context parallelism make no difference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from nemorl.models.shape import MtpShape

from .packing import PackedLayout

PREFIX = "mtp."  # of the layers' parameters


class _WithoutGradient(torch.autograd.Function):
    """The input; its gradient is 0 and not missing, as reductions wait for that of every parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros_like(grads[0])


class MtpLayer(MegatronModule):
    """The layer of one depth, in Megatron's block for such layers and with the names of its modules."""

    def __init__(
        self,
        config: TransformerConfig,
        mtp: MtpShape,
        norm: Callable[..., torch.nn.Module],
        layer: ModuleSpec,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        """`layer_number` counts these layers from 1; `layer` is of an ordinary one."""
        super().__init__(config=config)
        self._hidden_first = mtp.hidden_first
        self.enorm, self.hnorm, self.final_layernorm = (
            norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            for _ in range(3)
        )
        self.eh_proj = ColumnParallelLinear(
            *(2 * config.hidden_size, config.hidden_size),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
        )
        # The layer adds the number of layers that earlier stages have.
        number = layer_number + config.num_layers - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, vp_stage=vp_stage, layer_number=number)

    @staticmethod
    def cut_off(x: Tensor, *, is_last_use: bool) -> Tensor:
        """`x` without what it was computed from, which gets a gradient of 0 if this `is_last_use` of it."""
        if is_last_use:
            return _WithoutGradient.apply(x)  # type: ignore[no-any-return]
        return x.detach().requires_grad_()  # for recomputed layers, which require it of their input

    def forward(self, hidden: Tensor, embedded: Tensor, layout: PackedLayout) -> Tensor:
        """[n, 1, H] from those of the depth before and of the later tokens; n / TP tokens under SP."""

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            parts = self.enorm(embedded), self.hnorm(hidden)
            projected, _ = self.eh_proj(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))
            projected = tensor_parallel.gather_from_tensor_model_parallel_region(projected)
            if self.config.sequence_parallel:
                projected = tensor_parallel.scatter_to_sequence_parallel_region(projected)
            output, _ = self.transformer_layer(
                hidden_states=projected, attention_mask=None, packed_seq_params=layout
            )
            return self.final_layernorm(output)  # type: ignore[no-any-return]

        if self.config.recompute_granularity == "full":
            return tensor_parallel.checkpoint(compute, False, hidden, embedded)  # type: ignore[no-any-return]
        return compute(hidden, embedded)


def mtp_layers(
    mtp: MtpShape, norm: Callable[..., torch.nn.Module], layers: Sequence[ModuleSpec]
) -> MultiTokenPredictionBlockSubmodules:
    """What Megatron's model builds on its last stage, where it keeps a copy of the embedding for it."""
    options = {"mtp": mtp, "norm": norm}
    specs = [ModuleSpec(MtpLayer, params={**options, "layer": layer}) for layer in layers]
    return MultiTokenPredictionBlockSubmodules(layer_specs=specs)
