"""Operations of the passes before an update, as workers report them, against a count written out here."""

import pytest

from nemorl.config.policy import LoraConfig, PolicyConfig
from nemorl.data.packed import PackedBatch
from nemorl.models.registry import load_shape
from tests.megatron.cases import partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch

RANK = 2


def passes(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, batch: PackedBatch
) -> tuple[float, float, float]:
    """Operations of the logprobs, of the reference's, and of values."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(share(batch, rank, config))
    micro_batches = partition(worker.batch.num_sequences, 3)
    if config.head == "scalar":
        counts = 0.0, 0.0, worker.compute_values(micro_batches).flops
    else:
        both = worker.compute_logprobs(micro_batches, old=True, reference=True)
        one = worker.compute_logprobs(micro_batches, old=False, reference=True)
        assert (one.flops, one.reference_flops) == (0, both.reference_flops)
        counts = both.flops, both.reference_flops, 0.0
    worker.close()
    return counts


def by_hand(config: PolicyConfig, batch: PackedBatch, outputs: int) -> tuple[float, float]:
    """Operations of a forward pass over the batch, and those of adapters of q_proj and down_proj in it."""
    shape = load_shape(config.model_path, config.head)
    hidden, heads, size = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    layer = hidden * (heads + 2 * shape.num_key_value_heads) * size + heads * size * hidden
    layer += 3 * hidden * shape.ffn_hidden_size
    tokens = sum(batch.lengths)
    seen = sum(place + 1 for length in batch.lengths for place in range(length))
    products = 2 * tokens * shape.num_layers * layer + 2 * int(batch.loss_mask.sum()) * hidden * outputs
    attention = 2 * 2 * heads * size * seen * shape.num_layers
    adapted = RANK * (hidden + heads * size) + RANK * (shape.ffn_hidden_size + hidden)
    return products + attention, 2 * tokens * shape.num_layers * adapted


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(layout(), id="alone"),
        pytest.param(layout(pp=2, dp=2), id="PP2-DP2"),
        pytest.param(layout(tp=2, sp=True, cp=2), id="TP2-SP-CP2", marks=pytest.mark.ci),
    ],
)
def test_logprobs_and_reference_are_a_forward_pass_each(pool, model, where):
    config = policy_config(model("llama")[1], layout=where, share_prefixes=False)
    batch = ragged_batch()
    expected, _ = by_hand(config, batch, load_shape(config.model_path).vocab_size)
    for own, reference, _ in pool.run(where.world_size, passes, config, batch):
        assert own == reference == pytest.approx(expected, rel=1e-12)


def test_the_reference_of_adapters_is_the_frozen_model(pool, model):
    lora = LoraConfig(rank=RANK, alpha=4, targets=("q_proj", "down_proj"))
    config = policy_config(model("llama")[1], share_prefixes=False, lora=lora)
    batch = ragged_batch()
    expected, adapters = by_hand(config, batch, load_shape(config.model_path).vocab_size)
    ((own, reference, _),) = pool.run(1, passes, config, batch)
    assert own == pytest.approx(expected + adapters, rel=1e-12)
    assert reference == pytest.approx(expected, rel=1e-12)


def test_values_have_a_head_of_one_number(pool, model):
    config = policy_config(model("llama")[1], share_prefixes=False, head="scalar")
    batch = ragged_batch()
    expected, _ = by_hand(config, batch, 1)
    ((_, _, values),) = pool.run(1, passes, config, batch)
    assert values == pytest.approx(expected, rel=1e-12)
