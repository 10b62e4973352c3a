"""The weight of the entropy bonus, from step to step."""

from dataclasses import dataclass

from nemorl.config.algorithm import AdaptiveEntropyConfig, EntropyConfig


@dataclass
class EntropyWeight:
    """Fixed, or after Skywork-OR1's adaptive control (He et al. 2025, arXiv 2505.22312).

    After a step of mean entropy e per token the coefficient c becomes `c + change` if e is below the target,
    `c - change` if it is above, and stays between 0 and its limit. The bonus counts, with c, only while the
    entropy is not above the target. The paper looks at the entropy of a step's samples before its updates;
    here it is the one during the updates of the step before, which costs no pass of its own.
    """

    config: EntropyConfig
    coefficient: float
    entropy: float | None = None  # of the step before; None before the first

    @classmethod
    def of(
        cls, config: EntropyConfig, coefficient: float | None = None, entropy: float | None = None
    ) -> "EntropyWeight":
        """That of the first step, or of a run that goes on with what its checkpoint kept of the last one."""
        if not isinstance(config, AdaptiveEntropyConfig):
            return cls(config, config.coefficient)
        return cls(config, config.initial if coefficient is None else coefficient, entropy)

    @property
    def weight(self) -> float:
        """Of the step to come."""
        if not isinstance(self.config, AdaptiveEntropyConfig) or self.entropy is None:
            return self.coefficient
        return self.coefficient if self.entropy <= self.config.target else 0.0

    def hear(self, entropy: float) -> dict[str, float]:
        """Take the mean entropy of a step's updates; the figure of the weight that they were made with."""
        if not isinstance(self.config, AdaptiveEntropyConfig):
            return {}
        used = self.weight
        if entropy != self.config.target:
            change = self.config.change if entropy < self.config.target else -self.config.change
            self.coefficient = min(max(self.coefficient + change, 0.0), self.config.max_coefficient)
        self.entropy = entropy
        return {"entropy/coefficient": used}
