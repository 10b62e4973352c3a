import pytest
import torch

from nemorl.config.policy import ConstantSchedule, DecaySchedule, InverseSqrtSchedule
from nemorl.megatron.optimizer import learning_rate


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


def test_warmup_stable_decay():
    schedule = DecaySchedule(name="linear", warmup_steps=2, stable_steps=3, decay_steps=9, min_lr=0.2)
    expected = [0.4, 0.8, 0.8, 0.8, 0.8, 0.65, 0.5, 0.35, 0.2, 0.2]
    assert rates(schedule, range(1, 11)) == pytest.approx(expected)
    cosine = DecaySchedule(name="cosine", stable_steps=4, decay_steps=8)
    assert rates(cosine, [4, 6, 8]) == pytest.approx([0.8, 0.4, 0.0])


def test_inverse_root_halves_at_four_times_the_warmup():
    schedule = InverseSqrtSchedule(name="inverse_sqrt", warmup_steps=4, min_lr=0.1)
    assert rates(schedule, [1, 4, 16, 64]) == pytest.approx([0.2, 0.8, 0.4, 0.2])
    assert rates(schedule, [9, 1024]) == pytest.approx([0.8 * 2 / 3, 0.1])


def test_the_first_step_may_have_the_rate_from_which_the_warmup_rises():
    """As torch's LinearLR and Megatron's scheduler: `start + (peak - start) n / warmup` from n = 0 on."""
    schedule = ConstantSchedule(warmup_steps=4, warmup_start=0.5, first_step=0)
    assert rates(schedule, range(1, 7)) == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.8])
    assert rates(ConstantSchedule(warmup_steps=2, warmup_start=0.5), [1, 2]) == pytest.approx([0.6, 0.8])
    cosine = DecaySchedule(name="cosine", decay_steps=8, first_step=0)
    assert rates(cosine, [1, 5, 9]) == pytest.approx([0.8, 0.4, 0.0])


def test_rates_equal_those_of_torch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.8)
    up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.2)
    theirs = torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[5])
    expected = []
    for _ in range(15):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    schedule = DecaySchedule(
        name="cosine", warmup_steps=5, warmup_start=0.1, first_step=0, decay_steps=15, min_lr=0.2
    )
    assert rates(schedule, range(1, 16)) == pytest.approx(expected, rel=1e-6)
