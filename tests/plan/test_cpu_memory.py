"""What a policy on a CPU holds besides what a GPU's does, counted by hand."""

from dataclasses import replace

from nemorl.models.registry import shape_from_config
from nemorl.plan.cpu_memory import MAX_BUCKET_BYTES, head_parts
from nemorl.plan.memory import policy_memory, stage_memory
from nemorl.weights.shared_memory import MAX_HOST_BUCKET_BYTES
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG

SHAPE = shape_from_config(CONFIG, "config.json")
TABLE = 1000 * 128 * 4  # embedding, and output weight
TWO = "policy.layout.data_parallel_size=2"


def test_layers_keep_what_their_operators_need_and_the_memory_between(configure: Configure) -> None:
    """Per token and layer: 2 hidden for each norm's input, 1 for its output, and 5 MLP widths."""
    norms, attention = 2 * 3 * 128, 3 * 128 + 3 * 64

    policy = policy_memory(configure(), SHAPE)

    assert policy.activations == round(512 * 6 * (norms + attention + 5 * 384) * 4 * 1.18)


def test_a_step_with_few_tokens_fills_no_micro_batch(configure: Configure) -> None:
    whole, few = (policy_memory(configure(), SHAPE, tokens) for tokens in (None, 128))

    assert few.activations == whole.activations // 4
    assert policy_memory(configure(), SHAPE, 10**6) == whole  # in several
    assert few.weights == whole.weights


def test_copies_sum_their_gradients_in_a_copy(configure: Configure) -> None:
    def gradients(*overrides: str) -> int:
        return policy_memory(configure(*overrides), SHAPE).gradients

    assert gradients(TWO) == 2 * gradients()
    # Muon's gradients are whole on every copy, and summed in place.
    muon = "policy.optimizer={name: muon, lr: 1.0e-3}"
    assert gradients(muon, TWO) == gradients(muon)
    assert gradients("cluster.gpus_per_node=3", TWO) == gradients()


def test_tables_get_gradients_where_they_are(configure: Configure) -> None:
    """Of the embedding at the end of the backward pass, when what the head took is free, except of a tie."""

    def head(experiment_stage: int, *overrides: str, tied: bool = False) -> int:
        shape = replace(SHAPE, tied_embeddings=tied)
        one = stage_memory(configure(chunk, *overrides), shape, experiment_stage)
        return one.logits + one.head_gradient

    chunk = "policy.logprob_chunk_tokens=16"  # of several
    stages, logits = "policy.layout.pipeline_parallel_size=2", 2 * 16 * 1000 * 4
    assert head(0) == logits + TABLE
    assert head(0, tied=True) == 2 * TABLE
    assert head(0, stages) == TABLE
    assert head(1, stages) == logits + TABLE
    assert head(0, "policy.lora={rank: 2, alpha: 4}") == logits


def test_a_single_chunk_of_logits_becomes_its_gradient() -> None:
    assert head_parts(200, 30, 0, is_one_chunk=True, is_tied=False) == (200, 0)
    assert head_parts(200, 130, 0, is_one_chunk=True, is_tied=False) == (200, 30)
    assert head_parts(200, 130, 0, is_one_chunk=False, is_tied=False) == (200, 130)
    assert head_parts(0, 0, 50, is_one_chunk=True, is_tied=False) == (0, 50)


def test_weights_leave_in_small_buffers_of_shared_memory(configure: Configure) -> None:
    assert MAX_BUCKET_BYTES == MAX_HOST_BUCKET_BYTES
    large = replace(SHAPE, vocab_size=100_000)  # 51 MB for each table
    buffers = policy_memory(configure(), large).staging
    assert buffers == 2 * MAX_BUCKET_BYTES
    assert policy_memory(configure("generation.transport=gloo"), large).staging > buffers
