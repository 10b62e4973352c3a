"""Supervised fine-tuning: the answers of the data instead of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import Aggregation, SftConfig
from nemorl.data.examples import Example

from .losses import CrossEntropyLoss, finish_metrics
from .offline import Unit


@dataclass(frozen=True)
class Supervised:
    """Learning to say what the data say."""

    config: SftConfig

    @property
    def aggregation(self) -> Aggregation:
        """As the config says."""
        return self.config.aggregation

    def contrast(self, units: Sequence[Unit]) -> list[Example]:
        """There is no reference."""
        return []

    def loss(self, num_units: int, divergence: float) -> CrossEntropyLoss:
        """Weights carry everything."""
        return CrossEntropyLoss()

    def figures(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """The loss, and the mean negative logprob of a token."""
        return finish_metrics(sums, maxima)
