import pytest

from nemorl.config.policy import AdamConfig, ConstantSchedule, DecaySchedule, SgdConfig
from nemorl.megatron.optimizer import learning_rate
from tests.megatron.cases import start_worker
from tests.megatron.examples import policy_config


def rates(schedule, updates):
    return [learning_rate(update, 0.8, schedule) for update in updates]


def test_constant_rate_after_warmup():
    schedule = ConstantSchedule(warmup_steps=4)
    assert rates(schedule, range(1, 7)) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates(ConstantSchedule(), [1, 100]) == [0.8, 0.8]


def test_linear_decay_ends_at_min_lr():
    schedule = DecaySchedule(name="linear", warmup_steps=2, decay_steps=6, min_lr=0.4)
    assert rates(schedule, range(1, 9)) == pytest.approx([0.4, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.4])


def test_cosine_decay_is_half_way_down_at_half_time():
    schedule = DecaySchedule(name="cosine", decay_steps=8)
    assert rates(schedule, [4, 8, 9]) == pytest.approx([0.4, 0.0, 0.0])
    assert rates(schedule, [2])[0] == pytest.approx(0.8 * (1 + 2**-0.5) / 2)


def test_a_warmup_as_long_as_the_decay_still_ends():
    assert rates(DecaySchedule(name="linear", warmup_steps=2, decay_steps=2), [2, 3]) == [0.8, 0.0]


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
