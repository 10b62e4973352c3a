import pytest
import torch
from megatron.core.optimizer import clip_grads

from nemorl.config.policy import AdamConfig, SgdConfig
from nemorl.megatron.inner_optimizer import norm_of_all
from tests.megatron.cases import start_worker
from tests.megatron.examples import policy_config


@pytest.mark.parametrize(
    "optimizer", [AdamConfig(lr=0.1, weight_decay=0.5), SgdConfig(name="sgd", lr=0.1, weight_decay=0.5)]
)
def test_weight_decay_leaves_out_norms_and_biases(pool, model, optimizer):
    config = policy_config(model("qwen2")[1], optimizer=optimizer)
    (decays,) = pool.run(1, decay_by_dimensions, config)
    assert decays == {1: {0.0}, 2: {0.5}}


def decay_by_dimensions(rank, world_size, rendezvous, config):
    worker = start_worker(rank, world_size, rendezvous, config)
    shapes = {p.data_ptr(): p.dim() for p in worker.parameters().values()}
    decays: dict[int, set[float]] = {}
    for group in worker.optimizer.megatron.param_groups:
        for main in group["params"]:
            decays.setdefault(shapes[main.data_ptr()], set()).add(group["weight_decay"])
    worker.close()
    return decays


def test_the_norm_of_all_gradients_is_megatrons_to_the_bit():
    """Megatron's: the norm of the norms, each of which the host reads."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(7,), (64, 33), (1,), (5, 4, 3), (4097,)]
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    expected = torch.norm(torch.tensor([[torch.norm(gradient) for gradient in gradients]]))
    found, _ = norm_of_all(0, torch.zeros(1, dtype=torch.int), [gradients], False)
    assert found.shape == (1,)
    assert torch.equal(found[0], expected)
    assert clip_grads.l2_norm_impl is norm_of_all  # without Transformer Engine and apex
