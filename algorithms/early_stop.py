"""When a run ends before its last step: a figure gets no better."""

from dataclasses import dataclass

from nemorl.config.algorithm.base import EarlyStopConfig


@dataclass
class EarlyStop:
    """Watches a figure over a run; its state is in every checkpoint."""

    config: EarlyStopConfig | None
    best: float | None = None  # value so far
    waited: int = 0  # measurements since then

    def hear(self, figures: dict[str, float]) -> bool:
        """Whether the run ends after a step with these figures; steps without the figure say nothing.

        A value that is no number is not better than any other.
        """
        if self.config is None or self.config.metric not in figures:
            return self.over
        value = figures[self.config.metric]
        if self._is_better(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether the figure has got no better for as long as the config waits."""
        return self.config is not None and self.waited >= self.config.patience

    @property
    def figures(self) -> dict[str, float]:
        """What a step's line says of it, and the report knows an ended run by."""
        return {} if self.config is None else {"early_stop/waited": float(self.waited)}

    def __str__(self) -> str:
        assert self.config is not None
        return (
            f"the run ends here: {self.config.metric} has not got better than {self.best} in "
            f"{self.waited} measurements (algorithm.early_stop)"
        )

    def _is_better(self, value: float) -> bool:
        assert self.config is not None
        if self.best is None:
            return value == value
        gain = value - self.best if self.config.higher_is_better else self.best - value
        return gain > self.config.min_delta
