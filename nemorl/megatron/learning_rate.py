"""The learning rate of an optimizer step, a pure function of its number."""

import math

from nemorl.config.policy import ConstantSchedule, InverseSqrtSchedule, ScheduleConfig


def learning_rate(update: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of the `update`-th optimizer step, counted from 1.

    Linear warm-up reaches the peak at step `warmup_steps`; a decay leaves it `stable_steps` later and reaches
    `min_lr` at step `decay_steps`.
    """
    if update <= schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return peak
    if isinstance(schedule, InverseSqrtSchedule):
        return max(schedule.min_lr, peak * math.sqrt(schedule.warmup_steps / update))
    if update >= schedule.decay_steps:
        return schedule.min_lr
    start = schedule.warmup_steps + schedule.stable_steps
    done = max(0, update - start) / (schedule.decay_steps - start)
    left = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.min_lr + left * (peak - schedule.min_lr)
