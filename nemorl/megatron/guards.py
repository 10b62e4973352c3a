"""Guards of the optimizer step: whether an update may change the weights.

An update is skipped if its loss, gradient norm, entropy or logprob gap is not finite, or beyond a limit of
`policy.guards` (of the critic: `critic.guards`). A spike is relative to the accepted updates before it: with
the median m of the newest of their values x_i, a value x is a spike if

    x - m > max(max_deviations * 1.4826 * median |x_i - m|, min_change)

and of the loss and the entropy also if m - x is. The factor makes the median absolute deviation an estimate
of the standard deviation of normal values; up to half of the values may be outliers without an effect on it
(Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation").
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from nemorl.config.algorithm.base import TOTAL_LOSSES
from nemorl.config.policy import LimitsConfig, UpdateGuardsConfig

logger = logging.getLogger(__name__)

History = Mapping[str, Sequence[float]]  # of accepted updates, by quantity with `max_deviations`

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_TWO_SIDED = frozenset({"loss", "entropy"})  # of the others a small value is no fault


@dataclass(frozen=True)
class Verdict:
    reason: str = ""  # to skip the update; empty if it is accepted
    guards: dict[str, bool] = field(default_factory=dict)  # by quantity with limits: the value is beyond one


def guarded_values(sums: Mapping[str, float]) -> dict[str, float]:
    """Loss, entropy and logprob gap from the sums of an update, as far as its loss computes them."""
    tokens, total = max(sums.get("tokens", 0.0), 1.0), next((n for n in TOTAL_LOSSES if n in sums), None)
    means = {"entropy": "entropy", "logprob_gap": "logprob_gap/mean"}
    values = {name: sums[metric] / tokens for name, metric in means.items() if metric in sums}
    return values if total is None else {"loss": sums[total], **values}


class UpdateGuards:
    def __init__(self, config: UpdateGuardsConfig) -> None:
        self._limits, self._window, self._warmup = config.limits, config.window, config.warmup

    def judge(self, values: Mapping[str, float], history: History) -> Verdict:
        """A pure function: ranks with equal arguments agree. Quantities without a value are left out."""
        limited = self._limits_of(values)
        for name, value in values.items():
            if not math.isfinite(value):
                return Verdict(f"{name} is {value}", {other: other == name for other in limited})
        reason, guards = "", {}
        for name, limits in limited.items():
            problem = self._problem(name, values[name], limits, history.get(name, ()))
            guards[name] = bool(problem)
            if problem and limits.action == "count":
                logger.warning("beyond a limit that only counts: %s", problem)
            elif problem:
                reason = reason or problem
        return Verdict(reason, guards)

    def accept(self, values: Mapping[str, float], history: History) -> dict[str, list[float]]:
        """The history after an update with these values."""
        spiking = self._limits_of(values).items()
        names = [name for name, limits in spiking if limits.max_deviations is not None]
        return {name: [*history.get(name, ()), values[name]][-self._window :] for name in names}

    def _limits_of(self, values: Mapping[str, float]) -> dict[str, LimitsConfig]:
        return {name: limits for name, limits in self._limits.items() if name in values}

    def _problem(self, name: str, value: float, limits: LimitsConfig, before: Sequence[float]) -> str:
        if limits.max_value is not None and value > limits.max_value:
            return f"{name} is {value:.4g}, above guards.{name}.max_value, {limits.max_value:g}"
        if limits.min_value is not None and value < limits.min_value:
            return f"{name} is {value:.4g}, below guards.{name}.min_value, {limits.min_value:g}"
        if limits.max_deviations is None or len(before) < self._warmup:
            return ""
        middle = median(before)
        deviation = _NORMAL * median(abs(x - middle) for x in before)
        limit = max(limits.max_deviations * deviation, limits.min_change)
        change = value - middle
        if (abs(change) if name in _TWO_SIDED else change) <= limit:
            return ""
        of_median = f"{change:+.4g} from {middle:.4g}, the median of {len(before)} updates"
        allowed = f"guards.{name}.max_deviations, {limits.max_deviations:g}, allows {limit:.4g}"
        return f"{name} is {value:.4g}, {of_median}; {allowed}"
