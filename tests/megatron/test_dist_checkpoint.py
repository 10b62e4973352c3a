"""Weights to Megatron's own checkpoints and back; megatron-core's own model and loader are the measure.

Exports run in the tests' own process: megatron-core starts others to write, which those of the pool may not.
"""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from nemorl.megatron.checkpoint import export_megatron, import_megatron, sharded_state
from nemorl.megatron.device import building
from nemorl.models.registry import load_shape
from tests.megatron.cases import start_worker
from tests.megatron.examples import VOCABULARY, layout, policy_config

LAYER = "decoder.layers."
DENSE = {
    "embedding.word_embeddings.weight",
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
    f"{LAYER}self_attention.linear_qkv.weight",
    f"{LAYER}self_attention.q_layernorm.weight",
    f"{LAYER}self_attention.k_layernorm.weight",
    f"{LAYER}self_attention.linear_proj.weight",
    f"{LAYER}mlp.linear_fc1.layer_norm_weight",
    f"{LAYER}mlp.linear_fc1.weight",
    f"{LAYER}mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}
EXPERTS = {
    *(
        name
        for name in DENSE
        if ".mlp." not in name and not name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
    ),
    f"{LAYER}pre_mlp_layernorm.weight",
    f"{LAYER}mlp.router.weight",
    f"{LAYER}mlp.experts.experts.linear_fc1.weight",
    f"{LAYER}mlp.experts.experts.linear_fc2.weight",
}


@pytest.fixture
def exported(pool, model, tmp_path):
    """Megatron's folder of a family's weights, by way of a training state under TP2 and DP2."""

    def export(family):
        config = policy_config(model(family)[1], layout=layout(tp=2, dp=2))
        pool.run(4, save, config, tmp_path / "state")
        export_megatron(tmp_path / "state", tmp_path / "megatron", config)
        return tmp_path / "megatron"

    return export


def save(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.save_checkpoint(folder)
    worker.close()


def from_megatron(rank, world_size, rendezvous, source, out, like):
    return import_megatron(source, out, like).num_parameters


def load_into_megatron(rank, world_size, rendezvous, config, folder, qk_norm, tied):
    """Names of the parameters that Megatron's GPTModel reads otherwise than a worker reads the HF folder."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
    from megatron.core.transformer import TransformerConfig

    worker = start_worker(rank, world_size, rendezvous, config)
    theirs = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=16 if qk_norm else 8,
        qk_layernorm=qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        cuda_graph_scope=[],
    )
    with building("cpu"):
        gpt = GPTModel(
            theirs,
            get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
            vocab_size=VOCABULARY + 1,
            max_sequence_length=64,
            pre_process=is_pipeline_first_stage(),
            post_process=is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )
        state = dist_checkpointing.load(gpt.sharded_state_dict(), str(folder / "release"))
    expected = worker.parameters()
    real_rows = 27 if rank % 2 == 0 else 26  # the last one of the second rank is padding
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    rows = {name: real_rows if name in vocabulary else len(weight) for name, weight in expected.items()}
    wrong = [name for name, n in rows.items() if not torch.equal(state[name][:n], expected[name][:n])]
    worker.close()
    return wrong, len(rows)


@pytest.mark.parametrize(("family", "qk_norm", "tied"), [("qwen3", True, False), ("llama-tied", False, True)])
def test_megatrons_own_model_loads_it_under_another_layout(pool, model, exported, family, qk_norm, tied):
    config = policy_config(model(family)[1], layout=layout(tp=2, pp=2))
    for wrong, count in pool.run(4, load_into_megatron, config, exported(family), qk_norm, tied):
        assert wrong == []
        assert count > 10


@pytest.mark.parametrize(("family", "names"), [("qwen3", DENSE), ("mixtral", EXPERTS)])
def test_parameters_have_the_names_of_transformer_engines_layers(pool, exported, family, names):
    metadata = pool.run(1, names_in, exported(family))[0]
    assert {name for name in metadata if "_extra_state" not in name} == names


def test_layers_of_two_kinds_are_not_stacked(pool, exported):
    names = pool.run(1, names_in, exported("qwen3-moe"))[0]
    assert f"{LAYER}0.mlp.linear_fc1.layer_norm_weight" in names
    assert f"{LAYER}2.pre_mlp_layernorm.weight" in names
    assert f"{LAYER}2.mlp.experts.experts.linear_fc1.weight" in names


def names_in(rank, world_size, rendezvous, folder):
    return list(dist_checkpointing.load_tensors_metadata(str(folder / "release")))


def load_under(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    (chunk,) = worker._chunks
    shards = sharded_state(chunk.module, load_shape(config.model_path))
    state = dist_checkpointing.load(shards, str(folder / "release"))
    wrong = [name for name, weight in worker.parameters().items() if not torch.equal(state[name], weight)]
    worker.close()
    return wrong


def test_experts_load_under_expert_parallelism(pool, model, exported):
    config = policy_config(model("qwen3-moe")[1], layout=layout(dp=2, ep=2))
    assert pool.run(2, load_under, config, exported("qwen3-moe")) == [[], []]


@pytest.mark.parametrize("family", ["llama-tied", "deepseek-v3"])
def test_it_comes_back_bit_by_bit(pool, model, exported, tmp_path, family):
    original = model(family)[1]
    (count,) = pool.run(1, from_megatron, exported(family), tmp_path / "hf", original)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    expected = load_file(original / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == count
    assert {name for name, weight in weights.items() if not torch.equal(weight, expected[name])} == set()


def import_error(rank, world_size, rendezvous, source, out, like):
    try:
        import_megatron(source, out, like)
    except ValueError as error:
        return str(error)
    return None


def test_what_is_no_such_checkpoint_is_refused(pool, model, exported, tmp_path):
    folder = model("qwen3")[1]
    (error,) = pool.run(1, import_error, folder, tmp_path / "hf", folder)
    assert "is no checkpoint of megatron-core's dist_checkpointing" in error
    (error,) = pool.run(1, import_error, exported("llama-tied"), tmp_path / "hf", folder)
    assert "does not hold the model that --like names" in error
    assert not (tmp_path / "hf").exists()
