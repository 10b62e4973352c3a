import asyncio

import pytest

from nemorl.config.environment import CalculatorEnvConfig
from nemorl.config.facts import reward_weights
from nemorl.environments.calculator import (
    INSTRUCTIONS,
    ArithmeticRefused,
    CalculatorFactory,
    calculate,
    number_text,
)
from nemorl.trajectories import Message, Step, Task
from tests.environments.episodes import said, task


def play(given: Task, *turns: str, max_turns: int = 4, call_weight: float = 0.0) -> list[Step]:
    """The environment's answers to these turns."""

    async def main():
        config = CalculatorEnvConfig(name="calculator", max_turns=max_turns, call_weight=call_weight)
        environment = CalculatorFactory(config).create()
        await environment.reset(given)
        return [await environment.step(said(turn)) for turn in turns]

    return asyncio.run(main())


class TestConversation:
    def test_a_call_is_worked_out_and_the_answer_compared(self):
        call, answer = play(task("84"), "First <tool>12*(3+4)</tool>", "<answer> 84 </answer>")
        assert call == Step(messages=(Message("tool", "84"),), done=False)
        assert answer == Step(rewards={"calculator": 1.0}, done=True)

    def test_the_tool_is_explained_in_the_system_message(self):
        async def opening(given):
            return await CalculatorFactory(CalculatorEnvConfig(name="calculator")).create().reset(given)

        bare = asyncio.run(opening(task()))
        assert bare == (Message("system", INSTRUCTIONS), Message("user", "3+4?"))
        own = Task(0, (Message("system", "Be kind."), Message("user", "3+4?")), "7")
        system, user = asyncio.run(opening(own))
        assert system.content == f"Be kind.\n\n{INSTRUCTIONS}"
        assert user == own.messages[1]

    @pytest.mark.parametrize(
        ("answer", "reward"),
        [("7", 1.0), ("7.0", 1.0), ("8", 0.0), ("seven", 0.0), ("nan", 0.0), ("7.0000001", 0.0)],
    )
    def test_answers_are_compared_as_numbers(self, answer, reward):
        assert play(task("7"), f"<answer>{answer}</answer>")[0].rewards == {"calculator": reward}

    def test_answers_that_are_no_numbers_are_compared_as_texts(self):
        assert play(task("x + 1"), "<answer>x + 1</answer>")[0].rewards == {"calculator": 1.0}

    def test_a_turn_without_call_or_answer_ends_it_unpaid(self):
        assert play(task("7"), "It is 7.") == [Step(rewards={"calculator": 0.0})]

    def test_the_last_turn_may_answer_but_not_call(self):
        call = "<tool>3+4</tool>"
        assert [s.done for s in play(task("7"), call, call, max_turns=2)] == [False, True]
        steps = play(task("7"), call, "<answer>7</answer>", max_turns=2)
        assert steps[-1].rewards == {"calculator": 1.0}

    def test_a_refused_expression_is_answered_with_the_reason(self):
        (step,) = play(task("7"), "<tool>1/0</tool>")
        assert step.messages == (Message("tool", "error: division by zero"),)
        assert not step.done

    def test_calls_that_work_may_be_rewarded(self):
        turns = ("<tool>3+4</tool>", "<tool>1/0</tool>", "<answer>7</answer>")
        paid = [{"calculator_call": 1.0}, {"calculator_call": 0.0}, {"calculator": 1.0}]
        assert [step.rewards for step in play(task("7"), *turns, call_weight=0.2)] == paid
        config = CalculatorEnvConfig(name="calculator", weight=2.0, call_weight=0.2)
        weights = {"calculator": 2.0, "calculator_call": 0.2}
        assert CalculatorFactory(config).reward_weights == reward_weights(config, ()) == weights

    def test_a_task_without_an_answer_is_refused(self):
        with pytest.raises(ValueError, match="task 0 has no answer"):
            play(task(None))


class TestArithmetic:
    @pytest.mark.parametrize(
        ("expression", "shown"),
        [
            (" 12*(3+4) ", "84"),
            ("-7 // 2", "-4"),
            ("7 % 4", "3"),
            ("1/3", "0.333333333333"),
            ("6/3", "2"),
            ("2**10", "1024"),
            ("0.1+0.2", "0.3"),
            ("+3 - -4", "7"),
            ("10**49", "1" + "0" * 49),
        ],
    )
    def test_values(self, expression, shown):
        assert number_text(calculate(expression)) == shown

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("1/0", "division by zero"),
            ("0**-1", "division by zero"),
            ("9**9**9**9", "more than 50 digits"),
            ("10**50", "more than 50 digits"),
            ("0.1**-400", "more than 50 digits"),
            ("9" * 51, "more than 50 digits"),
            ("(-8)**0.5", "no real number"),
            ("1e999", "no real number"),
            ("__import__('os')", "only numbers"),
            ("a+1", "only numbers"),
            ("True+1", "only numbers"),
            ("'a'*9", "only numbers"),
            ("1<2", "only numbers"),
            ("3j", "only numbers"),
            ("2+", "not an expression"),
            ("", "not an expression"),
            ("1;2", "not an expression"),
            ("(" * 100 + "1" + ")" * 99, "not an expression"),
            ("1+" * 100 + "1", "longer than 200 characters"),
        ],
    )
    def test_refusals(self, expression, reason):
        with pytest.raises(ArithmeticRefused, match=reason):
            calculate(expression)
