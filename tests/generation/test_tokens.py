"""What an engine keeps of one request."""

from dataclasses import replace

import numpy as np

from nemorl.generation.tokens import RequestLimits, TokenBuffer, engine_seed
from nemorl.trajectories import StopReason
from tests.generation.examples import Prompts, request


def rows(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int16).reshape(count, 1, 1)


def test_progress_reports_have_each_token_once_and_the_answer_has_all() -> None:
    buffer = TokenBuffer()
    buffer.extend([5, 6], [-0.5, -0.25], [3, 3], rows(0, 4))
    first = buffer.take_progress("a")
    buffer.append(7, -1.0, 4)
    assert buffer.num_unreported == 1
    second = buffer.take_progress("a")
    buffer.extend([8], [-2.0], [4], rows(4, 2))

    answer = buffer.complete("a", StopReason.LENGTH, 1.5)

    assert [report.tokens.tolist() for report in (first, second)] == [[5, 6], [7]]
    assert second.routed_experts is None
    assert answer.tokens.tolist() == [5, 6, 7, 8]
    assert answer.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert answer.versions.tolist() == [3, 3, 4, 4]
    assert answer.routed_experts is not None
    assert answer.routed_experts.ravel().tolist() == list(range(6))
    assert (buffer.num_expert_rows, answer.stop, answer.seconds) == (6, StopReason.LENGTH, 1.5)


def test_reports_of_a_buffer_fill_another_one_exactly() -> None:
    source, target = TokenBuffer(), TokenBuffer()
    for token in range(5):
        source.append(token, -0.1 * token, 2)
        target.add(source.take_progress("a"))
    expected, answer = (buffer.complete("a", StopReason.STOP, 0.0) for buffer in (source, target))
    for name in ("tokens", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(answer, name), getattr(expected, name))


def test_a_stop_string_may_begin_in_tokens_that_another_replica_sampled() -> None:
    def decode(tokens: object) -> str:
        return "".join(map(chr, tokens))  # type: ignore[call-overload]

    prompt = np.array([ord(letter) for letter in "ab</to"], np.int32)
    one = replace(request(prompt), stop_strings=("</tool>",), sampled_before=4)
    limits = RequestLimits(256, 64, 64, decode)
    finder = limits.stop_finder(one)
    assert finder is not None
    assert finder.find([ord(letter) for letter in "ol>x"]) == 3
    # All of it in the prompt's own text is no stop string.
    of_prompt = limits.stop_finder(replace(one, sampled_before=0))
    assert of_prompt is not None
    assert of_prompt.find([ord(letter) for letter in "ol>x"]) is None
    assert limits.stop_finder(replace(one, stop_strings=())) is None


def test_a_continued_request_draws_other_numbers() -> None:
    one = request(Prompts().one(3), seed=11)
    assert engine_seed(one) == 11
    assert engine_seed(replace(one, sampled_before=1)) == (11 + 0x9E3779B97F4A7C15) % 2**63
