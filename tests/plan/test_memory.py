"""Memory against values worked out by hand for the model of `tests.plan.models`."""

from dataclasses import replace

import pytest

from nemorl.models.registry import shape_from_config
from nemorl.models.shape import MoeShape
from nemorl.plan.memory import ProcessMemory, estimate_memory
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG

SHAPE = shape_from_config(CONFIG, "config.json")
EMBEDDING = 1000 * 128
# norms; q and output; k and v; gate, up and down
LAYER = 2 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128
WHOLE = 2 * EMBEDDING + 6 * LAYER + 128


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
    assert narrowed().checkpoint == 12 * WHOLE  # which knows float32 only


def test_checkpoints_during_training_keep_a_copy_of_the_state(configure: Configure) -> None:
    def copied(*overrides: str) -> ProcessMemory:
        return group("policy", estimate_memory(configure(*overrides), SHAPE, training=True))

    assert copied().checkpoint == 12 * WHOLE  # float32 weights and two moments, whatever the precision
    assert copied().on_device == copied().total - 12 * WHOLE
    assert copied("policy.precision=bfloat16").checkpoint == 12 * WHOLE
    assert copied("policy.layout.data_parallel_size=2").checkpoint == 6 * WHOLE
    assert copied("checkpointing.asynchronous=false").checkpoint == 0
    assert copied("checkpointing.enabled=false").checkpoint == 0


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


def test_the_engine_keeps_keys_values_and_arriving_weights(configure: Configure) -> None:
    experiment = configure("generation.max_kv_tokens=3000", "generation.replicas=2")

    engine = group("generation", estimate_memory(experiment, SHAPE, training=True))

    assert engine.count == 2
    assert engine.kv_cache == 3000 * 2 * 6 * 64 * 4
    assert (engine.weights, engine.staging) == (4 * WHOLE, 8 * WHOLE)


def test_the_cache_is_no_larger_than_what_can_run(configure: Configure) -> None:
    """64 sequences of 64 tokens at a time, whatever max_kv_tokens allows."""
    engine = group("generation", estimate_memory(configure(), SHAPE, training=True))

    assert engine.kv_cache == 64 * 64 * 2 * 6 * 64 * 4


def test_a_policy_that_samples_its_own_tokens_has_its_part_of_the_cache_and_sends_nothing(
    configure: Configure,
) -> None:
    layout = "policy.layout={tensor_parallel_size: 2, pipeline_parallel_size: 2}"
    experiment = configure("generation={backend: megatron, max_kv_tokens: 3000}", layout)

    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    assert policy.kv_cache == 3000 * 2 * 3 * 32 * 4
    assert policy.staging == 0


def test_replayed_choices_are_kept_next_to_the_keys(configure: Configure) -> None:
    moe = MoeShape(num_experts=8, top_k=2, ffn_hidden_size=64, first_layer=1)
    sizes = []
    for replay in ("false", "true"):
        sampling = "generation={backend: megatron, max_kv_tokens: 3000}"
        experiment = configure(sampling, f"policy.moe.router_replay={replay}")
        found = estimate_memory(experiment, replace(SHAPE, moe=moe), training=True)
        sizes.append(group("policy", found).kv_cache)

    assert sizes[1] - sizes[0] == 3000 * 5 * 2 * 2  # tokens, layers, experts of a token, bytes


@pytest.mark.parametrize(("tokens", "chunk"), [(512, 512), (100, 100), (5000, 2048)])
def test_logits_exist_for_a_chunk_at_a_time(configure: Configure, tokens: int, chunk: int) -> None:
    """32 trajectories of 64 tokens are 2048, so no chunk is longer."""
    experiment = configure("policy.micro_batch_tokens=8192", f"policy.logprob_chunk_tokens={tokens}")

    policy = group("policy", estimate_memory(experiment, SHAPE, training=True))

    assert policy.logits == chunk * 1000 * 4 * 2


def test_activations_grow_with_the_micro_batch_and_shrink_with_tensor_parallelism(
    configure: Configure,
) -> None:
    def activations(*overrides: str) -> int:
        return group("policy", estimate_memory(configure(*overrides), SHAPE, training=True)).activations

    # per token and layer: 4 hidden, 3 query, 3 key-value and 3 MLP widths
    assert activations() == 512 * 6 * (4 * 128 + 3 * 128 + 3 * 64 + 3 * 384) * 4
    assert activations("policy.micro_batch_tokens=1024") == 2 * activations()
    both = "policy.layout={tensor_parallel_size: 2, sequence_parallel: true}"
    assert activations(both) == activations() // 2


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
