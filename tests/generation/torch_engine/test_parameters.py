"""The fused parameters and the boxes of the checkpoint they hold."""

import torch

from nemorl.generation.torch_engine.engine import ModelRunner, decoder_parameters
from nemorl.models.hf_folder import HfFolder
from nemorl.models.kv_cache import Prompt
from nemorl.models.registry import load_shape
from tests.generation.examples import SHAPE, Prompts, random_weights


def test_every_hf_tensor_is_held_once_and_every_element_of_a_parameter_is_named_once(hf_model):
    shape = load_shape(hf_model.folder)
    parameters = decoder_parameters(shape)
    slices = [part for parameter in parameters for part in parameter.slices()]
    stored = HfFolder(hf_model.folder)
    assert sorted(part.name for part in slices) == sorted(stored.names())
    for parameter in parameters:
        counts = torch.zeros(parameter.shape)
        for part in slices:
            if part.param == parameter.name:
                counts.as_strided(part.size, part.strides, part.offset).add_(1)
        assert torch.equal(counts, torch.ones(parameter.shape)), parameter.name


def test_fused_rows_are_query_key_value_and_gate_up(hf_models):
    model = hf_models["qwen2"]
    weights = dict(model.network.named_parameters())
    by_name = {p.name: p for p in decoder_parameters(load_shape(model.folder))}
    parts = [name for name, _ in by_name["layers.1.qkv.bias"].parts]
    assert parts == [f"model.layers.1.self_attn.{name}_proj.bias" for name in "qkv"]
    assert by_name["layers.1.qkv.bias"].shape == (sum(weights[name].numel() for name in parts),)
    assert by_name["layers.0.gate_up.weight"].shape == (2 * 80, 48)


def test_staged_weights_are_not_used_before_commit_and_not_shared_after_it():
    runner = ModelRunner(
        SHAPE, max_kv_tokens=64, max_positions=64, device=torch.device("cpu"), dtype=torch.float32
    )
    random_weights(runner, seed=0)
    runner.commit()
    prompt = Prompt(Prompts().one(9), [0])
    runner.cache.reserve(1, 16)

    def logits():
        return runner.logits(runner.prefill([prompt]))

    before = logits()
    for parameter in runner.staging_parameters().values():
        parameter.mul_(0.5)
    assert torch.equal(logits(), before)
    runner.commit()
    after = logits()
    assert not torch.allclose(after, before)
    for parameter in runner.staging_parameters().values():
        parameter.zero_()
    assert torch.equal(logits(), after)
