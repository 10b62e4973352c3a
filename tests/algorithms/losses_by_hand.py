"""Policy losses in plain Python floats, a token at a time, as the papers write them.

Each takes the tokens of one sequence that the policy sampled and gives their losses. `x` are the logprobs
with gradient, `sg` the same numbers where the paper stops the gradient, so that a difference quotient in `x`
alone is the gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Floats = Sequence[float]
ByHand = Callable[[Floats, Floats, Floats, Floats, Any], list[float]]


def clip(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    losses = []
    for p, q, a in zip(x, old, advantages, strict=True):
        r = math.exp(p - q)
        objective = min(r * a, min(max(r, 1 - c.clip_low), 1 + c.clip_high) * a)
        if c.dual_clip is not None and a < 0:
            objective = max(objective, c.dual_clip * a)
        losses.append(-objective)
    return losses


def gspo(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    product = 1.0
    for p, q in zip(x, old, strict=True):
        product *= math.exp(p) / math.exp(q)
    s = product ** (1 / len(x))
    clipped = min(max(s, 1 - c.clip_low), 1 + c.clip_high)
    return [-min(s * a, clipped * a) for a in advantages]


def gspo_token(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    product = 1.0
    for p, q in zip(sg, old, strict=True):
        product *= math.exp(p) / math.exp(q)
    losses = []
    for p, frozen, a in zip(x, sg, advantages, strict=True):
        s = product ** (1 / len(x)) * math.exp(p) / math.exp(frozen)
        losses.append(-min(s * a, min(max(s, 1 - c.clip_low), 1 + c.clip_high) * a))
    return losses


def gmpo(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    """The formula takes one advantage for a sequence: `(prod |min(r A, clip(r) A)|)^(1/n) sign(A)`."""
    losses = []
    for a in advantages:
        product = 1.0
        for p, q, own in zip(x, old, advantages, strict=True):
            r = math.exp(p) / math.exp(q)
            clipped = min(max(r, math.exp(-c.clip_low)), math.exp(c.clip_high))
            product *= abs(min(r * own, clipped * own)) / abs(own)
        losses.append(-a * product ** (1 / len(x)))
    return losses


def cispo(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    losses = []
    for p, frozen, q, a in zip(x, sg, old, advantages, strict=True):
        weight = min(math.exp(frozen - q), 1 + c.clip_high)
        if c.clip_low is not None:
            weight = max(weight, 1 - c.clip_low)
        losses.append(-weight * a * p)
    return losses


def dppo(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    losses = []
    for p, frozen, q, a in zip(x, sg, old, advantages, strict=True):
        now, before = math.exp(frozen), math.exp(q)
        moved = abs(now - before)
        if c.divergence == "kl":
            moved = before * math.log(before / now)
            moved += (1 - before) * math.log((1 - before + 1e-8) / (1 - now + 1e-8))
        too_far = now > before and moved > c.clip_high if a > 0 else now < before and moved > c.clip_low
        losses.append(0.0 if too_far else -min(now / before, c.max_ratio) * a * p)
    return losses


def sapo(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    losses = []
    for p, q, a in zip(x, old, advantages, strict=True):
        t = c.temperature_positive if a > 0 else c.temperature_negative
        gate = 4 / t / (1 + math.exp(-t * (math.exp(p - q) - 1)))
        losses.append(-gate * a)
    return losses


def reinforce(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any) -> list[float]:
    return [-a * p for p, a in zip(x, advantages, strict=True)]


@dataclass(frozen=True)
class Tokens:
    """What was sampled in all sequences of an update, for the losses that choose among all of it."""

    old: list[list[float]]
    advantages: list[list[float]]

    def covariances(self) -> list[list[float]]:
        old = [p for sequence in self.old for p in sequence]
        advantages = [a for sequence in self.advantages for a in sequence]
        mean_old, mean_advantage = sum(old) / len(old), sum(advantages) / len(advantages)
        return [
            [(p - mean_old) * (a - mean_advantage) for p, a in zip(ps, as_, strict=True)]
            for ps, as_ in zip(self.old, self.advantages, strict=True)
        ]


def kl_cov(x: Floats, sg: Floats, old: Floats, advantages: Floats, c: Any, held: list[bool]) -> list[float]:
    return [
        -math.exp(p - q) * a + (c.coefficient * abs(p - q) if chosen else 0)
        for p, q, a, chosen in zip(x, old, advantages, held, strict=True)
    ]


def kl_gradient(logp: float, reference: float, estimator: str) -> float:
    """The factor of the logprob's gradient."""
    d = logp - reference
    return {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator]
