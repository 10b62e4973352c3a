"""Memory against values worked out by hand for the model of `tests.plan.models`."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nemorl.config.algorithm import AlignedDistillationConfig, SftConfig
from nemorl.config.facts import ModelSpec
from nemorl.config.generation import TorchGenerationConfig
from nemorl.config.policy import (
    FullRecompute,
    LayoutConfig,
    NoRecompute,
    PolicyConfig,
    RecomputeConfig,
    RecomputeModule,
    SelectiveRecompute,
)
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import MlaShape, ModelShape, MoeShape
from nemorl.plan.memory import (
    ProcessMemory,
    buckets_bytes,
    estimate_memory,
    kept_elements,
    policy_memory,
    sampling_bytes,
    stage_tensors,
)
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG

SHAPE = shape_from_config(CONFIG, "config.json")
EMBEDDING = 1000 * 128
# norms; q and output; k and v; gate, up and down
LAYER = 2 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128
WHOLE = 2 * EMBEDDING + 6 * LAYER + 128
GPUS = "cluster.gpus_per_node=8"


def group(name: str, processes: tuple[ProcessMemory, ...]) -> ProcessMemory:
    return next(process for process in processes if process.group == name)


def test_one_process_in_float32(configure: Configure) -> None:
    policy = group("policy", estimate_memory(configure(), SHAPE, training=True))

    assert policy.count == 1
    assert (policy.weights, policy.gradients, policy.optimizer) == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)
    assert policy.reference == 0


def test_bfloat16_keeps_float32_weights_in_the_optimizer(configure: Configure) -> None:
    policy = group("policy", estimate_memory(configure("policy.precision=bfloat16"), SHAPE, training=True))

    assert (policy.weights, policy.gradients, policy.optimizer) == (2 * WHOLE, 4 * WHOLE, 12 * WHOLE)


def test_sgd_has_one_moment(configure: Configure) -> None:
    experiment = configure("policy.optimizer={name: sgd, lr: 0.1}")

    assert group("policy", estimate_memory(experiment, SHAPE, training=True)).optimizer == 4 * WHOLE


def test_what_delta_keeps_is_in_the_hosts_memory(configure: Configure) -> None:
    overrides = ["generation.delta=true", "generation.precision=bfloat16"]
    policy = group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    assert policy.staging_on_host == 2 * WHOLE
    assert policy.on_device == policy.total - 2 * WHOLE - policy.checkpoint
    assert group("policy", estimate_memory(configure(), SHAPE, training=True)).staging_on_host == 0


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_an_optimizer_on_the_host_takes_nothing_of_the_device(configure: Configure, precision: str) -> None:
    """Float32 weights and two moments, whatever the precision."""
    overrides = [f"policy.precision={precision}", "policy.optimizer={on_host: true}"]
    policy = group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    assert (policy.optimizer, policy.optimizer_on_host) == (0, 12 * WHOLE)
    assert policy.on_device == policy.total - 12 * WHOLE - policy.checkpoint


def test_types_of_fewer_bits_save_what_they_are_shorter(configure: Configure) -> None:
    types = "exp_avg_dtype: fp8, exp_avg_sq_dtype: bfloat16, main_params_dtype: float16"
    narrow = ["policy.precision=bfloat16", "cluster.gpus_per_node=2"]

    def narrowed(more: str = "") -> ProcessMemory:
        experiment = configure(*narrow, f"policy.optimizer={{{types}{more}}}")
        return group("policy", estimate_memory(experiment, SHAPE, training=True))

    assert (narrowed().gradients, narrowed().optimizer) == (4 * WHOLE, (1 + 2 + 2) * WHOLE)
    assert narrowed(", main_grads_dtype: bfloat16").gradients == 2 * WHOLE
    assert narrowed().checkpoint == pinned(4) * 3  # which knows float32 only


def pinned(item: int) -> int:
    """Bytes of the model where each parameter takes the next power of two, as pinned memory of torch does."""
    tensors = stage_tensors(SHAPE, LayoutConfig(), 0).items()
    assert sum(count * elements for elements, count in tensors) == WHOLE
    return sum(count * 2 ** math.ceil(math.log2(item * elements)) for elements, count in tensors)


def test_pinned_memory_is_counted_in_powers_of_two(configure: Configure) -> None:
    def policy(*overrides: str) -> ProcessMemory:
        return group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    gpus = "cluster.gpus_per_node=2"
    assert 4 * WHOLE < pinned(4) <= 8 * WHOLE
    assert policy(gpus).checkpoint == 3 * pinned(4)
    assert policy(gpus).offloaded_on_host == 0
    assert policy(gpus, "policy.offload.optimizer=true").offloaded_on_host == 3 * pinned(4)
    weights = policy(gpus, "policy.offload.weights=true", "policy.precision=bfloat16")
    buffer = 2 ** math.ceil(math.log2(2 * WHOLE))  # all weights are in one
    assert weights.offloaded_on_host == buffer + (pinned(2) if weights.reference else 0)
    assert weights.on_device == policy(gpus, "policy.precision=bfloat16").on_device


def test_the_gradient_of_the_head_is_summed_in_float32(configure: Configure) -> None:
    def head(*overrides: str) -> int:
        experiment = configure(GPUS, *overrides)
        return group("policy", estimate_memory(experiment, SHAPE, training=True)).head_gradient

    weight = SHAPE.vocab_size * SHAPE.hidden_size
    assert head() == 4 * weight
    assert head("policy.precision=bfloat16") == 8 * weight  # with a chunk's product, or the copy at the end
    assert head("policy.precision=bfloat16", "policy.layout.tensor_parallel_size=2") == 4 * weight
    assert head("policy.lora={rank: 2, alpha: 4}") == 0


def test_checkpoints_during_training_keep_a_copy_of_the_state(configure: Configure) -> None:
    def copied(*overrides: str) -> ProcessMemory:
        return group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    assert copied().checkpoint == 12 * WHOLE  # float32 weights and two moments, whatever the precision
    assert copied().on_device == copied().total - 12 * WHOLE
    assert copied("policy.precision=bfloat16").checkpoint == 12 * WHOLE
    assert copied("policy.layout.data_parallel_size=2").checkpoint == 6 * WHOLE
    assert copied("checkpointing.asynchronous=false").checkpoint == 0
    assert copied("checkpointing.enabled=false").checkpoint == 0


def test_checkpoints_in_memory_are_two_at_a_time_and_on_two_nodes(configure: Configure) -> None:
    def kept(*overrides: str) -> ProcessMemory:
        return group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    one = "checkpointing.memory_period=1"
    assert kept().checkpoints_in_memory == 0
    assert kept(one).checkpoints_in_memory == 2 * 12 * WHOLE
    assert kept(one, "policy.layout.data_parallel_size=2").checkpoints_in_memory == 12 * WHOLE
    assert kept(one, "cluster.num_nodes=2").checkpoints_in_memory == 4 * 12 * WHOLE
    assert kept(one).on_device == kept().on_device


def test_adapters_leave_the_weights_without_gradients_optimizer_state_and_reference(
    configure: Configure,
) -> None:
    lora = "policy.lora={rank: 4, alpha: 8, targets: [q_proj, down_proj]}"
    experiment = configure(lora, "algorithm.kl.coefficient=0.01")
    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    adapters = 6 * 4 * ((128 + 128) + (384 + 128))  # A and B of both matrices in each of 6 layers
    assert (policy.weights, policy.gradients) == (4 * (WHOLE + adapters), 4 * adapters)
    assert (policy.optimizer, policy.checkpoint, policy.reference) == (8 * adapters, 12 * adapters, 0)


def test_muon_keeps_whole_matrices_on_every_copy(configure: Configure) -> None:
    muon, two = "policy.optimizer={name: muon, lr: 0.1}", "policy.layout.data_parallel_size=2"

    assert group("policy", estimate_memory(configure(muon, two), SHAPE, training=True)).optimizer == 8 * WHOLE


def test_a_reference_is_another_copy(configure: Configure) -> None:
    experiment = configure("algorithm.kl.coefficient=0.01")

    assert group("policy", estimate_memory(experiment, SHAPE, training=True)).reference == 4 * WHOLE


def test_parallel_sizes_share_the_weights(configure: Configure) -> None:
    experiment = configure(
        "policy.layout={tensor_parallel_size: 2, pipeline_parallel_size: 3, data_parallel_size: 2}"
    )

    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    # The first stage is the fullest, with two micro-batches in flight: two of six layers and the embedding;
    # norms are on every rank.
    matrices = EMBEDDING + 2 * (LAYER - 2 * 128)
    local = matrices // 2 + 2 * 2 * 128
    assert policy.count == 12
    assert policy.weights == 4 * local
    assert policy.optimizer == 8 * local // 2
    assert policy.logits == 0  # only the last stage has the head


def test_the_engine_keeps_keys_values_and_arriving_weights(configure: Configure) -> None:
    cache = "generation={max_kv_tokens: 3000, max_cached_tokens: 500}"
    experiment = configure(cache, "generation.replicas=2")

    engine = group("generation", estimate_memory(experiment, SHAPE, training=True))

    assert engine.count == 2
    assert engine.kv_cache == 3500 * 2 * 6 * 64 * 4
    assert (engine.weights, engine.staging) == (4 * WHOLE, 8 * WHOLE)


def test_the_cache_is_no_larger_than_what_can_run(configure: Configure) -> None:
    """64 sequences of 64 tokens at a time, whatever max_kv_tokens allows."""
    experiment = configure("generation.max_cached_tokens=0")
    engine = group("generation", estimate_memory(experiment, SHAPE, training=True))

    assert engine.kv_cache == 64 * 64 * 2 * 6 * 64 * 4


def test_a_policy_that_samples_its_own_tokens_has_its_part_of_the_cache_and_sends_nothing(
    configure: Configure,
) -> None:
    layout = "policy.layout={tensor_parallel_size: 2, pipeline_parallel_size: 2}"
    experiment = configure(
        "generation={backend: megatron, max_kv_tokens: 3000, max_cached_tokens: 500}", layout
    )

    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    assert policy.kv_cache == 3500 * 2 * 3 * 32 * 4
    assert policy.staging == 0


def test_replayed_choices_are_kept_next_to_the_keys(configure: Configure) -> None:
    moe = MoeShape(num_experts=8, top_k=2, ffn_hidden_size=64, first_layer=1)
    sizes = []
    for replay in ("false", "true"):
        sampling = "generation={backend: megatron, max_kv_tokens: 3000, max_cached_tokens: 500}"
        experiment = configure(sampling, f"policy.moe.router_replay={replay}")
        found = estimate_memory(experiment, replace(SHAPE, moe=moe), training=True)
        sizes.append(group("policy", found).kv_cache)

    assert sizes[1] - sizes[0] == 3500 * 5 * 2 * 2  # tokens, layers, experts of a token, bytes


@pytest.mark.parametrize(("tokens", "chunk"), [(512, 512), (100, 100), (5000, 2048)])
def test_logits_exist_for_a_chunk_at_a_time(configure: Configure, tokens: int, chunk: int) -> None:
    """32 trajectories of 64 tokens are 2048, so no chunk is longer."""
    experiment = configure("policy.micro_batch_tokens=8192", f"policy.logprob_chunk_tokens={tokens}")

    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    assert policy.logits == chunk * 1000 * 4 * 2


def test_a_chunk_that_is_scored_twice_keeps_its_logits_twice(configure: Configure) -> None:
    """Filtered for the ratio, and complete for the divergence from the reference."""
    filtered, kl = "generation.sampling.top_p=0.9", "algorithm.kl.coefficient=0.1"

    def logits(*overrides: str) -> int:
        tokens = ["policy.micro_batch_tokens=512", "policy.logprob_chunk_tokens=512"]
        experiment = configure(*tokens, *overrides)
        return group("policy", estimate_memory(experiment, SHAPE, training=True)).logits

    copy = 512 * 1000 * 4
    assert logits(filtered, kl) == 3 * copy
    assert logits(filtered) == logits(kl) == 2 * copy
    in_reward = "algorithm.kl={coefficient: 0.1, placement: reward, estimator: k1}"
    assert logits(filtered, in_reward) == 2 * copy
    assert logits(filtered, kl, "policy.logprob_chunk_tokens=256") == 2 * copy / 2  # computed again


def test_the_complete_distribution_of_each_token_is_aligned(configure: Configure) -> None:
    experiment = configure("policy.micro_batch_tokens=512", "policy.logprob_chunk_tokens=256")
    fields = {"num_steps": 1, "batch_size": 32}
    algorithms = (
        SftConfig.model_validate({"name": "sft", **fields}),
        AlignedDistillationConfig.model_validate({"name": "aligned_distillation", **fields}),
    )
    plain, aligned = (
        policy_memory(experiment.model_copy(update={"algorithm": algorithm}), SHAPE).logits
        for algorithm in algorithms
    )
    assert aligned - plain == 9 * 512 * 1000 * 4


def test_activations_grow_with_the_micro_batch_and_shrink_with_tensor_parallelism(
    configure: Configure,
) -> None:
    def activations(*overrides: str) -> int:
        experiment = configure(GPUS, *overrides)
        return group("policy", estimate_memory(experiment, SHAPE, training=True)).activations

    # per token and layer: 4 hidden, 3 query, 3 key-value and 3 MLP widths
    assert activations() == 512 * 6 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384) * 4
    assert activations("policy.micro_batch_tokens=1024") == 2 * activations()
    both = "policy.layout={tensor_parallel_size: 2, sequence_parallel: true}"
    assert activations(both) == activations() // 2


def test_norms_in_float32_and_a_gate_without_a_kernel_keep_more(configure: Configure) -> None:
    """Gemma's. Inputs of norms in float32 are two elements of bfloat16 each."""
    gemma = replace(SHAPE, zero_centered_norm=True, post_norms=True, qk_norm=True, activation="gelu_tanh")
    experiment = configure(GPUS, "policy.precision=bfloat16")
    # per token and layer: the outputs of two norms and the inputs of four, queries as projected, before their
    # norm in float32 and rotated, keys before it and rotated, values, what attention returns, and five MLP
    # widths
    norms, attention = (2 + 4 * 2) * 128, (4 * 128 + 128) + (3 * 64 + 64)

    assert policy_memory(experiment, gemma).activations == 512 * 6 * (norms + attention + 5 * 384) * 2


def test_clamped_gates_of_experts_keep_eight_widths(configure: Configure) -> None:
    """gpt-oss: by rehearsals of 2 and 4 layers of gpt-oss-20b each keeps 5.02 more than the 3 of SwiGLU."""
    moe = MoeShape(num_experts=8, top_k=2, ffn_hidden_size=64)
    experiment = configure(GPUS, "policy.precision=bfloat16")
    kept = [
        policy_memory(experiment, replace(SHAPE, moe=moe, activation=activation)).activations
        for activation in ("silu", "clamped_swiglu")
    ]

    assert kept[1] - kept[0] == 512 * 6 * 2 * (8 - 3) * 64 * 2


def test_a_scalar_head_has_no_logits(configure: Configure) -> None:
    policy = policy_memory(configure(GPUS), replace(SHAPE, head="scalar"))

    assert policy.logits == policy.head_gradient == 0
    assert policy_memory(configure(GPUS), SHAPE).logits > 0


def test_which_groups_there_are(configure: Configure) -> None:
    sft = configure("algorithm.name=sft", "algorithm.num_steps=1", "algorithm.batch_size=4")

    def groups(*args: object, training: bool) -> list[str]:
        return [process.group for process in estimate_memory(*args, SHAPE, training=training)]  # type: ignore[arg-type]

    assert groups(configure(), training=True) == ["driver", "policy", "generation", "rollout"]
    assert groups(sft, training=True) == ["driver", "policy"]
    assert groups(sft, training=False) == ["driver", "generation", "rollout"]
    by_itself = configure("generation.backend=megatron")
    assert groups(by_itself, training=True) == ["driver", "policy", "rollout"]
    assert groups(by_itself, training=False) == ["driver", "policy", "rollout"]


def test_an_endpoint_is_a_process_and_a_server_of_others_holds_no_weights(configure: Configure) -> None:
    beside = estimate_memory(configure("generation.endpoint={}"), SHAPE, training=True)
    server = "generation={backend: openai, base_url: 'http://10.0.0.1/v1', model: m, max_new_tokens: 8}"
    elsewhere = group("generation", estimate_memory(configure(server), SHAPE, training=True))

    assert group("endpoint", beside).count == 1
    assert not any(process.group == "endpoint" for process in estimate_memory(configure(), SHAPE, True))
    assert (elsewhere.weights, elsewhere.kv_cache, elsewhere.staging) == (0, 0, 0)
    assert elsewhere.runtime > 0


def test_the_driver_holds_the_object_store(configure: Configure) -> None:
    driver = group("driver", estimate_memory(configure("cluster.object_store_megabytes=300"), SHAPE, True))

    assert driver.count == 1
    assert driver.total == 1_000_000_000 + 300 * 1024 * 1024


def test_a_frozen_model_has_weights_and_one_layers_activations(configure: Configure) -> None:
    """A teacher that neither samples nor sends nor learns."""
    experiment = configure()
    spec = ModelSpec("teacher", "teachers.main", experiment.policy, trains=False)
    teacher = group("teacher", estimate_memory(experiment, SHAPE, True, [(spec, SHAPE)]))
    policy = policy_memory(experiment, SHAPE)

    kept = {"group": "teacher", "count": 1, "weights": 4 * WHOLE, "activations": policy.activations // 6}
    nothing = {name: 0 for name in asdict(teacher) if name not in kept}
    assert asdict(teacher) == nothing | kept | {"logits": policy.logits, "runtime": policy.runtime}
    assert isinstance(teacher.activations, int)


def test_a_frozen_model_of_six_stages_has_a_layer_in_each(configure: Configure) -> None:
    experiment = configure()
    stages = experiment.policy.model_copy(update={"layout": LayoutConfig(pipeline_parallel_size=6)})
    spec = ModelSpec("teacher", "teachers.main", stages, trains=False)
    teacher = group("teacher", estimate_memory(experiment, SHAPE, True, [(spec, SHAPE)]))

    at_stages = policy_memory(experiment.model_copy(update={"policy": stages}), SHAPE)
    assert teacher.activations == at_stages.activations
    assert isinstance(teacher.activations, int)


def test_a_critic_learns_without_logits(configure: Configure) -> None:
    experiment, shape = configure(), replace(SHAPE, head="scalar")
    spec = ModelSpec("critic", "critic", experiment.policy)
    critic = group("critic", estimate_memory(experiment, SHAPE, True, [(spec, shape)]))
    policy = policy_memory(experiment, SHAPE)

    whole = WHOLE - EMBEDDING + 128  # one row in place of the head's
    assert (critic.weights, critic.gradients, critic.optimizer) == (4 * whole, 4 * whole, 8 * whole)
    assert (critic.logits, critic.activations) == (0, policy.activations)
    assert (critic.reference, critic.kv_cache, critic.staging, critic.staging_on_host) == (0, 0, 0, 0)


def test_logits_and_activations_of_odd_sizes_are_whole_bytes(configure: Configure) -> None:
    """A vocabulary of 1001 over two ranks, 512 tokens over three."""
    chunk = "policy.logprob_chunk_tokens=101"
    layout = "policy.layout={tensor_parallel_size: 2, sequence_parallel: true}"
    odd = policy_memory(configure(GPUS, chunk, layout), replace(SHAPE, vocab_size=1001))
    assert odd.logits == 50550 * 4 * 2  # 101 * 1001 / 2 = 50550.5

    thirds = policy_memory(configure(GPUS, "policy.layout.context_parallel_size=3"), SHAPE)
    # Attention collects the keys and values of the two other ranks.
    assert thirds.activations == 171 * 6 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384 + 2 * 2 * 64) * 4
    assert {type(value) for name, value in asdict(thirds).items() if name != "group"} == {int}


def test_copies_of_unequal_batches_count_the_largest(configure: Configure) -> None:
    """32 sequences of 64 tokens over three copies: one has 11."""
    experiment = configure(GPUS, "policy.micro_batch_tokens=8192")
    thirds = experiment.policy.model_copy(update={"layout": LayoutConfig(data_parallel_size=3)})
    policy = policy_memory(experiment.model_copy(update={"policy": thirds}), SHAPE)

    assert policy.activations == 11 * 64 * 6 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384) * 4
    one = configure(GPUS, "algorithm.name=sft", "algorithm.num_steps=1", "algorithm.batch_size=1")
    assert policy_memory(one, SHAPE).activations == 64 * 6 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384) * 4


def test_no_more_micro_batches_are_in_flight_than_there_are(configure: Configure) -> None:
    """2048 tokens are two micro-batches of 1500, on three stages of two layers."""
    layout = "policy.layout.pipeline_parallel_size=3"
    policy = policy_memory(configure(GPUS, "policy.micro_batch_tokens=1500", layout), SHAPE)

    assert policy.activations == 1500 * 2 * 2 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384) * 4


def test_a_policy_that_samples_keeps_the_keys_of_its_heads(configure: Configure) -> None:
    """Four key-value heads of 16 over eight ranks, and eight latent heads of 8 and 4 rotary channels."""
    sampling = "generation={backend: megatron, max_kv_tokens: 3000, max_cached_tokens: 500}"
    eight = policy_memory(configure(sampling, "policy.layout.tensor_parallel_size=8"), SHAPE)
    assert eight.kv_cache == 2 * 6 * 1 * 16 * 3500 * 4

    mla = MlaShape(query_rank=None, key_value_rank=9, head_dim=8, rotary_dim=4, value_dim=6)
    latent = policy_memory(configure(sampling), replace(SHAPE, mla=mla))
    assert latent.kv_cache == 2 * 6 * 8 * (8 + 4) * 3500 * 4
    assert policy_memory(configure(), SHAPE).kv_cache == 0


def test_sampling_keeps_three_copies_of_the_logits(configure: Configure) -> None:
    assert sampling_bytes(5, SHAPE) == 5 * 1000 * 4 * 3
    sampling = "generation={backend: megatron, max_batch_size: 7}"
    assert policy_memory(configure(sampling, "policy.logprob_chunk_tokens=1"), SHAPE).logits == 84000
    # On a GPU: bfloat16 and float32 logits, a float32 distribution and its float64 sums.
    on_gpu = configure(sampling, "policy.logprob_chunk_tokens=1", "cluster.gpus_per_node=1")
    assert policy_memory(on_gpu, SHAPE).logits == 7 * 1000 * 18


def test_two_buckets_hold_no_more_than_there_is() -> None:
    generation = TorchGenerationConfig(bucket_megabytes=3)
    assert buckets_bytes(generation, 10 * 1024 * 1024) == 2 * 3 * 1024 * 1024
    assert buckets_bytes(generation, 1000) == 2 * 1000


# Hidden 100, 4 query and 2 key-value heads of 6, an MLP of 70.
NARROW = replace(
    SHAPE,
    num_layers=8,
    hidden_size=100,
    ffn_hidden_size=70,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
NORMS, ATTENTION, MLP = 4 * 100, 2 * (24 + 12) + 24 + 12, 3 * 70
NARROW_LAYER = NORMS + ATTENTION + MLP
ONE_LAYER = replace(NARROW, num_layers=1)
EXPERTS = replace(
    ONE_LAYER, moe=MoeShape(num_experts=8, top_k=2, ffn_hidden_size=31, shared_ffn_hidden_size=50)
)
SHARED, ROUTED = 3 * 50, 2 * (100 + 3 * 31)
EXCHANGED = 2 * 3 * 100  # copies of a token on their way to experts and back, of one layer at a time
LATENT = replace(
    ONE_LAYER, mla=MlaShape(query_rank=None, key_value_rank=9, head_dim=8, rotary_dim=4, value_dim=6)
)
# Compressed keys and values, queries and keys of 4 * 12, values and output of 4 * 6.
LATENT_ATTENTION = 2 * 9 + 2 * 48 + 2 * 24


def kept(
    shape: ModelShape,
    layout: LayoutConfig | None = None,
    recompute: RecomputeConfig | None = None,
    stage: int = 0,
    micro_batches: int = 100,
) -> int:
    """What is kept for each token."""
    policy = PolicyConfig(
        model_path=Path("model"), layout=layout or LayoutConfig(), recompute=recompute or NoRecompute()
    )
    elements = kept_elements(shape, policy, stage, 7, micro_batches).on_device
    assert isinstance(elements, int)
    each, rest = divmod(elements, 7)
    assert rest == 0
    return each


def without(*modules: RecomputeModule) -> SelectiveRecompute:
    return SelectiveRecompute(name="selective", modules=modules)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "in_flight"), [(0, 100, 4), (1, 100, 3), (3, 100, 1), (0, 3, 3)]
)
def test_a_stage_keeps_a_micro_batch_for_itself_and_each_stage_behind(
    stage: int, micro_batches: int, in_flight: int
) -> None:
    stages = LayoutConfig(pipeline_parallel_size=4)
    found = kept(NARROW, stages, stage=stage, micro_batches=micro_batches)
    assert found == in_flight * 2 * NARROW_LAYER


@pytest.mark.parametrize(
    ("stage", "micro_batches", "in_flight"), [(0, 100, 11), (1, 100, 9), (3, 100, 5), (0, 4, 8)]
)
def test_interleaved_stages_keep_more_of_fewer_layers(stage: int, micro_batches: int, in_flight: int) -> None:
    """Two for each stage behind, one for each stage and one more, of a run of one layer."""
    stages = LayoutConfig(pipeline_parallel_size=4, virtual_pipeline_parallel_size=2)
    found = kept(NARROW, stages, stage=stage, micro_batches=micro_batches)
    assert found == in_flight * NARROW_LAYER


def test_full_recomputation_keeps_inputs_and_the_layers_that_are_computed_again() -> None:
    """With the gradients of what an MLP keeps."""
    uniform = FullRecompute(name="full", method="uniform", num_layers=3)
    assert kept(NARROW, recompute=uniform) == 3 * 100 + 3 * NARROW_LAYER + MLP  # runs of 3, 3 and 2 layers
    block = FullRecompute(name="full", method="block", num_layers=3)
    assert kept(NARROW, recompute=block) == 3 * 100 + 5 * NARROW_LAYER + MLP
    whole = FullRecompute(name="full", method="block", num_layers=8)
    assert kept(NARROW, recompute=whole) == 8 * 100 + NARROW_LAYER + MLP
    each = FullRecompute(name="full", method="uniform", num_layers=1)
    stages = LayoutConfig(pipeline_parallel_size=4)
    assert kept(NARROW, stages, each) == 4 * 2 * 100 + NARROW_LAYER + MLP


def test_the_head_and_layers_that_are_computed_again_take_turns(configure: Configure) -> None:
    """512 tokens of 6 layers: their inputs stay; then the head, or a layer and the gradients of its MLP."""

    def parts(chunk: int, *overrides: str, tied: bool = False) -> tuple[int, int]:
        fields = (GPUS, "policy.recompute={name: full}", f"policy.logprob_chunk_tokens={chunk}", *overrides)
        policy = policy_memory(configure(*fields), replace(SHAPE, tied_embeddings=tied))
        return policy.activations, policy.logits + policy.head_gradient

    inputs, table = 512 * 6 * 128 * 4, 1000 * 128 * 4
    layer = 512 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384 + 3 * 384) * 4
    assert parts(512) == (inputs + layer - (2 * 512 * 1000 * 4 + table), 2 * 512 * 1000 * 4 + table)
    assert sum(parts(64)) == inputs + layer
    assert sum(parts(64, tied=True)) == inputs + layer + table  # its gradient waits for the embedding's


@pytest.mark.parametrize(
    ("shape", "modules", "elements"),
    [
        (ONE_LAYER, ("core_attn",), NARROW_LAYER - 36),  # rotated queries and keys
        (ONE_LAYER, ("layernorm",), NARROW_LAYER - 2 * 100),
        (ONE_LAYER, ("mlp",), NORMS + ATTENTION + MLP),  # of the layer that is computed again
        (ONE_LAYER, ("moe",), NARROW_LAYER),
        (EXPERTS, ("mlp",), NORMS + ATTENTION + SHARED + ROUTED + EXCHANGED),
        (EXPERTS, ("moe",), NORMS + ATTENTION + ROUTED + EXCHANGED),
        (EXPERTS, ("shared_experts",), NORMS + ATTENTION + ROUTED + EXCHANGED),
        (replace(NARROW, num_layers=3), ("mlp",), 3 * (NORMS + ATTENTION) + MLP),
        (LATENT, ("core_attn",), NORMS + LATENT_ATTENTION + MLP),
    ],
)
def test_what_is_computed_again_is_not_kept(
    shape: ModelShape, modules: tuple[RecomputeModule, ...], elements: int
) -> None:
    assert kept(shape, recompute=without(*modules)) == elements


def test_a_layer_with_experts_keeps_the_tokens_of_each() -> None:
    assert kept(EXPERTS) == NORMS + ATTENTION + SHARED + ROUTED + EXCHANGED
    moe = EXPERTS.moe
    assert moe is not None
    mixed = replace(EXPERTS, num_layers=2, moe=replace(moe, first_layer=1))
    assert kept(mixed) == NARROW_LAYER + NORMS + ATTENTION + SHARED + ROUTED + EXCHANGED
    halves = LayoutConfig(data_parallel_size=2, expert_tensor_parallel_size=2)
    # Both ranks of an expert have its tokens, and half of its columns.
    assert kept(EXPERTS, halves) == NORMS + ATTENTION + SHARED + 2 * 2 * (4 * 100 + 46)


def test_latent_attention_keeps_its_compressed_inputs() -> None:
    assert kept(LATENT) == NORMS + LATENT_ATTENTION + 2 * 48 + MLP
    assert LATENT.mla is not None
    compressed = replace(LATENT, mla=replace(LATENT.mla, query_rank=20))
    assert kept(compressed) == kept(LATENT) + 2 * 20


def test_context_parallelism_collects_keys_and_values() -> None:
    assert kept(ONE_LAYER, LayoutConfig(context_parallel_size=3)) == NARROW_LAYER + 2 * (12 + 12)
    assert kept(LATENT, LayoutConfig(context_parallel_size=2)) == kept(LATENT) + 48 + 24


def test_tensor_parallelism_divides_matrices_and_with_sequences_the_rest() -> None:
    """Over eight ranks, in whole elements."""
    eight = LayoutConfig(tensor_parallel_size=8)
    assert kept(ONE_LAYER, eight) == 400 + 13 + 26
    assert kept(EXPERTS, eight) == 400 + 13 + 18 + 386 + 600
    sequences = LayoutConfig(tensor_parallel_size=8, sequence_parallel=True)
    assert kept(ONE_LAYER, sequences) == 4 * 12 + 13 + 26
    assert kept(EXPERTS, sequences) == 4 * 12 + 13 + 18 + 386 // 8 + 600 // 8
