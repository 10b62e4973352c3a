"""The policy's model: Megatron's GPTModel with our norm, our attention and deferred logits.

Megatron's configuration of a model, from the model's shape and the policy's.
"""

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.models.layout import padded_vocab_size, stage_layers
from nemorl.models.shape import ModelShape

from .device import DTYPES, DeviceKind, building
from .head import VocabularyShard, logprobs_at, token_logprobs, top_logprobs
from .kernels import Kernels
from .layers import ScalarHead, block_spec
from .lora import Adapters
from .moe import expert_arguments
from .packing import MicroBatch, PackedLayout
from .parallel import pipeline_arguments, recompute_arguments


def transformer_config(
    shape: ModelShape, policy: PolicyConfig, kind: DeviceKind, kernels: Kernels
) -> TransformerConfig:
    """Megatron's configuration of a model, laid out and run as `policy` says."""
    layout, dtype = policy.layout, DTYPES[policy.precision]
    return (TransformerConfig if shape.mla is None else MLATransformerConfig)(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        softmax_scale=shape.softmax_scale,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=shape.zero_centered_norm,
        gated_linear_unit=True,
        add_bias_linear=shape.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        **pipeline_arguments(layout, kind),
        **recompute_arguments(policy.recompute),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in length, and losses are sums: see schedule.py.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, dense models included
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_sums,
        use_cpu_initialization=kind == "cpu",
        cuda_graph_scope=[],
        # Weights are always loaded.
        perform_initialization=False,
        transformer_impl=kernels.layers,
        moe_grouped_gemm=kernels.layers == "transformer_engine",
        gradient_accumulation_fusion=kernels.fused_gradients,
        bias_activation_fusion=kernels.fused_activation,
        # Rotation and softmax are our attention's, and without dropout and bias there is nothing to fuse.
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **_latent_attention(shape),
        **_activation(shape),
        **expert_arguments(shape, policy),
    )


def _latent_attention(shape: ModelShape) -> dict[str, Any]:
    """Fields of `MLATransformerConfig`; positions and the softmax scale are ours (latent.py)."""
    mla = shape.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.key_value_rank,
        "qk_head_dim": mla.head_dim,
        "qk_pos_emb_head_dim": mla.rotary_dim,
        "v_head_dim": mla.value_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def _activation(shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for `activation(gate) * up` of an MLP or an expert."""
    match shape.activation:
        case "silu":
            return {"activation_func": F.silu}
        case "gelu_tanh":
            return {"activation_func": partial(F.gelu, approximate="tanh")}
        case "clamped_swiglu":
            # gate * sigmoid(1.702 gate) * (up + 1), both clamped first
            return {
                "activation_func": quick_gelu,
                "activation_func_clamp_value": 7.0,
                "glu_linear_offset": 1.0,
            }


def finalize_sums(models: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's reduction of gradients over DP, SP and tied embeddings, not divided by a token count."""
    finalize_model_grads(models, None, **groups)


# Dimension of the weight that tensor parallelism divides.
_SHARDED_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


class ModelInput(Protocol):
    """What a forward pass needs of the tokens; a `MicroBatch` has it."""

    @property
    def tokens(self) -> Tensor:
        """[1, n]"""
        ...

    @property
    def position_ids(self) -> Tensor:
        """[1, n]"""
        ...

    @property
    def layout(self) -> PackedLayout:
        """The layout of the packed tokens."""
        ...


class PolicyModel(GPTModel):
    """One pipeline stage of a policy, or one of its runs of layers under VPP.

    `forward` ends at the hidden states; `score` turns those of the last stage into logprobs without ever
    holding the logits of a batch. Position embeddings are rotary and live in the attention, hence `none`
    here.
    """

    def __init__(
        self, config: TransformerConfig, shape: ModelShape, policy: PolicyConfig, chunk: int
    ) -> None:
        tp_size = policy.layout.tensor_parallel_size
        stage = parallel_state.get_pipeline_model_parallel_rank()
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(
                config, shape, stage_layers(shape.num_layers, policy.layout, stage, chunk)
            ),
            vocab_size=padded_vocab_size(shape, tp_size),
            max_sequence_length=policy.max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings and shape.head == "lm",
            position_embedding_type="none",
            vp_stage=chunk if policy.layout.virtual_pipeline_parallel_size > 1 else None,
        )
        self.embedding_scale = _rounded(shape.embedding_scale, config.params_dtype)
        self.chunk_tokens = policy.logprob_chunk_tokens
        self.vocabulary = _vocabulary_shard(shape.vocab_size, self.vocab_size)
        self.scalar_head: ScalarHead | None = None
        if shape.head == "scalar" and self.post_process:
            del self.output_layer
            self.scalar_head = ScalarHead(config)
        self._mark_sharded_weights()
        self._clear_padding_rows()

    def forward(self, micro: ModelInput) -> Tensor:
        """Hidden states [N + padding, 1, H] after this stage; of N / TP tokens under sequence parallelism."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=micro.tokens, position_ids=micro.position_ids)
            if self.embedding_scale is not None:
                embedded = embedded * self.embedding_scale
            if torch.is_grad_enabled() and not embedded.requires_grad:
                # Of frozen weights. Stages and recomputed layers without a gradient at their input give none
                # to what is inside.
                embedded.requires_grad_()
        return self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=micro.layout)  # type: ignore[no-any-return]

    def score(
        self,
        hidden: Tensor,
        micro: MicroBatch,
        *,
        temperature: float,
        entropy: bool,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [N] and entropies [N] of the micro-batch, 0 where its loss mask is False.

        With `candidates` [N, C] the logprobs are [N, 1 + C], of the token itself and of these in its place,
        and the entropies have no gradient. With a scalar head its values [N], of all tokens, and no
        entropies.

        The position before a token predicts it, and only positions that predict a masked-in token are
        computed. Under context parallelism all ranks get the values of all: each then computes the same loss,
        and takes from its gradient the part of its own tokens.
        """
        if self.scalar_head is not None:
            values = self.scalar_head(hidden).index_select(0, micro.local_positions)
            return _of_whole_batch(values, micro.own, micro), None
        hidden = self._predicting(hidden, micro)
        labels = micro.batch.tokens.index_select(0, micro.labels)
        shared: dict[str, Any] = {"temperature": temperature, "chunk_tokens": self.chunk_tokens}
        entropies: Tensor | None
        if candidates is None:
            logprobs, entropies = token_logprobs(
                hidden, self.output_weight(), labels, self.vocabulary, entropy=entropy, **shared
            )
        else:
            ids = torch.cat((labels.unsqueeze(1), candidates.index_select(0, micro.labels)), dim=1)
            logprobs, entropies = logprobs_at(hidden, self.output_weight(), ids, self.vocabulary, **shared)
        if entropies is not None:
            entropies = _of_whole_batch(entropies, micro.labels, micro)
        return _of_whole_batch(logprobs, micro.labels, micro), entropies

    def top(self, hidden: Tensor, micro: MicroBatch, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Ids [N, k] of the likeliest tokens at each place and their logprobs [N, k]; 0 outside the mask."""
        ids, logprobs = top_logprobs(
            self._predicting(hidden, micro),
            self.output_weight(),
            k,
            self.vocabulary,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
        )
        return _of_whole_batch(ids, micro.labels, micro), _of_whole_batch(logprobs, micro.labels, micro)

    def _predicting(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[m, H] the hidden states before the labels that this rank computes."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        hidden = hidden.squeeze(1).index_select(0, micro.predictors)
        if not self.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return hidden

    def weights(self) -> dict[str, Tensor]:
        """Parameters, and buffers that checkpoints hold (a router's bias in the choice of experts)."""
        kept = self.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.named_buffers() if name in kept}
        return {name: parameter.data for name, parameter in self.named_parameters()} | buffers

    def output_weight(self) -> Tensor:
        """[V / TP, H]: the output layer's own weight or the embedding's."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
        return self.output_layer.weight  # type: ignore[no-any-return]

    def _mark_sharded_weights(self) -> None:
        """Mark weights that are shards, not copies, or the gradient norm counts those of one rank only.

        Megatron does this itself when it draws random weights, which we skip.
        """
        for module in self.modules():
            for kind, dim in _SHARDED_DIM.items():
                if not isinstance(module, kind) or module.weight is None:
                    continue
                # Releases from 0.17 on mark them also without drawing weights.
                if not hasattr(module.weight, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(module.weight, True, dim, 1)

    @torch.no_grad()
    def _clear_padding_rows(self) -> None:
        """Rows that pad the vocabulary are never loaded; uninitialised memory there may be NaN."""
        for name, parameter in self.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter[self.vocabulary.num_real :] = 0


class PolicyParallel(DistributedDataParallel):
    """Data parallelism with the distributed optimizer.

    With a single data-parallel rank Megatron would copy every gradient and every weight onto itself, step by
    step.
    """

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel ranks; each keeps the shard that it updates."""
        if self._has_copies:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def start_param_sync(self, *_: Any, **options: bool) -> None:
        """Collect the updated shards from the data-parallel ranks."""
        if self._has_copies:
            super().start_param_sync(**options)

    @property
    def _has_copies(self) -> bool:
        """Experts may have copies where the rest has none: on the TP ranks that do not share them."""
        return self.dp_cp_group.size() > 1 or (
            bool(self.expert_parallel_buffers) and self.expt_dp_group.size() > 1
        )


def build_model(
    shape: ModelShape,
    policy: PolicyConfig,
    kind: DeviceKind,
    device: torch.device,
    kernels: Kernels,
    adapters: Adapters | None = None,
    *,
    trains: bool = True,
) -> list[PolicyParallel]:
    """This rank's part of the model, with room for gradients if it trains; its weights are not loaded yet.

    With adapters only these have gradients. A list of the stage's runs of layers, in their order: one, or
    several under VPP.
    """
    config = transformer_config(shape, policy, kind, kernels)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=policy.optimizer.is_sharded,
        grad_reduce_in_fp32=policy.optimizer.gradient_bytes == 4,
        overlap_grad_reduce=False,
    )
    chunks = range(policy.layout.virtual_pipeline_parallel_size)
    with building(kind):
        models = [PolicyModel(config, shape, policy, chunk).to(device) for chunk in chunks]
        if adapters is not None:
            for chunk, model in enumerate(models):
                adapters.attach(model, chunk)
        if not trains:
            for model in models:
                model.requires_grad_(False)
        return [PolicyParallel(config, ddp_config, model) for model in models]


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """A factor as the type of the weights has it: transformers multiplies by that."""
    return None if scale is None else float(torch.tensor(scale, dtype=dtype))


def _of_whole_batch(values: Tensor, places: Tensor, micro: MicroBatch) -> Tensor:
    """[N, ...] from what this rank has at some places and the other context-parallel ranks at others."""
    size = (micro.batch.num_tokens, *values.shape[1:])
    spread = values.new_zeros(size).index_copy(0, places, values)
    group = parallel_state.get_context_parallel_group()
    return tensor_parallel.reduce_from_tensor_model_parallel_region(spread, group=group)  # type: ignore[no-any-return]


def _vocabulary_shard(vocab_size: int, padded_size: int) -> VocabularyShard:
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    columns = padded_size // tp_size
    start = parallel_state.get_tensor_model_parallel_rank() * columns
    return VocabularyShard(
        start=start,
        num_real=min(max(vocab_size - start, 0), columns),
        group=parallel_state.get_tensor_model_parallel_group() if tp_size > 1 else None,
    )
