"""Calls of an episode as a prefix tree: which branches there are, and where each sampled token trains."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.generation.types import Completion
from nemorl.rollout.recording import Call, Recording
from nemorl.trajectories import StopReason


def answer(tokens: list[int], version: int = 0) -> Completion:
    """Tokens with logprobs that identify them, sampled in a quarter of a second for each earlier version."""
    ids = np.array(tokens, np.int32)
    logprobs = (-ids / 1000).astype(np.float32)
    versions = np.full(len(ids), version, np.int32)
    return Completion("", ids, logprobs, versions, StopReason.STOP, seconds=version / 4)


def record(*calls: tuple[list[int], list[int]]) -> Recording:
    """Calls in sequence, each a prompt and what was sampled; a call's version is its number."""
    recording = Recording()
    for number, (prompt, sampled) in enumerate(calls):
        ids = np.array(prompt, np.int32)
        recording.add(Call(number, ids, answer(sampled, number), recording.continued_by(ids)))
    return recording


def sequences(recording: Recording) -> list[tuple[list[int], list[int]]]:
    """Of each branch its tokens, and those that train."""
    return [
        (s.tokens, [t for t, trains in zip(s.tokens, s.sampled, strict=True) if trains])
        for s in recording.sequences()
    ]


def test_calls_that_continue_each_other_are_one_sequence() -> None:
    recording = record(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5, 6, 7], [8, 9]))
    (sequence,) = recording.sequences({1: {"step": 0.5}})
    assert sequence.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sequence.sampled == [False, False, True, True, False, True, False, True, True]
    assert sequence.versions == [-1, -1, 0, 0, -1, 1, -1, 2, 2]
    assert sequence.logprobs == pytest.approx([0, 0, -0.003, -0.004, 0, -0.006, 0, -0.008, -0.009])
    assert [(t.start, t.end, t.rewards) for t in sequence.turns] == [
        (2, 4, {}), (5, 6, {"step": 0.5}), (7, 9, {})
    ]  # fmt: skip
    assert [turn.seconds for turn in sequence.turns] == [0, 0.25, 0.5]


def test_a_rewritten_history_and_a_sub_agent_are_branches() -> None:
    recording = record(
        ([1, 2], [3, 4]),
        ([50], [51]),  # a sub-agent
        ([1, 2, 3, 4, 5], [6]),
        ([1, 2, 3, 4, 7], [8]),  # another try after the first answer
        ([1, 2, 9], [10]),  # the first answer is dropped
    )
    assert sequences(recording) == [
        ([50, 51], [51]),
        ([1, 2, 3, 4, 5, 6], [3, 4, 6]),
        ([1, 2, 3, 4, 7, 8], [8]),
        ([1, 2, 9, 10], [10]),
    ]


def test_a_prompt_with_a_part_of_an_answer_does_not_continue_it() -> None:
    assert sequences(record(([1], [2, 3]), ([1, 2, 4], [5]))) == [([1, 2, 3], [2, 3]), ([1, 2, 4, 5], [5])]


def test_samples_of_one_prompt_all_train_and_the_newest_of_equal_ones_is_continued() -> None:
    recording = record(([1], [2]), ([1], [2]), ([1, 2, 3], [4]))
    assert sequences(recording) == [([1, 2], [2]), ([1, 2, 3, 4], [2, 4])]
    assert recording.calls[2].parent is recording.calls[1]


def test_parallel_calls_are_in_the_order_in_which_they_began() -> None:
    recording = Recording()
    for number in (2, 0, 1):  # as they ended
        recording.add(Call(number, np.array([number + 1], np.int32), answer([10 + number])))
    assert sequences(recording) == [([1, 10], [10]), ([2, 11], [11]), ([3, 12], [12])]


def test_experts_of_a_shared_beginning_are_in_every_branch() -> None:
    recording = Recording()

    def call(number: int, prompt: list[int], parent: Call | None) -> Call:
        known = 0 if parent is None else parent.num_routed
        rows = np.full((len(prompt) - known, 1, 1), number, np.int16)  # all but the sampled token were read
        one = Call(number, np.array(prompt, np.int32), replace(answer([9]), routed_experts=rows), parent)
        recording.add(one)
        return one

    root = call(0, [1, 2], None)
    call(1, [1, 2, 9, 3], root)
    call(2, [1, 2, 9, 4, 5], root)
    rows = [np.concatenate(s.routed_experts)[:, 0, 0].tolist() for s in recording.sequences()]
    assert rows == [[0, 0, 1, 1], [0, 0, 2, 2, 2]]
    trajectory = recording.sequences()[0].trajectory(
        0, 0, rewards={}, stop=StopReason.STOP, error=None, seconds_generation=0, seconds_environment=0
    )
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts[:, 0, 0].tolist() == [0, 0, 1, 1, -1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_sampled_token_trains_once_with_what_the_model_had_read(data: st.DataObject) -> None:
    """Calls from few tokens, so that some continue others; compared with a search over all pairs."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=2)
    calls: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        before = data.draw(st.sampled_from([[], *(prompt + sampled for prompt, sampled in calls)]))
        calls.append((before + data.draw(tokens), data.draw(tokens)))
    recording = record(*calls)
    trained: list[tuple[list[int], list[int]]] = []
    for sequence in recording.sequences():
        for turn in sequence.turns:
            assert all(sequence.sampled[turn.start : turn.end])
            trained.append((sequence.tokens[: turn.start], sequence.tokens[turn.start : turn.end]))
        assert sum(sequence.sampled) == sum(turn.end - turn.start for turn in sequence.turns)
    assert sorted(trained) == sorted(calls)
    longest = [max((len(p + s) for p, s in calls[:n] if prompt[: len(p + s)] == p + s), default=0)
               for n, (prompt, _) in enumerate(calls)]  # fmt: skip
    assert [0 if c.parent is None else len(c.parent.tokens) for c in recording.calls] == longest
