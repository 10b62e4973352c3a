"""Groups as sampling would leave them, without sampling."""

from collections.abc import Sequence

from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.config.algorithm import OnlineConfig
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.trajectories import StopReason


def trajectory(reward: float, row: int = 0, sampled: int = 3, **other: object) -> TrajectorySummary:
    """A summary with the given reward, of one turn where nothing else is said."""
    values = {
        "row": row, "reward": reward, "rewards": {"exact": reward},
        "num_tokens": sampled + 4, "num_sampled": sampled,
        "num_turns": 1, "stop": StopReason.STOP, "min_version": 2, "max_version": 2, "error": None,
        "seconds_generation": 3.0, "seconds_environment": 1.0, "turn_rewards": (0.0,),
    }  # fmt: skip
    return TrajectorySummary(**{**values, **other})  # type: ignore[arg-type]


def failed(row: int) -> TrajectorySummary:
    """A trajectory that ended in an error."""
    return trajectory(
        0.0, row, sampled=0, error="the environment hung", trains=False, rewards={}, stop=StopReason.ERROR
    )


def group(number: int, *trajectories: TrajectorySummary, greedy: float | None = None) -> GroupSummary:
    """A group whose store is a name."""
    beside = None if greedy is None else trajectory(greedy, len(trajectories))
    return GroupSummary(number, number, f"store-{number}", trajectories, greedy=beside)


def paid(number: int, rewards: Sequence[float], sampled: Sequence[int] | None = None) -> GroupSummary:
    """A group with these rewards, and as many sampled tokens where lengths are given."""
    lengths = sampled or [3] * len(rewards)
    members = (trajectory(r, row, n) for row, (r, n) in enumerate(zip(rewards, lengths, strict=True)))
    return group(number, *members)


def score(config: OnlineConfig, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
    """The groups' trajectories with advantages and weights."""
    return PolicyGradientUpdate(config, EntropyWeight.of(config.entropy)).score(groups)
