"""KTO: single answers, good or not, against what the policy has moved away from the reference on the whole.

The point of comparison is the divergence of the policy from the reference (Ethayarajh et al. 2024, arXiv
2402.01306): the mean of `log policy - log reference` over prompts joined to answers of other
prompts of the same batch, at least 0, without a gradient. It is measured before the step, over the whole
batch, so that the loss does not depend on how the batch is split; the paper takes a micro-batch's. What a
step joins follows from the order of the data, so the reference's part may be computed beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import Aggregation, KtoConfig
from nemorl.data.examples import Example, mismatched
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch

from .offline import Unit
from .pairs import answer_logprobs, sequence_labels


@dataclass(frozen=True)
class KtoLoss:
    """The mean over examples of what each costs."""

    config: KtoConfig
    num_examples: int  # of the whole optimizer step
    divergence: float  # of the policy from the reference, in nats an answer; counts from 0 on
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `labels` and `reference_logprobs`, of which sums over answers count."""
        assert batch.reference_logprobs is not None, "KTO wants the reference's logprobs"
        labels = sequence_labels(batch)  # [S]
        relative = answer_logprobs(logprobs - batch.reference_logprobs, batch, mean=False)
        good, bad = labels > 0, labels < 0
        won = self.config.beta * labels * (relative - max(self.divergence, 0.0))
        weights = self.config.desirable_weight * good + self.config.undesirable_weight * bad
        loss = (weights * (1 - torch.sigmoid(won))).sum() / self.num_examples
        sums = {
            "loss/preference": loss,
            "examples/desirable": good.sum(),
            "examples/undesirable": bad.sum(),
            "rewards/desirable": self.config.beta * (relative * good).sum(),
            "rewards/undesirable": self.config.beta * (relative * bad).sum(),
            "rewards/accuracy": ((won > 0) & (labels != 0)).sum(),
        }
        return LossOutput(loss, {name: value.detach().float() for name, value in sums.items()}, {})


@dataclass(frozen=True)
class Kto:
    """Learning from single answers."""

    config: KtoConfig
    aggregation: Aggregation = "token-mean"  # no term of single tokens

    def contrast(self, units: Sequence[Unit]) -> list[Example]:
        """Each prompt with the answer to the next one."""
        examples = [unit.examples[0] for unit in units]
        return mismatched(examples, max_length=max(example.num_tokens for example in examples))

    def loss(self, num_units: int, divergence: float) -> KtoLoss:
        """Of a step of so many answers, from which the policy's divergence was measured."""
        return KtoLoss(self.config, num_units, divergence)

    def figures(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """The loss, implicit rewards of both kinds, and how many lie on their side of the divergence."""
        good, bad = sums["examples/desirable"], sums["examples/undesirable"]
        rewards = {
            "rewards/desirable": sums["rewards/desirable"] / max(good, 1.0),
            "rewards/undesirable": sums["rewards/undesirable"] / max(bad, 1.0),
        }
        return {
            "loss/preference": sums["loss/preference"],
            **rewards,
            "rewards/margin": rewards["rewards/desirable"] - rewards["rewards/undesirable"],
            "rewards/accuracy": sums["rewards/accuracy"] / max(good + bad, 1.0),
            "examples/desirable": good / max(good + bad, 1.0),
        }
