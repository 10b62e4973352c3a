"""The learning rate."""

from collections.abc import Iterator

from nemorl.config.policy import DecaySchedule, PolicyConfig
from nemorl.errors import Violation


def decay_follows_warmup(policy: PolicyConfig) -> Iterator[Violation]:
    """The decay needs steps after the warm-up."""
    schedule = policy.schedule
    if isinstance(schedule, DecaySchedule) and schedule.warmup_steps >= schedule.decay_steps:
        yield Violation(
            "policy.schedule.decay_steps",
            schedule.decay_steps,
            f"it counts the warm-up in, so it must be more than policy.schedule.warmup_steps, "
            f"{schedule.warmup_steps}",
        )


def decay_goes_down(policy: PolicyConfig) -> Iterator[Violation]:
    """The rate comes down, not up."""
    schedule, peak = policy.schedule, policy.optimizer.lr
    if isinstance(schedule, DecaySchedule) and schedule.min_lr > peak:
        yield Violation(
            "policy.schedule.min_lr",
            schedule.min_lr,
            f"the rate decays from policy.optimizer.lr, {peak:g}, to this: it must not be more",
        )
