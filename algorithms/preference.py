"""DPO and its kin: an answer that was preferred becomes more likely than the one that was not.

The loss is a function of two numbers for each pair (`pair_losses.py`); pairs lie in one micro-batch, so it is
a plain sum over micro-batches and ranks as every other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import Aggregation, PreferenceConfig
from nemorl.config.algorithm.losses import PairLossConfig
from nemorl.data.examples import Example
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch

from .offline import Unit
from .pair_losses import pair_loss
from .pairs import answer_logprobs, find_pairs


@dataclass(frozen=True)
class PreferenceLoss:
    """The mean over pairs of what each costs, with the chosen answers' cross entropy where it is weighed."""

    config: PairLossConfig
    num_pairs: int  # of the whole optimizer step
    sft_coefficient: float = 0.0
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `units` and `labels`, and `reference_logprobs` where the loss keeps a reference.

        `weights` are those of the cross entropy: they add up to 1 over the chosen answers of the step.
        """
        pairs, mean = find_pairs(batch), self.config.logprobs == "mean"
        answers = answer_logprobs(logprobs, batch, mean=mean)  # [S]
        relative = answers
        if self.config.keeps_reference:
            assert batch.reference_logprobs is not None, "the loss of a pair wants the reference's logprobs"
            relative = answers - answer_logprobs(batch.reference_logprobs, batch, mean=mean)
        chosen, rejected = relative[pairs.chosen], relative[pairs.rejected]
        preference = pair_loss(chosen, rejected, pairs.margins, self.config).sum() / self.num_pairs
        assert batch.labels is not None, "pairs have labels"
        sft = -(batch.weights * (batch.labels > 0) * logprobs).sum()
        loss = preference + self.sft_coefficient * sft
        sums = {
            "loss/total": loss,
            "loss/preference": preference,
            "loss/sft": sft,
            "pairs": torch.tensor(float(len(pairs)), device=loss.device),
            "rewards/chosen": self.config.beta * chosen.sum(),
            "rewards/rejected": self.config.beta * rejected.sum(),
            "rewards/margin": self.config.beta * (chosen - rejected).sum(),
            "rewards/accuracy": (chosen > rejected).sum(),
            "logprobs/chosen": answers[pairs.chosen].sum(),
            "logprobs/rejected": answers[pairs.rejected].sum(),
        }
        return LossOutput(loss, {name: value.detach().float() for name, value in sums.items()}, {})


def pair_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Losses as they are; the rest are means over pairs."""
    pairs = max(sums["pairs"], 1.0)
    return {k: v if k.startswith("loss/") else v / pairs for k, v in sums.items() if k != "pairs"}


@dataclass(frozen=True)
class Preference:
    """One of the methods that compare the two answers of a pair."""

    config: PreferenceConfig
    aggregation: Aggregation = "token-mean"  # of the cross entropy

    def contrast(self, units: Sequence[Unit]) -> list[Example]:
        """No divergence is estimated."""
        return []

    def loss(self, num_units: int, divergence: float) -> PreferenceLoss:
        """Of a step of so many pairs."""
        return PreferenceLoss(self.config.loss, num_units, self.config.sft_coefficient)

    def figures(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """Losses, implicit rewards `beta (log policy - log reference)`, and how often the chosen wins."""
        return pair_figures(sums)
