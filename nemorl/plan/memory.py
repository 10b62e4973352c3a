"""Memory of each process of an experiment: exact for weights, an estimate for the rest.

Activations count the inputs of matrix products and what attention, activation functions and norms keep; what
is small compared with these (angles, masks, routing) is left out.
"""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import GenerationConfig, MegatronGenerationConfig
from nemorl.config.policy import (
    FullRecompute,
    LayoutConfig,
    MultiTokenPredictionConfig,
    PolicyConfig,
    SelectiveRecompute,
)
from nemorl.models.adapters import adapter_slices
from nemorl.models.family import LayerKind, Split, Stage, WeightRule
from nemorl.models.layout import (
    PolicyRank,
    has_own_head,
    is_tied_head,
    padded_vocab_size,
    stage_layers,
    weight_rules,
)
from nemorl.models.shape import Dim, ModelShape

from . import cpu_memory
from .draft_training import draft_activations, trained_head

# Resident memory of a process with its imports and nothing else, as measured on a CPU.
_POLICY_RUNTIME = 500_000_000
GENERATION_RUNTIME = 400_000_000
_ROLLOUT_RUNTIME = 500_000_000
_DRIVER_RUNTIME = 1_000_000_000  # with Ray's own processes

_FLOAT32 = 4
ITEM_SIZE = {"float32": 4, "bfloat16": 2}
# Tensors as wide as a gated MLP that it keeps: gate, up, and their product. Without a fused kernel (which a
# CPU has for none) also the activated gate and what it is multiplied with, an offset added; where both are
# clamped, both clamped, the gate's sigmoid, and experts the product times the router's weight.
_FUSED_WIDTHS = 3
_GATED_WIDTHS = {"silu": 5, "gelu_tanh": 5, "clamped_swiglu": 8}
_FUSED_GATES = {"silu"}
# A chunk of logits and its exponentials (or gradient), as measured: docs/memory.md.
_CHUNK_COPIES = 2
# Of the policy's complete distribution at all tokens of a micro-batch, where teachers have other tokens:
# 6.6 to 8.9 of each loss, as measured with one text (docs/distillation.md).
_ALIGNED_COPIES = 9
# Bytes of one logit of a sampling step: on a CPU of the logits, the distribution and its sums; on a GPU the
# first are in bfloat16 and in float32, and the sums in float64.
_SAMPLING_BYTES = {"cpu": 3 * _FLOAT32, "gpu": 2 + 2 * _FLOAT32 + 8}


@dataclass(frozen=True)
class ProcessMemory:
    """One process of a group at its peak, in bytes."""

    group: str
    count: int  # processes of this kind
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    activations: int = 0
    logits: int = 0
    head_gradient: int = 0  # of the output weight while chunks are summed; on a CPU also of the embedding
    kv_cache: int = 0
    staging: int = 0  # weights on their way to generation
    staging_on_host: int = 0  # the same in the host's memory: what `delta` keeps, whole tensors for loaders
    optimizer_on_host: int = 0  # in the host's memory, as policy.optimizer.on_host has it
    offloaded_on_host: int = 0  # in the host's memory, as policy.offload has it
    activations_on_host: int = 0  # in the host's memory, as policy.offload_activations has it
    checkpoint: int = 0  # the copy that is written during training, always in the host's memory
    checkpoints_in_memory: int = 0  # files in memory_dir: the newest, and those being written
    runtime: int = 0  # libraries, and for the driver Ray and its object store

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in MEMORY_PARTS)

    @property
    def on_device(self) -> int:
        """Bytes of one process that a GPU holds, where there is one."""
        on_host: int = sum(getattr(self, name) for name in ON_HOST)
        return self.total - on_host

    @property
    def between_steps(self) -> int:
        """Bytes that a GPU holds while the process computes nothing."""
        return self.on_device - self.activations - self.logits - self.head_gradient - self.kv_cache


MEMORY_PARTS = tuple(field.name for field in fields(ProcessMemory) if field.name not in ("group", "count"))
# Also where there are GPUs.
ON_HOST = (
    *("staging_on_host", "optimizer_on_host", "offloaded_on_host", "activations_on_host"),
    *("checkpoint", "checkpoints_in_memory"),
)


def estimate_memory(
    experiment: Experiment,
    shape: ModelShape,
    training: bool,
    auxiliary: Sequence[tuple[ModelSpec, ModelShape]] = (),
) -> tuple[ProcessMemory, ...]:
    """Every group of processes that the run starts; without `training` a policy only where it samples.

    `auxiliary` are the further models that it starts. Layouts must divide the models.
    """
    generation, policy = experiment.generation, experiment.policy
    store = experiment.cluster.object_store_megabytes * 2**20
    groups = [ProcessMemory("driver", 1, runtime=_DRIVER_RUNTIME + store)]
    if training or not generation.has_engines:
        groups.append(policy_memory(experiment, shape))
    for model, model_shape in auxiliary:  # policies that neither sample nor send, and may not learn
        rank = policy_memory(experiment.model_copy(update={"policy": model.config}), model_shape)
        parts = {"reference": 0, "kv_cache": 0, "staging": 0, "staging_on_host": 0}
        if not model.trains:
            parts |= {"gradients": 0, "optimizer": 0, "optimizer_on_host": 0, "head_gradient": 0}
            parts |= {"checkpoint": 0, "checkpoints_in_memory": 0, "activations_on_host": 0}
            # One layer's at a time: nothing is kept for a backward pass.
            layers = model_shape.num_layers // model.config.layout.pipeline_parallel_size
            parts["activations"] = rank.activations // max(1, layers)
        groups.append(replace(rank, group=model.name, **parts))
    if training and not experiment.algorithm.generates:
        return tuple(groups)
    if generation.plan_module:
        shape = replace(shape, mtp=None)  # engines have such layers only where these draft
        parameters = stage_parameters(shape, LayoutConfig(), 0).total
        weights = parameters * ITEM_SIZE[generation.precision or policy.precision]
        groups.append(importlib.import_module(generation.plan_module).memory(experiment, shape, weights))
    elif generation.has_engines:  # without weights here
        groups.append(ProcessMemory("generation", generation.replicas, runtime=GENERATION_RUNTIME))
    groups.append(ProcessMemory("rollout", experiment.cluster.rollout_workers, runtime=_ROLLOUT_RUNTIME))
    if generation.endpoint is not None:
        groups.append(ProcessMemory("endpoint", 1, runtime=_ROLLOUT_RUNTIME))
    return tuple(groups)


def policy_memory(
    experiment: Experiment, shape: ModelShape, computed_tokens: int | None = None
) -> ProcessMemory:
    """The fullest rank of the policy: stages differ by embedding, head and micro-batches in flight.

    `computed_tokens` are the most that one copy computes in an update, where they are known, as of a measured
    run; otherwise as many as the config allows.
    """
    stages = range(experiment.policy.layout.pipeline_parallel_size)
    ranks = (stage_memory(experiment, shape, stage, computed_tokens) for stage in stages)
    return max(ranks, key=lambda rank: rank.total)


def stage_memory(
    experiment: Experiment, shape: ModelShape, stage: int, computed_tokens: int | None = None
) -> ProcessMemory:
    policy, algorithm, generation = experiment.policy, experiment.algorithm, experiment.generation
    layout, item = policy.layout, ITEM_SIZE[policy.precision]
    trained = parameters = stage_parameters(shape, layout, stage)
    if policy.lora is not None:
        adapters = adapter_slices(shape, policy.lora, PolicyRank(layout, pp_rank=stage))
        trained = Parameters(dense=sum(part.num_elements for part in adapters))
    # Muon's matrices are whole on every copy.
    updated = trained.per_copy(layout) if policy.optimizer.is_sharded else trained.total
    on_host = policy.optimizer.state_is_on_host
    state_copy = updated * _FLOAT32 * (1 + policy.optimizer.num_moments)
    on_gpu = experiment.cluster.gpus_per_node > 0
    pinned_state = state_copy
    if on_gpu:
        copies = trained.total // max(1, updated)  # among which each tensor of the state is spread
        pinned = _pinned_tensors(shape, layout, stage, lambda elements: elements // copies * _FLOAT32)
        pinned_state = pinned * (1 + policy.optimizer.num_moments)
        if policy.lora is not None:  # many small tensors
            pinned_state = 2 * state_copy
    copies_state = experiment.checkpointing.enabled and experiment.checkpointing.asynchronous
    in_memory = 0
    if experiment.checkpointing.keeps_in_memory:  # on several nodes with those of another node
        in_memory = state_copy * 2 * (1 if experiment.cluster.num_nodes == 1 else 2)
    # Without its adapters a model is its own reference.
    has_reference = algorithm.keeps_reference and policy.lora is None and experiment.reference is None
    sends = algorithm.generates and generation.has_engines
    sent = parameters.total * ITEM_SIZE[generation.precision or policy.precision] if sends else 0

    step = _step_memory(experiment, shape, stage, trained.total, computed_tokens)
    logits, cache, rounded = step.logits, 0, 0
    if isinstance(generation, MegatronGenerationConfig):  # the policy samples without an engine
        if policy.trained_quantization is not None:  # kept while it samples, by few bytes less
            rounded = parameters.total * item
        if stage == layout.pipeline_parallel_size - 1:
            logits = max(logits, sampling_bytes(generation.max_batch_size, shape, gpus=on_gpu))
        cache = _cache_bytes(policy, shape, stage, generation.most_kv_tokens(policy.max_sequence_length))

    draft = _draft_parameters(policy, shape, stage)
    weights = (parameters.total + (trained.total if policy.lora else 0)) * item
    reference = parameters.total * item if has_reference else 0
    offloaded = 0
    if on_gpu and policy.offload.weights:  # in one buffer, and the reference tensor by tensor
        offloaded += pinned_bytes(weights)
        if reference:
            offloaded += _pinned_tensors(shape, layout, stage, lambda elements: elements * item)
    if on_gpu and policy.offload.optimizer and not on_host:
        offloaded += pinned_state

    return ProcessMemory(
        "policy",
        layout.world_size,
        weights=weights + draft * _FLOAT32,
        gradients=step.gradients + draft * _FLOAT32,
        optimizer=draft * 2 * _FLOAT32
        + (0 if on_host else updated * policy.optimizer.state_bytes(policy.precision)),
        reference=reference,
        activations=step.activations,
        logits=logits,
        head_gradient=step.head_gradient,
        kv_cache=cache,
        staging=buckets_bytes(generation, sent, None if on_gpu else cpu_memory.most_of_bucket(experiment))
        + rounded,
        staging_on_host=sent if generation.delta else 0,
        optimizer_on_host=state_copy if on_host else 0,
        offloaded_on_host=offloaded,
        activations_on_host=step.activations_on_host,
        checkpoint=pinned_state + 3 * draft * _FLOAT32 if copies_state else 0,
        checkpoints_in_memory=in_memory,
        runtime=_POLICY_RUNTIME,
    )


def _draft_parameters(policy: PolicyConfig, shape: ModelShape, stage: int) -> int:
    """Weights of the head for drafts on a rank, which AdamW trains in float32."""
    head = trained_head(policy, shape)
    if head is None or stage < policy.layout.pipeline_parallel_size - 1:
        return 0
    return head.num_parameters(policy.layout.tensor_parallel_size)


@dataclass(frozen=True)
class _StepMemory:
    """Bytes of a rank in a training step, besides weights and the optimizer's state: see `ProcessMemory`."""

    gradients: int
    activations: int
    logits: int
    head_gradient: int
    activations_on_host: int


def _step_memory(
    experiment: Experiment, shape: ModelShape, stage: int, trained: int, computed_tokens: int | None
) -> _StepMemory:
    """`trained` are the elements that the rank trains."""
    policy, algorithm, on_gpu = experiment.policy, experiment.algorithm, experiment.cluster.gpus_per_node > 0
    layout, item = policy.layout, ITEM_SIZE[policy.precision]
    tensor, last = layout.tensor_parallel_size, stage == layout.pipeline_parallel_size - 1
    is_tied = shape.tied_embeddings and layout.pipeline_parallel_size == 1
    # Most tokens of one optimizer step that a data-parallel rank may see. A step without any is refused by
    # another check, of which nothing is known here.
    sequences = -(-max(1, algorithm.sequences_per_update) // layout.data_parallel_size)
    most = computed_tokens or sequences * policy.max_sequence_length
    tokens = min(policy.micro_batch_tokens, most)
    own_tokens = -(-tokens // layout.context_parallel_size)
    num_micro_batches = -(-most // tokens)

    vocabulary = shape.vocab_size if shape.head == "lm" else 0
    chunk = min(policy.logprob_chunk_tokens, own_tokens)
    logits = head_gradient = 0
    if last:
        copies = _CHUNK_COPIES
        if chunk == own_tokens:  # kept for the backward pass, also those that no filter has cut, and by depth
            copies += _scores_twice(experiment)
            if (section := policy.multi_token_prediction) is not None:
                copies += shape.mtp_depth(section.depth)
        logits = chunk * vocabulary // tensor * _FLOAT32 * copies
        if policy.lora is None:
            # Its sum in float32, and in bfloat16 a chunk's product and at the end a copy (docs/memory.md).
            head_gradient = vocabulary // tensor * shape.hidden_size * (4 if item == _FLOAT32 else 8)

    gradients = trained * policy.optimizer.gradient_bytes
    kept = kept_elements(shape, policy, stage, own_tokens, num_micro_batches, fused=on_gpu)
    activations, waits = kept.on_device * item, kept.waiting * item
    if on_gpu and last and isinstance(policy.recompute, FullRecompute):
        # What the head has is free before layers are computed again, but for the gradient of a tied weight.
        stays = vocabulary // tensor * shape.hidden_size * item if head_gradient and is_tied else 0
        activations = waits + max(0, activations - waits - (logits + head_gradient - stays))
    if not on_gpu:
        embedding = 0
        if stage == 0 and policy.lora is None:
            embedding = padded_vocab_size(shape, tensor) // tensor * shape.hidden_size * item
        logits, head_gradient = cpu_memory.head_parts(
            *(logits, head_gradient, embedding), is_one_chunk=chunk == own_tokens, is_tied=is_tied
        )
        copies = layout.data_parallel_size * layout.context_parallel_size
        is_sharded = policy.optimizer.is_sharded
        gradients = cpu_memory.summed_gradients(gradients, copies=copies, is_sharded=is_sharded)
        activations = cpu_memory.with_unused(activations)
    if last and algorithm.aligns_teachers:  # on every tensor-parallel rank
        logits += own_tokens * vocabulary * _FLOAT32 * _ALIGNED_COPIES
    if (head := trained_head(policy, shape)) is not None:
        activations = draft_activations(
            *(head, policy, shape.num_layers, stage, tokens, num_micro_batches, item),
            activations=activations,
            waits=waits,
            others=logits + head_gradient,
        )
    return _StepMemory(gradients, activations, logits, head_gradient, kept.on_host * item)


def _cache_bytes(policy: PolicyConfig, shape: ModelShape, stage: int, tokens: int) -> int:
    """Keys and values of this number of tokens, where the policy samples."""
    layout, heads, dim = policy.layout, shape.num_key_value_heads, shape.head_dim
    if shape.mla is not None:  # kept as attention sees it, values as wide as keys
        heads, dim = shape.num_attention_heads, shape.mla.head_dim + shape.mla.rotary_dim
    own_heads, layers = (
        -(-heads // layout.tensor_parallel_size),
        stage_layers(shape.num_layers, layout, stage),
    )
    cache = 2 * len(layers) * own_heads * dim * tokens * ITEM_SIZE[policy.precision]
    if policy.moe.router_replay and shape.moe is not None:
        # The choices of all routers, of 2 bytes, which every rank keeps with its keys.
        cache += 2 * shape.num_moe_layers * shape.moe.top_k * tokens
    return cache


def _scores_twice(experiment: Experiment) -> bool:
    """True if the loss has logprobs of what the filters of sampling keep, and of all tokens."""
    algorithm, filters = experiment.algorithm, experiment.generation.sampling.filters
    return isinstance(algorithm, OnlineConfig) and filters and algorithm.kl_in_loss


def pinned_bytes(size: int) -> int:
    """Bytes that torch takes for pinned memory of `size`: the next power of two, which it keeps."""
    return 1 << (size - 1).bit_length() if size else 0


def _pinned_tensors(
    shape: ModelShape, layout: LayoutConfig, stage: int, size_of: Callable[[int], int]
) -> int:
    """`pinned_bytes` of each tensor of a stage on its own, whose bytes follow from its elements."""
    tensors = stage_tensors(shape, layout, stage).items()
    return sum(count * pinned_bytes(size_of(elements)) for elements, count in tensors)


def sampling_bytes(sequences: int, shape: ModelShape, *, gpus: bool = False) -> int:
    """Logits of sequences sampled together, with the copies that sampling makes; `gpus`: those of ours."""
    return sequences * shape.vocab_size * _SAMPLING_BYTES["gpu" if gpus else "cpu"]


def buckets_bytes(generation: GenerationConfig, weights: int, most: int | None = None) -> int:
    """The two buckets of a process that sends or receives weights; none is larger than what it holds.

    `most` are the bytes that a bucket has at most, if the transport limits it.
    """
    one = generation.bucket_megabytes * 2**20
    return 2 * min(one, weights, one if most is None else most)


@dataclass(frozen=True)
class Kept:
    """Elements that a rank keeps for backward passes at most."""

    waiting: int  # on the device, without what exists only while a layer is computed, also again
    on_device: int
    on_host: int


def kept_elements(
    shape: ModelShape,
    policy: PolicyConfig,
    stage: int,
    tokens: int,
    num_micro_batches: int,
    *,
    fused: bool = True,
) -> Kept:
    """What a rank of a pipeline stage keeps at most, of micro-batches of `tokens` of its own tokens.

    Without `fused` kernels, as on a CPU, norms and gates keep what their operators need.

    A stage of P has P less its number micro-batches in flight, and interleaved ones more, of a part of their
    layers each (arXiv 2104.04473). Of layers whose activations leave the device it has two at a time.
    """
    layout, recompute = policy.layout, policy.recompute
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    behind = stages - 1 - stage
    in_flight = behind + 1 if chunks == 1 else 2 * behind + (chunks - 1) * stages + 1
    in_flight = min(in_flight, num_micro_batches * chunks)
    widths = {with_experts: _layer(shape, policy, with_experts, fused) for with_experts in (False, True)}
    # For a token, by a run of layers: what waits, of which one micro-batch also the layers that pass; and
    # what exists while a layer is computed.
    kept = newest = extra = left = 0
    for chunk in range(chunks):
        with_experts = [shape.is_moe(i) for i in stage_layers(shape.num_layers, layout, stage, chunk)]
        layers = [widths[each] for each in with_experts]
        kinds = set(with_experts)
        passing = max(_passing(shape, policy, each, fused) for each in kinds)
        gradients = max(_gradients(shape, layout, each, fused) for each in kinds)
        saved = _saved(shape, policy, layers)
        number = _offloaded(policy, len(layers))
        stays = sum(saved[number:])
        kept, left = max(kept, stays), max(left, sum(saved[:number]))
        newest = max(newest, stays, *(sum(saved[first : first + 2]) for first in range(number)))
        if not isinstance(recompute, FullRecompute):
            extra = max(extra, passing + (gradients if number else 0))
        elif recompute.method == "uniform":
            extra = max(extra, max(layers) * recompute.num_layers + passing + gradients)
        else:
            rest = saved[max(number, recompute.num_layers) :]
            more = max(0, max(layers) - sum(rest))  # the others' backward passes have freed theirs
            extra = max(extra, more + passing + gradients)
    further = 0
    if stage == stages - 1 and policy.multi_token_prediction is not None:
        # Of one micro-batch, with the head, before the backward pass of the layers above.
        further = _further(shape, policy, policy.multi_token_prediction, fused)
    waits = (in_flight - 1) * kept + newest
    on_device, waiting = waits + max(further, extra), waits + further
    return Kept(tokens * waiting, tokens * on_device, tokens * in_flight * left)


def offloaded_widths(shape: ModelShape, policy: PolicyConfig, layers: Sequence[int]) -> list[int]:
    """Elements of a token that leave the device, of a run of these layers: a number for each copy."""
    widths = [_layer(shape, policy, shape.is_moe(layer)) for layer in layers]
    return _saved(shape, policy, widths)[: _offloaded(policy, len(layers))]


def _saved(shape: ModelShape, policy: PolicyConfig, layers: Sequence[int]) -> list[int]:
    """Elements that a run of layers saves of a token, in order; `layers` are those without `full`."""
    recompute, hidden = policy.recompute, _hidden(shape, policy.layout)
    if not isinstance(recompute, FullRecompute):
        return list(layers)
    if recompute.method == "uniform":
        return [hidden] * -(-len(layers) // recompute.num_layers)
    rest = layers[recompute.num_layers :]
    return [*[hidden] * (len(layers) - len(rest)), *rest]


def _offloaded(policy: PolicyConfig, layers: int) -> int:
    """How many of what `_saved` lists leave the device."""
    # The input of a group is saved after its last layer.
    return min(policy.offloaded_layers, layers) // policy.recomputed_group


def _hidden(shape: ModelShape, layout: LayoutConfig) -> int:
    return shape.hidden_size // (layout.tensor_parallel_size if layout.sequence_parallel else 1)


def _further(
    shape: ModelShape, policy: PolicyConfig, section: MultiTokenPredictionConfig, fused: bool
) -> int:
    """Elements for a token of all depths of multi-token prediction.

    Of each: the embedding and the hidden state before it, both normed, and the output before and after its
    norm, which the head has once more.
    """
    hidden, depth = _hidden(shape, policy.layout), shape.mtp_depth(section.depth)
    with_experts = shape.is_moe(shape.num_layers)
    layer = _layer(shape, policy, with_experts, fused)
    passing = _passing(shape, policy, with_experts, fused)
    if isinstance(policy.recompute, FullRecompute):
        again = layer + passing + _gradients(shape, policy.layout, with_experts, fused)
        return depth * (2 * hidden + shape.hidden_size) + 3 * hidden + again
    return depth * (5 * hidden + shape.hidden_size + layer) + passing


def _layer(shape: ModelShape, policy: PolicyConfig, with_experts: bool, fused: bool = True) -> int:
    layout, moe = policy.layout, shape.moe
    tensor = layout.tensor_parallel_size
    left_out = policy.recompute.modules if isinstance(policy.recompute, SelectiveRecompute) else ()
    in_norm = _in_norm(shape, policy, fused)
    norms = _hidden(shape, layout) * (2 if "layernorm" in left_out else 2 + 2 * in_norm)  # outputs, inputs
    if shape.post_norms:  # whose outputs are added and not kept
        norms += _hidden(shape, layout) * 2 * in_norm

    # Queries, keys and values, the first two also before their rotation, and what comes out.
    query = output = shape.num_attention_heads * shape.head_dim
    key = value = shape.num_key_value_heads * shape.head_dim
    latents = 0
    if shape.mla is not None:
        query = key = shape.num_attention_heads * (shape.mla.head_dim + shape.mla.rotary_dim)
        output = value = shape.num_attention_heads * shape.mla.value_dim
        latents = 2 * ((shape.mla.query_rank or 0) + shape.mla.key_value_rank)
    attention = latents + query + key + value + output
    if shape.qk_norm:
        attention += (query + key) * (in_norm - 1)
        if shape.num_key_value_heads > tensor:  # queries of several groups are copied to lie side by side
            attention += query
    if "core_attn" not in left_out:
        # Under context parallelism keys and values of all ranks are collected.
        attention += query + key + (key + value) * (layout.context_parallel_size - 1)

    kept = norms + attention // tensor
    if moe is None or not with_experts:
        return kept + (0 if "mlp" in left_out else _of_mlp(shape, shape.ffn_hidden_size, fused) // tensor)
    if "moe" in left_out:
        return kept
    if "shared_experts" not in left_out:
        kept += _of_mlp(shape, moe.shared_ffn_hidden_size, fused) // tensor
    of_copy = shape.hidden_size + _of_expert(shape, layout, fused)
    return kept + _copies(shape, layout) * of_copy // _shared(layout)


def _passing(shape: ModelShape, policy: PolicyConfig, with_experts: bool, fused: bool = True) -> int:
    """Elements for a token that exist while a layer is computed, next to what layers keep."""
    layout, moe = policy.layout, shape.moe
    again = policy.recompute.modules if isinstance(policy.recompute, SelectiveRecompute) else ()
    if moe is None or not with_experts:
        again_in_mlp = _of_mlp(shape, shape.ffn_hidden_size, fused) // layout.tensor_parallel_size
        return again_in_mlp if "mlp" in again else 0
    # Copies as they come from other ranks, as they leave the experts, and as they return.
    width = 3 * shape.hidden_size
    if "moe" in again:
        width += shape.hidden_size + _of_expert(shape, layout, fused)
    return _copies(shape, layout) * width // _shared(layout)


def _gradients(shape: ModelShape, layout: LayoutConfig, with_experts: bool, fused: bool = True) -> int:
    """Elements of the largest gradients in a layer for a token: those of what its MLP keeps."""
    if shape.moe is None or not with_experts:
        return _of_mlp(shape, shape.ffn_hidden_size, fused) // layout.tensor_parallel_size
    return _copies(shape, layout) * _of_expert(shape, layout, fused) // _shared(layout)


def _copies(shape: ModelShape, layout: LayoutConfig) -> int:
    """Copies of a token for its experts, which are taken to be equally busy."""
    assert shape.moe is not None
    return shape.moe.top_k * layout.expert_tensor_parallel_size


def _of_expert(shape: ModelShape, layout: LayoutConfig, fused: bool = True) -> int:
    """What an expert makes of a copy."""
    assert shape.moe is not None
    return _of_mlp(shape, shape.moe.ffn_hidden_size, fused) // layout.expert_tensor_parallel_size


def _of_mlp(shape: ModelShape, width: int, fused: bool = True) -> int:
    """What a gated MLP of this width keeps of a token after its input."""
    is_fused = fused and shape.activation in _FUSED_GATES
    return (_FUSED_WIDTHS if is_fused else _GATED_WIDTHS[shape.activation]) * width


def _in_norm(shape: ModelShape, policy: PolicyConfig, fused: bool) -> int:
    """Elements that a norm keeps for one of its input: Gemma's computes in float32.

    Without a fused kernel norms keep their input and what they multiply by their weight, both in float32.
    """
    if fused:
        return 2 if shape.zero_centered_norm else 1
    return 2 * _FLOAT32 // ITEM_SIZE[policy.precision]


def _shared(layout: LayoutConfig) -> int:
    """Ranks over which the tokens of a layer with experts are spread."""
    return layout.tensor_parallel_size if layout.sequence_parallel else 1


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank. Copies of experts lie on other ranks than copies of the rest."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def per_copy(self, layout: LayoutConfig) -> int:
        """What is left of a rank's state when it is spread over the ranks that hold the same."""
        copies = layout.context_parallel_size * layout.data_parallel_size
        shared = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        return self.dense // copies + self.experts * shared // layout.stage_size


def stage_parameters(shape: ModelShape, layout: LayoutConfig, stage: int) -> Parameters:
    """Parameters of each rank of a pipeline stage, rows that pad the vocabulary included."""
    dense = experts = 0
    for rule, count, elements in _stage_rules(shape, layout, stage):
        if rule.experts:
            experts += count * elements
        else:
            dense += count * elements
    return Parameters(dense, experts)


def stage_tensors(shape: ModelShape, layout: LayoutConfig, stage: int) -> Counter[int]:
    """How many parameters of a rank of a pipeline stage have a number of elements; of experts, all of a layer
    are one."""
    tensors: Counter[int] = Counter()
    for _, count, elements in _stage_rules(shape, layout, stage):
        tensors[elements] += count
    return tensors


@lru_cache(maxsize=256)  # of one layout, which is planned again with each setting of recomputation
def _stage_rules(
    shape: ModelShape, layout: LayoutConfig, stage: int
) -> tuple[tuple[WeightRule, int, int], ...]:
    """Rules of the parameters that each rank of a stage has, their number, and the elements of one."""
    return tuple(_rules_of(shape, layout, stage))


def _rules_of(shape: ModelShape, layout: LayoutConfig, stage: int) -> Iterator[tuple[WeightRule, int, int]]:
    chunks = range(layout.virtual_pipeline_parallel_size)
    layers = [layer for chunk in chunks for layer in stage_layers(shape.num_layers, layout, stage, chunk)]
    last = layout.pipeline_parallel_size - 1
    further = [shape.num_layers + number for number in range(shape.num_mtp_layers if stage == last else 0)]
    times = {Stage.LAYERS: _by_kind(shape, layers), Stage.MTP: _by_kind(shape, further)}
    for rule, elements in _rules(shape):
        if rule.stage in times:
            count = times[rule.stage][rule.layers]
        elif rule.stage is Stage.FIRST:  # of which layers for further tokens have a copy
            count = int(stage == 0 or bool(further))
        else:
            count = int(stage == last)
        if is_tied_head(rule, shape) and not has_own_head(shape, layout):
            continue  # the head uses the embedding's own parameter
        size = layout.tensor_parallel_size
        if rule.experts:
            assert shape.moe is not None, "rules of experts belong to models with experts"
            elements *= shape.moe.num_experts // layout.expert_parallel_size
            size = layout.expert_tensor_parallel_size
        if rule.split is Split.VOCABULARY:
            elements = elements // shape.vocab_size * padded_vocab_size(shape, size) // size
        elif rule.split is not Split.REPLICATED:
            elements //= size
        yield rule, count, elements


def _by_kind(shape: ModelShape, layers: Sequence[int]) -> dict[LayerKind, int]:
    with_experts = sum(shape.is_moe(layer) for layer in layers)
    dense = len(layers) - with_experts
    return {LayerKind.ALL: len(layers), LayerKind.MOE: with_experts, LayerKind.DENSE: dense}


@lru_cache(maxsize=4)
def _rules(shape: ModelShape) -> tuple[tuple[WeightRule, int], ...]:
    """Every rule of a model with the elements of one of its parameters."""
    rules = []
    for rule in weight_rules(shape):
        elements = 0
        for tensor in rule.tensors:  # of which an expert, or a half, may be a parameter of its own
            dims = list(tensor.axes)
            if rule.experts and Dim.EXPERTS in dims:
                dims.remove(Dim.EXPERTS)
            if tensor.part is not None:
                dims.remove(Dim.TWO)
            elements += math.prod(shape.extent(dim) for dim in dims)
        rules.append((rule, elements))
    return tuple(rules)
