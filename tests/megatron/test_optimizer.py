import pytest

from nemorl.config.policy import AdamConfig, SgdConfig
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
