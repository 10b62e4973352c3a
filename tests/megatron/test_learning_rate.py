import pytest

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
