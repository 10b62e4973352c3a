"""Reward functions as a person would write them, right and wrong ones."""

import asyncio
import time


def word_count(completions, **columns):
    """TRL's signature in full: any column may come."""
    assert columns.keys() == {"prompts", "completion_ids", "sampled_ids", "answer", "level"}
    return [float(len(text.split())) for text in completions]


async def half(completions, scale=0.5):
    await asyncio.sleep(0)
    return [scale for _ in completions]


def only_hard(completions, level):
    return [1.0 if value == "hard" else None for value in level]


def too_few(completions):
    return [1.0]


def not_finite(completions):
    return [float("nan") for _ in completions]


def a_number(completions):
    return 1.0


def yields(completions):
    yield from (1.0 for _ in completions)


def raises(completions):
    raise LookupError("no such word")


def sleeps(completions, seconds=60):
    time.sleep(seconds)
    return [1.0 for _ in completions]


def meets(completions, barrier):
    barrier.wait()
    return [1.0 for _ in completions]


def wants(completions, solution):
    return [1.0 for _ in completions]


def fails_for_five(completions):
    """Costs the answer that says five, and no other."""
    return [float("inf") if "5" in text else 1.0 for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    """verl's signature."""
    if solution_str == "raise":
        raise ValueError("no such solution")
    right = solution_str == ground_truth
    return {"score": factor * right, "acc": right, "source": data_source, "extra": extra_info}


async def compute_score_async(solution_str, ground_truth, **rest):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


class Tensor:
    """A stand-in of torch's, which this module does without."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def reward_func(queries, prompts, labels):
    """OpenRLHF's signature: texts of prompt and answer together."""
    return Tensor([float(q == p + label) for q, p, label in zip(queries, prompts, labels, strict=True)])


def reward_func_with_logs(queries, prompts, labels, **rest):
    return {"rewards": reward_func(queries, prompts, labels), "scores": None, "extra_logs": {}}


def waits(completions, event, reached=None):
    if reached is not None:
        reached.set()
    event.wait()
    return [1.0 for _ in completions]


def leaves(completions):
    raise SystemExit(3)


NOT_A_FUNCTION = 3
