"""The learning rate."""

from collections.abc import Iterator

from nemorl.config.optimizer import DecaySchedule, InverseSqrtSchedule
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Violation


def decay_follows_warmup(policy: PolicyConfig) -> Iterator[Violation]:
    """The decay needs steps after the warm-up and those at the peak."""
    schedule = policy.schedule
    if not isinstance(schedule, DecaySchedule):
        return
    before = schedule.warmup_steps + schedule.stable_steps
    if before >= schedule.decay_steps:
        yield Violation(
            "policy.schedule.decay_steps",
            schedule.decay_steps,
            "it counts the steps before the decay in, so it must be more than policy.schedule.warmup_steps "
            f"and stable_steps together, {before}",
        )


def decay_goes_down(policy: PolicyConfig) -> Iterator[Violation]:
    """The rate comes down, not up."""
    schedule, peak = policy.schedule, policy.optimizer.lr
    if isinstance(schedule, DecaySchedule | InverseSqrtSchedule) and schedule.min_lr > peak:
        yield Violation(
            "policy.schedule.min_lr",
            schedule.min_lr,
            f"the rate decays from policy.optimizer.lr, {peak:g}, to this: it must not be more",
        )
