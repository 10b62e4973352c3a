"""How much memory each process of an experiment needs: exact for weights, an estimate for the rest.

How much a policy rank keeps for the backward pass: an estimate from the widths of the layers.

Counted are the inputs of matrix products and what attention, activation functions and norms keep. What is
small compared with these (angles, masks, routing) is left out.

How many parameters a policy rank holds, counted from the family's rules without listing its slices.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import (
    GenerationConfig,
    MegatronGenerationConfig,
)
from nemorl.config.policy import (
    FullRecompute,
    LayoutConfig,
    PolicyConfig,
    SelectiveRecompute,
)
from nemorl.models.adapters import adapter_slices
from nemorl.models.family import HfTensor, LayerKind, Split, Stage, WeightRule
from nemorl.models.layout import PolicyRank, is_tied_head, padded_vocab_size, stage_layers, weight_rules
from nemorl.models.shape import Dim, ModelShape, MoeShape


def kept_elements(
    shape: ModelShape, policy: PolicyConfig, stage: int, tokens: int, num_micro_batches: int
) -> int:
    """Elements that a rank of a pipeline stage keeps at most, of micro-batches of `tokens` of its own tokens.

    A stage of P has P less its number micro-batches in flight, and interleaved ones more, of a part of their
    layers each (arXiv 2104.04473).
    """
    layout = policy.layout
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    behind = stages - 1 - stage
    in_flight = behind + 1 if chunks == 1 else 2 * behind + (chunks - 1) * stages + 1
    in_flight = min(in_flight, num_micro_batches * chunks)
    widths = {with_experts: _layer(shape, policy, with_experts) for with_experts in (False, True)}
    runs = [
        [widths[shape.is_moe(layer)] for layer in stage_layers(shape.num_layers, layout, stage, chunk)]
        for chunk in range(chunks)
    ]
    kept = max(_run(shape, policy, run) for run in runs)
    again = max(_computed_again(policy, run) for run in runs)
    return tokens * (in_flight * kept + again)


def _run(shape: ModelShape, policy: PolicyConfig, layers: list[int]) -> int:
    """Kept for a token by a run of layers that keep so much each where nothing is computed again."""
    recompute = policy.recompute
    if not isinstance(recompute, FullRecompute):
        return sum(layers)
    inputs = _hidden(shape, policy.layout)
    if recompute.method == "uniform":
        return inputs * -(-len(layers) // recompute.num_layers)
    rest = layers[recompute.num_layers :]
    return inputs * (len(layers) - len(rest)) + sum(rest)


def _computed_again(policy: PolicyConfig, layers: list[int]) -> int:
    """Kept for a token while what was not kept is computed again."""
    recompute = policy.recompute
    if not isinstance(recompute, FullRecompute):
        return 0
    together = recompute.num_layers if recompute.method == "uniform" else 1
    return max(layers) * together


def _layer(shape: ModelShape, policy: PolicyConfig, with_experts: bool) -> int:
    """Kept for a token by one layer."""
    layout = policy.layout
    left_out = policy.recompute.modules if isinstance(policy.recompute, SelectiveRecompute) else ()
    norms = _hidden(shape, layout) * (2 if "layernorm" in left_out else 4)  # inputs, and outputs
    attention = _attention(shape, layout, again="core_attn" in left_out) // layout.tensor_parallel_size
    moe = shape.moe
    if moe is None or not with_experts:
        mlp = 0 if "mlp" in left_out else 3 * shape.ffn_hidden_size // layout.tensor_parallel_size
        return norms + attention + mlp
    if "moe" in left_out:
        return norms + attention
    shared = 0 if "shared_experts" in left_out else 3 * moe.shared_ffn_hidden_size
    return norms + attention + shared // layout.tensor_parallel_size + _experts(shape, moe, layout)


def _hidden(shape: ModelShape, layout: LayoutConfig) -> int:
    """A hidden state, of which sequence parallelism gives each rank a part."""
    return shape.hidden_size // (layout.tensor_parallel_size if layout.sequence_parallel else 1)


def _attention(shape: ModelShape, layout: LayoutConfig, *, again: bool) -> int:
    """Queries, keys and values, the first two also before their rotation, and what comes out.

    Under context parallelism keys and values of all ranks are collected.
    """
    if shape.mla is None:
        query = output = shape.num_attention_heads * shape.head_dim
        key = value = shape.num_key_value_heads * shape.head_dim
        latents = 0
    else:
        query = key = shape.num_attention_heads * (shape.mla.head_dim + shape.mla.rotary_dim)
        output = value = shape.num_attention_heads * shape.mla.value_dim
        latents = 2 * ((shape.mla.query_rank or 0) + shape.mla.key_value_rank)
    before = latents + query + key + value + output
    others = (key + value) * (layout.context_parallel_size - 1)
    return before if again else before + query + key + others


def _experts(shape: ModelShape, moe: MoeShape, layout: LayoutConfig) -> int:
    """Copies of the token for its experts and what they make of it, with experts equally busy."""
    copies = moe.top_k * layout.expert_tensor_parallel_size
    widths = 2 * shape.hidden_size + 3 * moe.ffn_hidden_size // layout.expert_tensor_parallel_size
    return copies * widths // (layout.tensor_parallel_size if layout.sequence_parallel else 1)


@dataclass(frozen=True)
class Parameters:
    """Of one rank. Copies of experts lie on other ranks than copies of the rest."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts

    def per_copy(self, layout: LayoutConfig) -> int:
        """What is left of a rank's state when it is spread over the ranks that hold the same."""
        copies = layout.context_parallel_size * layout.data_parallel_size
        shared = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        return self.dense // copies + self.experts * shared // layout.stage_size


def stage_parameters(shape: ModelShape, layout: LayoutConfig, stage: int) -> Parameters:
    """Parameters of each rank of a pipeline stage, rows that pad the vocabulary included."""
    chunks = range(layout.virtual_pipeline_parallel_size)
    layers = [layer for chunk in chunks for layer in stage_layers(shape.num_layers, layout, stage, chunk)]
    with_experts = sum(shape.is_moe(layer) for layer in layers)
    times = {
        LayerKind.ALL: len(layers),
        LayerKind.MOE: with_experts,
        LayerKind.DENSE: len(layers) - with_experts,
    }
    last = layout.pipeline_parallel_size - 1
    dense = experts = 0
    for rule, elements in _rules(shape):
        if rule.stage is Stage.LAYERS:
            count = times[rule.layers]
        else:
            count = int(stage == (0 if rule.stage is Stage.FIRST else last))
        if is_tied_head(rule, shape) and last == 0:
            continue  # the head uses the embedding's own parameter
        if rule.experts:
            experts += count * _of_rank(elements, rule, shape, layout)
        else:
            dense += count * _of_rank(elements, rule, shape, layout)
    return Parameters(dense, experts)


@lru_cache(maxsize=4)
def _rules(shape: ModelShape) -> tuple[tuple[WeightRule, int], ...]:
    """Every rule of a model with the elements of one of its parameters."""
    return tuple(
        (rule, sum(_elements(tensor, rule, shape) for tensor in rule.tensors)) for rule in weight_rules(shape)
    )


def _of_rank(whole: int, rule: WeightRule, shape: ModelShape, layout: LayoutConfig) -> int:
    """Elements of a rank's parameters of one layer: of all its experts where the rule is theirs."""
    size = layout.tensor_parallel_size
    if rule.experts:
        assert shape.moe is not None, "rules of experts belong to models with experts"
        whole *= shape.moe.num_experts // layout.expert_parallel_size
        size = layout.expert_tensor_parallel_size
    if rule.split is Split.REPLICATED:
        return whole
    if rule.split is Split.VOCABULARY:
        return whole // shape.vocab_size * padded_vocab_size(shape, size) // size
    return whole // size


def _elements(tensor: HfTensor, rule: WeightRule, shape: ModelShape) -> int:
    """Of the part of an HF tensor that belongs to one parameter."""
    dims = list(tensor.axes)
    if rule.experts and Dim.EXPERTS in dims:
        dims.remove(Dim.EXPERTS)
    if tensor.part is not None:
        dims.remove(Dim.TWO)
    return math.prod(shape.extent(dim) for dim in dims)


# Resident memory of a process with its imports and nothing else, as measured on a CPU.
_POLICY_RUNTIME = 500_000_000
GENERATION_RUNTIME = 400_000_000
_ROLLOUT_RUNTIME = 500_000_000
_DRIVER_RUNTIME = 1_000_000_000  # with Ray's own processes

_FLOAT32 = 4
_INT16 = 2
ITEM_SIZE = {"float32": 4, "bfloat16": 2}
# A chunk of logits and its exponentials (or gradient), as measured: docs/memory.md.
_CHUNK_COPIES = 2
# An engine's logits of a step, the sampled distribution and its sorted copy.
_SAMPLING_COPIES = 3
_BUCKETS = 2

ON_HOST = ("staging_on_host", "optimizer_on_host", "checkpoint")
"""Parts that are in the host's memory, also where there are GPUs."""


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
    kv_cache: int = 0
    staging: int = 0  # weights on their way to generation
    staging_on_host: int = 0  # the same in the host's memory: what `delta` keeps, whole tensors for loaders
    optimizer_on_host: int = 0  # in the host's memory, as policy.optimizer.on_host has it
    checkpoint: int = 0  # the copy that is written during training, always in the host's memory
    runtime: int = 0  # libraries, and for the driver Ray and its object store

    @property
    def total(self) -> int:
        """Bytes of one process."""
        return sum(getattr(self, name) for name in memory_parts())

    @property
    def on_device(self) -> int:
        """Bytes of one process that a GPU holds, where there is one."""
        on_host: int = sum(getattr(self, name) for name in ON_HOST)
        return self.total - on_host


def memory_parts() -> tuple[str, ...]:
    """Names of the parts, in their order."""
    return tuple(field.name for field in fields(ProcessMemory) if field.name not in ("group", "count"))


def estimate_memory(
    experiment: Experiment,
    shape: ModelShape,
    training: bool,
    auxiliary: Sequence[tuple[ModelSpec, ModelShape]] = (),
) -> tuple[ProcessMemory, ...]:
    """Every group of processes that the run starts; without `training` a policy only where it samples.

    `auxiliary` are the further models that it starts. Layouts must divide the models (see
    `nemorl.plan.problems`).
    """
    store = experiment.cluster.object_store_megabytes * 2**20
    groups = [ProcessMemory("driver", 1, runtime=_DRIVER_RUNTIME + store)]
    if training or not experiment.generation.has_engines:
        groups.append(policy_memory(experiment, shape))
    groups += [_auxiliary_memory(experiment, *model) for model in auxiliary]
    if not training or experiment.algorithm.generates:
        if experiment.generation.has_engines:
            groups.append(_generation(experiment, shape))
        groups.append(ProcessMemory("rollout", experiment.cluster.rollout_workers, runtime=_ROLLOUT_RUNTIME))
        if experiment.generation.endpoint is not None:
            groups.append(ProcessMemory("endpoint", 1, runtime=_ROLLOUT_RUNTIME))
    return tuple(groups)


def policy_memory(experiment: Experiment, shape: ModelShape) -> ProcessMemory:
    """The fullest rank of the policy: stages differ by embedding, head and micro-batches in flight."""
    stages = range(experiment.policy.layout.pipeline_parallel_size)
    return max((_stage(experiment, shape, stage) for stage in stages), key=lambda rank: rank.total)


def _auxiliary_memory(experiment: Experiment, model: ModelSpec, shape: ModelShape) -> ProcessMemory:
    """The fullest rank of another model: a policy that neither samples nor sends, and may not learn."""
    alone = experiment.model_copy(update={"policy": model.config})
    rank = policy_memory(alone, shape)
    nothing = {"reference": 0, "kv_cache": 0, "staging": 0, "staging_on_host": 0}
    if shape.head == "scalar":
        nothing["logits"] = 0
    if not model.trains:
        nothing |= {"gradients": 0, "optimizer": 0, "optimizer_on_host": 0, "checkpoint": 0}
        # One layer's at a time: nothing is kept for a backward pass.
        layers = shape.num_layers // model.config.layout.pipeline_parallel_size
        nothing["activations"] = rank.activations // max(1, layers)
    return replace(rank, group=model.name, **nothing)


def _stage(experiment: Experiment, shape: ModelShape, stage: int) -> ProcessMemory:
    """A rank of one pipeline stage."""
    policy, algorithm = experiment.policy, experiment.algorithm
    layout, item = policy.layout, ITEM_SIZE[policy.precision]
    parameters = stage_parameters(shape, layout, stage)
    trained = parameters
    if policy.lora is not None:
        adapters = adapter_slices(shape, policy.lora, PolicyRank(layout, pp_rank=stage))
        trained = Parameters(dense=sum(part.num_elements for part in adapters))
    whole_tokens = _tokens_per_rank(policy, algorithm)
    tokens = min(policy.micro_batch_tokens, whole_tokens)
    own_tokens = -(-tokens // layout.context_parallel_size)
    # Muon's matrices are whole on every copy.
    updated = trained.per_copy(layout) if policy.optimizer.is_sharded else trained.total
    on_host = policy.optimizer.state_is_on_host
    chunk = min(policy.logprob_chunk_tokens, own_tokens)
    checkpointing = experiment.checkpointing
    copies = checkpointing.enabled and checkpointing.asynchronous
    # Without its adapters a model is its own reference.
    has_reference = algorithm.keeps_reference and policy.lora is None and experiment.reference is None
    is_last = stage == layout.pipeline_parallel_size - 1
    sends = algorithm.generates and experiment.generation.has_engines
    sent_item = ITEM_SIZE[experiment.generation.precision or policy.precision]
    kept = kept_elements(shape, policy, stage, own_tokens, -(-whole_tokens // tokens))
    return ProcessMemory(
        "policy",
        layout.world_size,
        weights=(parameters.total + (trained.total if policy.lora else 0)) * item,
        gradients=trained.total * policy.optimizer.gradient_bytes,
        optimizer=0 if on_host else updated * policy.optimizer.state_bytes(policy.precision),
        reference=parameters.total * item if has_reference else 0,
        activations=kept * item,
        logits=max(
            chunk * shape.vocab_size // layout.tensor_parallel_size * _FLOAT32 * _CHUNK_COPIES,
            _sampling_logits(experiment, shape),
        )
        if is_last
        else 0,
        kv_cache=_own_cache(experiment, shape, stage) * item + _kept_experts(experiment, shape),
        staging=buckets_bytes(experiment.generation, parameters.total * sent_item) if sends else 0,
        staging_on_host=parameters.total * sent_item if sends and experiment.generation.delta else 0,
        optimizer_on_host=updated * _FLOAT32 * (1 + policy.optimizer.num_moments) if on_host else 0,
        checkpoint=updated * _FLOAT32 * (1 + policy.optimizer.num_moments) if copies else 0,
        runtime=_POLICY_RUNTIME,
    )


def _sampling_logits(experiment: Experiment, shape: ModelShape) -> int:
    """Bytes on a leader of a policy that samples without an engine."""
    config = experiment.generation
    if not isinstance(config, MegatronGenerationConfig):
        return 0
    return sampling_bytes(config.max_batch_size, shape)


def _kept_experts(experiment: Experiment, shape: ModelShape) -> int:
    """Bytes of the choices of all routers, which every rank keeps with its keys where they are replayed."""
    config, policy = experiment.generation, experiment.policy
    if not isinstance(config, MegatronGenerationConfig) or not policy.moe.router_replay or shape.moe is None:
        return 0
    cached = min(config.max_kv_tokens, config.max_batch_size * policy.max_sequence_length)
    return _INT16 * shape.num_moe_layers * shape.moe.top_k * cached


def _own_cache(experiment: Experiment, shape: ModelShape, stage: int) -> int:
    """Elements of the KV cache of a rank of a policy that samples without an engine."""
    config, policy = experiment.generation, experiment.policy
    if not isinstance(config, MegatronGenerationConfig):
        return 0
    cached = min(config.max_kv_tokens, config.max_batch_size * policy.max_sequence_length)
    heads, dim = shape.num_key_value_heads, shape.head_dim
    if shape.mla is not None:  # kept as attention sees it, values as wide as keys
        heads, dim = shape.num_attention_heads, shape.mla.head_dim + shape.mla.rotary_dim
    layers = stage_layers(shape.num_layers, policy.layout, stage)
    return 2 * len(layers) * -(-heads // policy.layout.tensor_parallel_size) * dim * cached


def _generation(experiment: Experiment, shape: ModelShape) -> ProcessMemory:
    config, policy = experiment.generation, experiment.policy
    if not config.plan_module:  # an engine without weights here
        return ProcessMemory("generation", config.replicas, runtime=GENERATION_RUNTIME)
    weights = (
        stage_parameters(shape, LayoutConfig(), 0).total * ITEM_SIZE[config.precision or policy.precision]
    )
    plan = importlib.import_module(config.plan_module)
    memory: ProcessMemory = plan.memory(experiment, shape, weights)
    return memory


def sampling_bytes(sequences: int, shape: ModelShape) -> int:
    """Logits of sequences that are sampled together, with the copies that sampling makes."""
    return sequences * shape.vocab_size * _FLOAT32 * _SAMPLING_COPIES


def buckets_bytes(generation: GenerationConfig, weights: int) -> int:
    """Of a process that sends or receives weights: a bucket is no larger than what it holds."""
    return _BUCKETS * min(generation.bucket_megabytes * 2**20, weights)


def _tokens_per_rank(policy: PolicyConfig, algorithm: AlgorithmConfig) -> int:
    """Most tokens of one optimizer step that a data-parallel rank may see."""
    # A step without any is refused by another check, of which nothing is known here.
    sequences = max(1, algorithm.sequences_per_update)
    return -(-sequences // policy.layout.data_parallel_size) * policy.max_sequence_length
