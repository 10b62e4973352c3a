import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemorl.config.environment import MathEnvConfig
from nemorl.environments.math_answers import (
    MathFactory,
    compare_texts,
    found_answer,
    stated_answer,
    verify_answer,
)
from tests.environments.episodes import answer, task

CASES = [
    ("1/2", "It is \\boxed{\\frac{1}{2}}.", 1.0),
    ("1/2", "0.5", 1.0),
    ("$\\frac{1}{2}$", "the answer is $0.5$", 1.0),
    ("\\sqrt{8}", "$2\\sqrt{2}$", 1.0),
    ("7", "3+4 makes 7", 1.0),
    ("7", "8", 0.0),
    ("7", "I do not know", 0.0),
    ("7", "", 0.0),
    ("7", "$9^{9^{9^{9^{9}}}}$", 0.0),  # holds the interpreter for ever where it is evaluated
]


def test_answers_are_compared_by_what_they_mean():
    # From an event loop in a thread, as in a rollout worker: signals do not work there.
    async def main():
        factory = MathFactory(MathEnvConfig(name="math", weight=2.0))
        assert factory.reward_weights == {"math": 2.0}
        try:
            steps = [await answer(factory, task(expected), text) for expected, text, _ in CASES]
            with pytest.raises(ValueError, match="task 0 has no answer"):
                await factory.create().reset(task(None))
        finally:
            await factory.close()
        return steps

    async def in_a_thread():
        return await asyncio.to_thread(asyncio.run, main())

    steps = asyncio.run(in_a_thread())
    assert all(step.done for step in steps)
    assert [step.rewards["math"] for step in steps] == [expected for _, _, expected in CASES]


def test_a_machine_that_computes_nothing_for_a_while_changes_no_reward():
    """Stopped for longer than a step may compute, a comparison still finds the answers equal."""
    code = (
        "import math_verify\n"
        "from nemorl.environments.math_answers import verify_answer\n"
        "print('ready', flush=True)\n"
        "print(verify_answer('1/2', 'It is $\\\\frac{1}{2}$.'))\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "1.0\n"


def test_a_step_is_limited_by_processor_time(monkeypatch):
    def spins(*_, **__):
        while True:
            pass

    assert verify_answer("1", "1") == 1.0  # the first call imports and compiles
    monkeypatch.setattr("nemorl.environments.math_answers.STEP_SECONDS", 0.05)
    monkeypatch.setattr("math_verify.verify", spins)
    assert verify_answer("1", "1") == 0.0
    monkeypatch.setattr("math_verify.parse", spins)
    assert found_answer("1") is None


# What a model says, what the task expects, and the reward, by the rules of the appendix of Minerva.
TEXTS = [
    ("It is 12.\nAnswer: 34", "34", 1.0),
    ("Answer: 34", "$34$", 1.0),
    ("ANSWER : $34$ ", "34", 1.0),
    ("Answer: 34\nAnswer: 35", "34", 0.0),  # the last one counts
    ("\\boxed{34}", "34", 0.0),  # none is stated
    ("Answer: \\boxed{34}", "34", 1.0),
    ("Answer: $x = 5$", "5", 1.0),
    ("Answer: 1,234", "1234", 1.0),
    ("Answer: 1,2", "1,2", 1.0),
    ("Answer: 0.5", "\\frac{1}{2}", 0.0),  # texts, and not what they mean
    ("Answer: \\frac12", "\\frac{1}{2}", 1.0),
    ("Answer: $\\sqrt2$", "\\sqrt{2}", 1.0),
    ("Answer: 12 \\text{ cm}", "12", 1.0),
    ("Answer: 12 cm", "12", 1.0),
    ("Answer: 90^\\circ", "90", 1.0),
    ("Answer: \\text{east}", "east", 1.0),
    ("Answer: an apple", "apple", 1.0),
    ("Answer: 7" + " " * 400, "7", 0.0),  # not within the last 300 characters
    ("", "7", 0.0),
]


@pytest.mark.parametrize(("said", "expected", "reward"), TEXTS)
def test_answers_are_compared_as_normalized_texts(said: str, expected: str, reward: float) -> None:
    assert compare_texts(expected, said) == reward


def test_the_environment_compares_texts_where_it_is_asked_to() -> None:
    async def rewards() -> tuple[list[float], str | None]:
        factory = MathFactory(MathEnvConfig(name="math", comparison="text"))
        said = ("Answer: \\frac12", "It is 0.5")
        found = [(await answer(factory, task("\\frac{1}{2}"), text)).rewards["math"] for text in said]
        found_in = await factory.answer_in(said[0])
        await factory.close()
        return found, found_in

    assert asyncio.run(rewards()) == ([1.0, 0.0], "\\frac{1}{2}")
    assert stated_answer("nothing") is None
