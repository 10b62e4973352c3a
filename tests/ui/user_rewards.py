"""Rewards of a user that go wrong, written as files of a test."""

REWARDS = """\
import os
import time


def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


def raises(completions, answer):
    return [1 / 0 for _ in completions]


def hangs(completions, answer):
    while True:
        time.sleep(1)


def leaves(completions, answer):
    os._exit(7)


def allocates(completions, answer):
    kept = []
    while True:
        kept.append(bytearray(2**28))
"""

TEXT = """\
run_dir: runs/x
policy: {model_path: models/a}
data: {train: {name: arithmetic}, chat: false}
rewards:
  - function: exact_match
  - {function: "my_rewards:REWARD", weight: 2.0}
algorithm: {name: grpo, num_steps: 3, num_prompts_per_step: 4, num_generations_per_prompt: 2}
"""

LINES = """\
{"prompt": "1+1=", "completions": ["2", "3"], "answer": "2"}
{"prompt": "1+2=", "completions": ["3", "3"], "answer": "3"}
no JSON
"""
