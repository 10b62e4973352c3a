"""Reward functions as a person would write them, right and wrong ones."""

import asyncio
import time


def word_count(completions, **columns):
    """TRL's signature in full: any column may come."""
    assert columns.keys() == {"prompts", "completion_ids", "answer", "level"}
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


def raises(completions):
    raise LookupError("no such word")


def sleeps(completions):
    time.sleep(0.3)
    return [1.0 for _ in completions]


def wants(completions, solution):
    return [1.0 for _ in completions]


NOT_A_FUNCTION = 3
