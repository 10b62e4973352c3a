"""The policy's model: Megatron's GPTModel with our norms, core attention, router and deferred logits."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemorl.config.generation import SamplingConfig
from nemorl.config.policy import FullRecompute, PolicyConfig, SelectiveRecompute
from nemorl.models.layout import padded_vocab_size, stage_layers
from nemorl.models.shape import ModelShape

from .attention import LatentAttention, PackedAttention
from .device import DTYPES, DeviceKind, building
from .head import Scores, VocabularyShard, predictions, token_logprobs, top_logprobs
from .kernels import Kernels
from .lora import Adapters
from .moe import ExpertLayer, RoutedLayer, expert_arguments
from .mtp import mtp_layers
from .packing import MicroBatch, ModelInput

# Of a depth of multi-token prediction: logprobs [N], and 1 where the likeliest token is right [N].
Prediction = tuple[Tensor, Tensor]


class RMSNorm(torch.nn.Module):
    """Root mean square norm; unlike Megatron's wrapper of torch's it takes sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees its part of the tokens only; Megatron sums the gradients of weights that say so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """The same with a weight that is kept less one, as Gemma has it."""

    def forward(self, x: Tensor) -> Tensor:
        """The shape and type of `x` [..., hidden_size], computed in float32 as in transformers."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1, self.eps).type_as(x)


class NormedAdd(torch.nn.Module):
    """Megatron's step from a sublayer's output to the residual stream, with a norm of the output."""

    def __init__(self, norm: type[RMSNorm], config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """A function of (output, bias), the residual stream and the dropout, of which there is none."""
        return lambda output, residual, dropout: residual + self.norm(output[0])


def _layer_spec(config: TransformerConfig, shape: ModelShape, layer: int) -> ModuleSpec:
    norm, latent = _norm(shape), shape.mla is not None
    spec: ModuleSpec
    if config.transformer_impl == "transformer_engine":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.moe.num_experts if shape.moe and shape.is_moe(layer) else None,
            moe_grouped_gemm=True,
            qk_layernorm=shape.qk_norm or latent,  # latent attention always has its norms
            multi_latent_attention=latent,
        )
        attention = spec.submodules.self_attention.submodules
        if latent:
            # Megatron would copy these to all tensor-parallel ranks here and divide them in local layers.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=shape.qk_norm, multi_latent_attention=latent, normalization="RMSNorm"
        )
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        if shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
        if latent:
            attention.q_layernorm = attention.kv_layernorm = norm
    if shape.is_moe(layer):
        spec.module, spec.submodules.mlp = RoutedLayer, ExpertLayer
    window = shape.window(layer)
    attention.core_attention = ModuleSpec(
        PackedAttention,
        params={
            "window": window,
            "local_rope": window is not None and shape.local_rope is not None,
            "rotates": not latent,
            "sinks": shape.sinks,
        },
    )
    if latent:
        spec.submodules.self_attention.module = LatentAttention
    if shape.post_norms:
        add = ModuleSpec(NormedAdd, params={"norm": norm, "config": config})
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add
    return spec


def _norm(shape: ModelShape) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if shape.zero_centered_norm else RMSNorm


class ScalarHead(torch.nn.Module):
    """A linear layer to one number, the same on all tensor-parallel ranks; zero until weights are loaded.

    The shape's mean is subtracted from the number, and the rest divided by its deviation.
    """

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        super().__init__()
        self._mean, self._std = shape.value_mean, shape.value_std
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._sequence_parallel = config.sequence_parallel
        # Then a rank multiplies it with its own tokens only, and Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] float32, from hidden states [n, 1, H], of n / TP tokens under sequence parallelism."""
        values = (F.linear(hidden, self.weight).float().flatten() - self._mean) / self._std
        if not self._sequence_parallel:
            return values
        # All ranks compute the same loss from the values, so each has the whole gradient of its own.
        return tensor_parallel.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False
        )


# Megatron's fields for `activation(gate) * up` of an MLP or an expert.
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation_func": F.silu},
    "gelu_tanh": {"activation_func": partial(F.gelu, approximate="tanh")},
    # gate * sigmoid(1.702 gate) * (up + 1), both clamped first
    "clamped_swiglu": {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    },
}


def transformer_config(
    shape: ModelShape, policy: PolicyConfig, kind: DeviceKind, kernels: Kernels
) -> TransformerConfig:
    layout, recompute, mla, dtype = policy.layout, policy.recompute, shape.mla, DTYPES[policy.precision]
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    first, last = layout.layers_in_first_stage, layout.layers_in_last_stage
    options: dict[str, Any] = {**_ACTIVATIONS[shape.activation], **expert_arguments(shape, policy)}
    if isinstance(recompute, FullRecompute):
        full = {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
        options |= {"recompute_granularity": "full", **full}
    elif isinstance(recompute, SelectiveRecompute):
        options |= {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    if policy.fp8 is not None:
        options |= {"fp8": policy.fp8.format, "fp8_recipe": policy.fp8.recipe}
    if mla is not None:  # positions and the softmax scale are ours
        options |= {
            "q_lora_rank": mla.query_rank,
            "kv_lora_rank": mla.key_value_rank,
            "qk_head_dim": mla.head_dim,
            "qk_pos_emb_head_dim": mla.rotary_dim,
            "v_head_dim": mla.value_dim,
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
        }
    return (TransformerConfig if mla is None else MLATransformerConfig)(
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
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        # Of two stages the first says it all, and Megatron divides by the number of stages that are left.
        num_layers_in_last_pipeline_stage=None if stages == 2 and first is not None else last,
        # Interleaved stages exchange with one neighbor in both directions at a time, and of two stages both
        # neighbors are the same: only separate sends keep the two apart.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        # A gloo send may still be reading an output when the interleaved schedule would free it.
        deallocate_pipeline_outputs=stages > 1 and not (chunks > 1 and kind == "cpu"),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, dense models included
        mtp_num_layers=shape.num_mtp_layers or None,
        calculate_per_token_loss=True,  # losses are sums: see schedule.py
        finalize_model_grads_func=finalize_sums,
        use_cpu_initialization=kind == "cpu",
        cuda_graph_scope=[],
        perform_initialization=False,  # weights are always loaded
        transformer_impl=kernels.layers,
        moe_grouped_gemm=kernels.layers == "transformer_engine",
        gradient_accumulation_fusion=kernels.fused_gradients,
        bias_activation_fusion=kernels.fused_activation,
        # Rotation and softmax are our attention's, and there is no dropout.
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **options,
    )


def finalize_sums(models: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron's reduction of gradients over DP, SP and tied embeddings, not divided by a token count."""
    distributed.finalize_model_grads(models, None, **groups)


# Dimension of the weight that tensor parallelism divides.
_SHARDED_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


class PolicyModel(GPTModel):
    """One pipeline stage of a policy, or one of its runs of layers under VPP."""

    def __init__(
        self, config: TransformerConfig, shape: ModelShape, policy: PolicyConfig, chunk: int
    ) -> None:
        tp_size = policy.layout.tensor_parallel_size
        stage = parallel_state.get_pipeline_model_parallel_rank()
        layers = stage_layers(shape.num_layers, policy.layout, stage, chunk)
        norm = TENorm if config.transformer_impl == "transformer_engine" else _norm(shape)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        further = None
        if shape.mtp is not None and is_last:
            numbers = range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
            further = mtp_layers(shape.mtp, norm, [_layer_spec(config, shape, n) for n in numbers])
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[_layer_spec(config, shape, layer) for layer in layers],
                layer_norm=norm,
            ),
            vocab_size=padded_vocab_size(shape, tp_size),
            max_sequence_length=policy.max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=is_last,
            mtp_block_spec=further,
            share_embeddings_and_output_weights=shape.tied_embeddings and shape.head == "lm",
            position_embedding_type="none",  # rotary, in the attention
            vp_stage=chunk if policy.layout.virtual_pipeline_parallel_size > 1 else None,
        )
        self.embedding_scale = shape.embedding_scale
        if self.embedding_scale is not None:  # as the type of the weights has it, which transformers uses
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=config.params_dtype))
        self.chunk_tokens = policy.logprob_chunk_tokens
        columns = self.vocab_size // tp_size
        start = parallel_state.get_tensor_model_parallel_rank() * columns
        self.vocabulary = VocabularyShard(
            start=start,
            num_real=min(max(shape.vocab_size - start, 0), columns),
            group=parallel_state.get_tensor_model_parallel_group() if tp_size > 1 else None,
        )
        self.scalar_head: ScalarHead | None = None
        if shape.head == "scalar" and self.post_process:
            del self.output_layer
            self.scalar_head = ScalarHead(config, shape)
        if further is not None and self.share_embeddings_and_output_weights and not self.pre_process:
            # The head uses the copy of the embedding that is here for these layers.
            del self.output_layer.weight
            self.output_layer.weight = None
        self._mtp_input: Tensor | None = None  # of the newest pass, where it is not what the decoder returns
        if shape.mtp is not None and shape.mtp.before_final_norm and is_last:
            self.decoder.final_layernorm.register_forward_pre_hook(self._keep_mtp_input)
        # Mark weights that are shards, or the gradient norm counts those of one rank only. Megatron does this
        # when it draws random weights, which we skip; from 0.17 on in any case.
        for module in self.modules():
            for kind, dim in _SHARDED_DIM.items():
                weight = module.weight if isinstance(module, kind) else None
                if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                    tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)
        # Rows that pad the vocabulary are never loaded; uninitialised memory there may be NaN.
        for name, parameter in self.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter.data[self.vocabulary.num_real :] = 0

    def forward(self, micro: ModelInput) -> Tensor:
        """Hidden states [N + padding, 1, H] after this stage; of N / TP tokens under sequence parallelism."""
        embedded = None
        if self.pre_process:
            embedded = self._embed(micro.tokens, micro.position_ids)
            if torch.is_grad_enabled() and not embedded.requires_grad:
                # Of frozen weights; recomputed layers need a gradient at their input for what is inside.
                embedded.requires_grad_()
        return self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=micro.layout)  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[n, 1, H] of tokens [1, n]; of n / TP tokens under sequence parallelism."""
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=position_ids)
        return embedded if self.embedding_scale is None else embedded * self.embedding_scale

    def _keep_mtp_input(self, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            (self._mtp_input,) = inputs

    def predict_further(self, hidden: Tensor, micro: MicroBatch, *, detach: bool) -> list[Prediction]:
        """What each depth of multi-token prediction says of the trained tokens, right after a forward pass.

        With `detach` only these layers get a gradient. All ranks of context parallelism get the values of
        all tokens, which are 0 at those that are not predicted.
        """
        weight, found = self.output_weight(), []
        if self._mtp_input is not None:
            hidden, self._mtp_input = self._mtp_input, None
        if detach:
            hidden, weight = hidden.detach(), weight.detach()
        is_copy = not (self.pre_process or self.share_embeddings_and_output_weights)
        for depth, further in enumerate(micro.further):
            embedded = self._embed(further.tokens, micro.position_ids)
            layer = self.mtp.layers[min(depth, len(self.mtp.layers) - 1)]
            if detach:
                embedded = layer.cut_off(embedded, is_last_use=is_copy)
            hidden = layer(hidden, embedded, micro.layout)
            logprobs, is_likeliest = predictions(
                *(self._selected(hidden, further.predictors), weight),
                *(micro.batch.tokens.index_select(0, further.labels), self.vocabulary),
                chunk_tokens=self.chunk_tokens,
            )
            values = logprobs, is_likeliest.float()
            spread = [_of_whole_batch(each, further.labels, micro) for each in values]
            found.append((spread[0], spread[1]))
        return found

    def score(
        self,
        hidden: Tensor,
        micro: MicroBatch,
        temperature: float,
        *,
        entropy: bool,
        collision: bool = False,
        candidates: Tensor | None = None,
        filters: SamplingConfig | None = None,
    ) -> Scores:
        """Logprobs [N] and statistics [N] of the micro-batch, 0 where its loss mask is False.

        They are of what `filters` keep, and logprobs are -inf where these drop the token itself.

        With `candidates` [N, C] the logprobs are [N, 1 + C], of the token itself and of these in its place,
        and the entropies have no gradient. With a scalar head its values [N], of all tokens, alone. Under
        context parallelism all ranks get the values of all.
        """
        if self.scalar_head is not None:
            values = self.scalar_head(hidden).index_select(0, micro.local_positions)
            return Scores(_of_whole_batch(values, micro.own, micro))
        labels, predictors, number = micro.labels, micro.predictors, None
        if micro.distinct is not None and candidates is None:  # those of a shared place may differ
            first, number = micro.distinct
            labels, predictors = labels.index_select(0, first), predictors.index_select(0, first)
        hidden = self._selected(hidden, predictors)
        ids = micro.batch.tokens.index_select(0, labels).unsqueeze(1)
        if candidates is not None:
            ids = torch.cat((ids, candidates.index_select(0, labels)), dim=1)
        logprobs, *statistics = token_logprobs(
            *(hidden, self.output_weight(), ids, self.vocabulary),
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy=entropy or candidates is not None,
            collision=collision,
            filters=filters,
        )

        def of_all(values: Tensor) -> Tensor:
            values = values if number is None else values.index_select(0, number)
            return _of_whole_batch(values, micro.labels, micro)

        if candidates is not None:  # the entropy is a metric only
            statistics = [None if one is None else one.detach() for one in statistics]
        logprobs = logprobs.squeeze(1) if candidates is None else logprobs
        return Scores(of_all(logprobs), *(None if one is None else of_all(one) for one in statistics))

    def top(self, hidden: Tensor, micro: MicroBatch, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Ids [N, k] of the likeliest tokens at each place and their logprobs [N, k]; 0 outside the mask."""
        options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": self.chunk_tokens}
        hidden = self._selected(hidden, micro.predictors)
        ids, logprobs = top_logprobs(hidden, self.output_weight(), k, self.vocabulary, **options)
        return _of_whole_batch(ids, micro.labels, micro), _of_whole_batch(logprobs, micro.labels, micro)

    def _selected(self, hidden: Tensor, places: Tensor) -> Tensor:
        """[m, H] hidden states at these places of the rank's tokens."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        hidden = hidden.squeeze(1).index_select(0, places)
        if not self.config.sequence_parallel:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return hidden

    @torch.no_grad()
    def states_of_batch(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[N, H] of all tokens of the batch, from what this rank's layers computed, without a gradient."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        return _of_whole_batch(hidden.squeeze(1).index_select(0, micro.local_positions), micro.own, micro)

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


class PolicyParallel(distributed.DistributedDataParallel):
    """Megatron's data parallelism, which copies nothing where there is one rank."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self._has_copies:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def start_param_sync(self, *_: Any, **options: bool) -> None:
        if self._has_copies:
            super().start_param_sync(**options)

    @property
    def _has_copies(self) -> bool:
        """Experts may have copies where the rest has none: on the TP ranks that do not share them."""
        has_experts = bool(self.expert_parallel_buffers)
        return self.dp_cp_group.size() > 1 or (has_experts and self.expt_dp_group.size() > 1)


def overlaps_reductions() -> bool:
    """True if gradients are reduced during the backward pass: there are data- or context-parallel ranks."""
    ranks: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return ranks > 1


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
    """This rank's runs of layers, one, or several under VPP; weights are not loaded yet."""
    config = transformer_config(shape, policy, kind, kernels)
    ddp_config = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=policy.optimizer.is_sharded,
        grad_reduce_in_fp32=policy.optimizer.gradient_bytes == 4,
        overlap_grad_reduce=overlaps_reductions(),
    )
    chunks = range(policy.layout.virtual_pipeline_parallel_size)
    with building(kind):
        models = [PolicyModel(config, shape, policy, chunk).to(device) for chunk in chunks]
        for chunk, model in enumerate(models):
            if adapters is not None:
                adapters.attach(model, chunk)
            if not trains:
                model.requires_grad_(False)
        parallel = [PolicyParallel(config, ddp_config, model) for model in models]
    if ddp_config.overlap_grad_reduce:
        # Only the last micro-batch starts reductions: those before it add to the gradients.
        of_chunks = [chunk.no_sync for chunk in parallel]
        config.no_sync_func = of_chunks if len(of_chunks) > 1 else of_chunks[0]
    return parallel


def _of_whole_batch(values: Tensor, places: Tensor, micro: MicroBatch) -> Tensor:
    """[N, ...] from what this rank has at some places and the other context-parallel ranks at others."""
    size = (micro.batch.num_tokens, *values.shape[1:])
    spread = values.new_zeros(size).index_copy(0, places, values)
    group = parallel_state.get_context_parallel_group()
    return tensor_parallel.reduce_from_tensor_model_parallel_region(spread, group=group)  # type: ignore[no-any-return]


# From names of Transformer Engine's layers (megatron-core 0.16.1), where a norm before one matrix belongs to
# the matrix's module and the experts of a layer are one module, to those of Megatron's local layers.
_RULES = (
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.linear_q_up_proj\.layer_norm_weight$", ".q_layernorm.weight"),
    (r"\.linear_kv_up_proj\.layer_norm_weight$", ".kv_layernorm.weight"),
    (r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2"),
)


def local_name(name: str) -> str:
    for pattern, local in _RULES:
        name = re.sub(pattern, local, name)
    return name
