"""The policy's model: Megatron's GPTModel with our norm, our attention and deferred logits.

Megatron's configuration of a model, from the model's shape and the policy's.

Modules of a model's layers: Megatron's, with our core attention and, in local layers, our norms.

One number after each token instead of the vocabulary: the head of a critic or a reward model.

Layers of Transformer Engine's linears and norms, as Megatron puts them together.

They hold the same tensors as Megatron's local layers, under names that `nemorl.megatron.model` reads.
The core attention, the norms behind attention and MLP and the routing stay ours: see `layers.py`, which
replaces them in either, and `kernels.py` for the reason.

Megatron's two schemes of parameter names, brought into one.

Families name parameters as Megatron's local layer spec does. Its Transformer Engine spec has the same tensors
under other names: a norm before one matrix belongs to that matrix' module, and the experts of a
layer are one module. Each of its names has exactly one place among the local ones, so this direction needs to
know nothing of the model. The other would: whether `input_layernorm` moves depends on the attention, whether
`pre_mlp_layernorm` does on the layer's MLP.

In megatron-core 0.16.1 (`models/gpt/gpt_layer_specs.py` unless a file is named):

| local spec | Transformer Engine spec | made by |
|---|---|---|
| `input_layernorm` | `self_attention.linear_qkv.layer_norm_` | `get_gpt_layer_with_…_spec`, without MLA |
| `pre_mlp_layernorm` | `mlp.linear_fc1.layer_norm_` | `get_mlp_module_spec_for_backend`, without experts |
| `self_attention.q_layernorm` | `self_attention.linear_q_up_proj.layer_norm_` | the first, with MLA |
| `self_attention.kv_layernorm` | `self_attention.linear_kv_up_proj.layer_norm_` | the first, with MLA |
| `mlp.experts.local_experts.{i}.linear_fc1.` | `mlp.experts.linear_fc1.` … `{i}` | `grouped_mlp_modules` |

The last is in `extensions/transformer_engine_spec_provider.py`; `linear_fc2` follows the same rule. The names
after the dots are Transformer Engine's: `layer_norm_weight` of its `LayerNormLinear`, `weight0`, `bias0` and
so on of its `GroupedLinear`. All else has the same name in both: MLA's `input_layernorm` and the
`pre_mlp_layernorm` before experts, which are separate modules, the norms of queries and keys without MLA, the
router, shared experts, attention sinks and everything outside of layers.
"""

import re
from collections.abc import Callable, Iterable
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
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.models.layout import padded_vocab_size, stage_layers
from nemorl.models.shape import ModelShape

from .attention import PackedAttention
from .device import DTYPES, DeviceKind, building
from .head import VocabularyShard, logprobs_at, token_logprobs, top_logprobs
from .kernels import Kernels
from .latent import LatentAttention
from .lora import Adapters
from .moe import ExpertLayer, RoutedLayer, expert_arguments
from .packing import MicroBatch, PackedLayout
from .parallel import pipeline_arguments, recompute_arguments


def transformer_engine_layer(shape: ModelShape, layer: int) -> ModuleSpec:
    """One layer by its number in the whole model; only where Transformer Engine can be imported."""
    spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.moe.num_experts if shape.moe and shape.is_moe(layer) else None,
        moe_grouped_gemm=True,
        # Latent attention always has its norms, and the specification has to be asked for them.
        qk_layernorm=shape.qk_norm or shape.mla is not None,
        multi_latent_attention=shape.mla is not None,
    )
    if shape.mla is not None:
        attention = spec.submodules.self_attention.submodules
        # Megatron would copy these to all tensor-parallel ranks here and divide them in local layers.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return spec


class RMSNorm(torch.nn.Module):
    """Root mean square norm; unlike Megatron's wrapper of torch's it takes sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees its part of the tokens only; Megatron sums the gradients of weights that say so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x` [..., hidden_size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """The same with a weight that is kept less one, as Gemma has it."""

    def forward(self, x: Tensor) -> Tensor:
        """The shape and type of `x` [..., hidden_size], computed in float32 as in transformers."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1, self.eps).type_as(x)


class NormedAdd(torch.nn.Module):
    """Megatron's step from a sublayer's output to the residual stream, with a norm of the output.

    Under sequence parallelism it sees the rank's own tokens, as the other norms do.
    """

    def __init__(self, norm: type[RMSNorm], config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """A function of (output, bias), the residual stream and the dropout, of which there is none."""
        return self._add

    def _add(self, output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        normed: Tensor = self.norm(output[0])
        return residual + normed


def block_spec(
    config: TransformerConfig, shape: ModelShape, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """A run of layers, by their numbers in the whole model."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, shape, layer) for layer in layers],
        layer_norm=TENorm if config.transformer_impl == "transformer_engine" else _norm(shape),
    )


def _layer_spec(config: TransformerConfig, shape: ModelShape, layer: int) -> ModuleSpec:
    if config.transformer_impl == "transformer_engine":
        spec = transformer_engine_layer(shape, layer)
    else:
        spec = _local_layer(shape)
    if shape.is_moe(layer):
        spec.module, spec.submodules.mlp = RoutedLayer, ExpertLayer
    spec.submodules.self_attention.submodules.core_attention = _core_attention(shape, layer)
    if shape.mla is not None:
        spec.submodules.self_attention.module = LatentAttention
    if shape.post_norms:
        add = ModuleSpec(NormedAdd, params={"norm": _norm(shape), "config": config})
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add
    return spec


def _local_layer(shape: ModelShape) -> ModuleSpec:
    spec: ModuleSpec = get_gpt_layer_local_spec(
        qk_layernorm=shape.qk_norm, multi_latent_attention=shape.mla is not None, normalization="RMSNorm"
    )
    attention, norm = spec.submodules.self_attention.submodules, _norm(shape)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.mla is not None:
        attention.q_layernorm = attention.kv_layernorm = norm
    return spec


def _norm(shape: ModelShape) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if shape.zero_centered_norm else RMSNorm


def _core_attention(shape: ModelShape, layer: int) -> ModuleSpec:
    window = shape.window(layer)
    local_rope = window is not None and shape.local_rope is not None
    params = {"window": window, "local_rope": local_rope, "rotates": shape.mla is None, "sinks": shape.sinks}
    return ModuleSpec(PackedAttention, params=params)


class ScalarHead(torch.nn.Module):
    """A linear layer to one number, the same on all tensor-parallel ranks.

    Zero until weights are loaded, so that a fresh critic expects nothing of any state.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._sequence_parallel = config.sequence_parallel
        # Then a rank multiplies it with its own tokens only, and Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] float32, from hidden states [n, 1, H], of n / TP tokens under sequence parallelism."""
        values = F.linear(hidden, self.weight).float().flatten()
        if not self._sequence_parallel:
            return values
        # All ranks compute the same loss from the values, so each has the whole gradient of its own.
        return tensor_parallel.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False
        )


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


_RULES = (
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.linear_q_up_proj\.layer_norm_weight$", ".q_layernorm.weight"),
    (r"\.linear_kv_up_proj\.layer_norm_weight$", ".kv_layernorm.weight"),
    (r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2"),
)


def local_name(name: str) -> str:
    """The local spec's name of a parameter of either spec."""
    for pattern, local in _RULES:
        name = re.sub(pattern, local, name)
    return name
