"""Several turns with a tool: the policy may use a calculator before it answers.

    policy   <tool>12*(3+4)</tool>
    tool     84
    policy   <answer>84</answer>

A turn holds either a call or an answer. The answer ends the conversation and is compared with the task's; a
turn with neither, and the last turn allowed, end it without one. The reward `calculator` is 1 or 0; where
`call_weight` is not 0, `calculator_call` is 1 for each turn whose call is a valid expression.
"""

from nemorl.config.environment import CalculatorEnvConfig
from nemorl.trajectories import Action, Message, Step, Task

from .arithmetic import ArithmeticRefused, calculate, number_text
from .tags import last_tagged

INSTRUCTIONS = (
    "You can use a calculator: write an expression such as <tool>12*(3+4)</tool> and stop; its result comes "
    "as the next message. When you know the answer, write it as <answer>84</answer>."
)
REWARD = "calculator"
CALL_REWARD = "calculator_call"
REFUSED = "error: "


class CalculatorEnvironment:
    """One conversation with the calculator at hand."""

    def __init__(self, max_turns: int, *, rewards_calls: bool = False) -> None:
        self._turns_left = max_turns
        self._rewards_calls = rewards_calls
        self._answer = ""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's opening, with the calculator explained in the system message.

        Raises ValueError for a task without an answer.
        """
        if task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._answer = task.answer
        first, *rest = task.messages
        if first.role == "system":
            return (Message("system", f"{first.content}\n\n{INSTRUCTIONS}"), *rest)
        return (Message("system", INSTRUCTIONS), *task.messages)

    async def step(self, action: Action) -> Step:
        """Compare an answer, or work out a call."""
        self._turns_left -= 1
        answer = last_tagged(action.text, "answer")
        if answer is not None:
            return Step(rewards={REWARD: float(_equal(answer, self._answer))})
        call = last_tagged(action.text, "tool")
        if call is None or self._turns_left == 0:
            return Step(rewards={REWARD: 0.0})
        result = _result(call)
        worked = not result.startswith(REFUSED)
        rewards = {CALL_REWARD: float(worked)} if self._rewards_calls else {}
        return Step(messages=(Message("tool", result),), rewards=rewards, done=False)

    async def close(self) -> None:
        """Nothing is held."""


class CalculatorFactory:
    """Makes `CalculatorEnvironment`s."""

    def __init__(self, config: CalculatorEnvConfig) -> None:
        self._rewards_calls = config.call_weight != 0
        self.reward_weights = config.reward_weights
        self._max_turns = config.max_turns

    def create(self) -> CalculatorEnvironment:
        """An environment for one trajectory."""
        return CalculatorEnvironment(self._max_turns, rewards_calls=self._rewards_calls)

    async def answer_in(self, text: str) -> str | None:
        """The text in the tag; numbers as the calculator writes them."""
        answer = last_tagged(text, "answer")
        try:
            return answer if answer is None else str(float(answer))
        except ValueError:
            return answer

    async def close(self) -> None:
        """Nothing is shared."""


def _result(expression: str) -> str:
    try:
        return number_text(calculate(expression))
    except ArithmeticRefused as refusal:
        return f"{REFUSED}{refusal}"


def _equal(answer: str, expected: str) -> bool:
    """The same number (`84`, `84.0`, `8.4e1`) within a millionth of a millionth, or the same text."""
    try:
        difference = abs(float(answer) - float(expected))
    except ValueError:
        return answer == expected.strip()
    return difference <= 1e-12 * max(1.0, abs(float(expected)))
