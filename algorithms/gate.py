"""The gap between the logprobs of engine and trainer for the same tokens, and its limits.

The first batch of a process is compared before its first update, and so is every batch of the
period that the config names. In between the gap comes with the update itself, which computes the same
logprobs; except in best-of-n, whose losses do not compute it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import OnlineBase
from nemorl.config.generation import GenerationBase
from nemorl.errors import RunError
from nemorl.megatron.stats import LogprobStats
from nemorl.rollout.groups import GroupSummary


class LogprobGapTooLarge(RunError):
    """Engine and trainer disagree; the message has the values and the likely causes."""


@dataclass
class LogprobGate:
    """Stops a run whose engine samples from another policy than the one that learns."""

    config: OnlineBase
    generation: GenerationBase
    compared: bool = False  # this process has compared engine and trainer once

    def due(self, step: int) -> bool:
        """True if the batch of this step is compared before its update."""
        period = self.config.logprob_gap_period
        return not self.compared or (period is not None and step % period == 0)

    def check(self, metrics: Mapping[str, float], sampled_by: range, version: int) -> None:
        """Raise LogprobGapTooLarge where `logprob_gap/mean` or `logprob_gap/max` passes its limit.

        `sampled_by` are the versions of the batch's tokens, `version` is that of the trainer's weights.
        """
        self.compared = True
        mean, largest = metrics["logprob_gap/mean"], metrics["logprob_gap/max"]
        limit, token_limit = self.config.max_logprob_gap, self.config.max_token_logprob_gap
        if not mean <= limit:  # also of a NaN
            broken = f"algorithm.max_logprob_gap allows a mean of {limit:g}"
        elif token_limit is not None and not largest <= token_limit:
            broken = f"algorithm.max_token_logprob_gap allows {token_limit:g} at a token"
        else:
            return
        listed = "".join(f"\n  - {cause}" for cause in self._causes(sampled_by, version))
        raise LogprobGapTooLarge(
            f"engine and trainer disagree on the logprobs of the same tokens: the mean difference is "
            f"{mean:.4g}, the largest {largest:.4g}; {broken}. Likely causes:{listed}"
        )

    def _causes(self, sampled_by: range, version: int) -> list[str]:
        """Known causes of a gap with the values of this run; the one that was just observed comes first."""
        generation, temperature = self.generation, self.generation.sampling.temperature
        weights = "other weights, or another tokenizer, in the engine than in the trainer"
        if not generation.takes_weights:
            weights += "; this back end gets none from the run"
        causes = [
            weights,
            "another distribution: the trainer computes with generation.sampling.temperature, which is "
            f"{temperature:g}, and without top-p, top-k, min-p and penalties; the engine's logprobs must be "
            "of the same (vLLM's own server: --logprobs-mode processed_logprobs)",
            f"precision: generation.precision is {generation.precision or 'that of the policy'}; bfloat16, "
            "and quantized weights or caches, on one side widen the gap",
            "a model that the two implement differently: rope scaling, norm epsilon, sliding windows, tied "
            "embeddings",
        ]
        if sampled_by.start < version:
            stale = (
                f"stale weights: tokens are of versions {sampled_by.start} to {sampled_by.stop - 1}, and the "
                f"trainer's weights of {version}"
            )
            return [stale, *causes]
        if version > 0:
            causes.append(
                "an update so large that the policy broke down: see grad_norm and entropy of the steps "
                "before in metrics.jsonl"
            )
        return causes


def gap_metrics(gap: LogprobStats) -> dict[str, float]:
    """A comparison by the names of its metrics."""
    return {"logprob_gap/mean": gap.gap_mean, "logprob_gap/max": gap.gap_max}


def versions_of(groups: Sequence[GroupSummary]) -> range:
    """The versions that sampled the tokens of a batch, from the oldest on; empty where none was sampled.

    Failed trajectories do not count.
    """
    sampled = [t for group in groups for t in group.trajectories if t.error is None and t.num_sampled]
    oldest = min((t.min_version for t in sampled), default=0)
    return range(oldest, max((t.max_version for t in sampled), default=-1) + 1)
