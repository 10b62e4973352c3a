"""Several turns with a tool: the policy may use a calculator before it answers.

    policy   <tool>12*(3+4)</tool>
    tool     84
    policy   <answer>84</answer>

A turn holds either a call or an answer. The answer ends the conversation and is compared with the task's; a
turn with neither, and the last turn allowed, end it without one. The reward `calculator` is 1 or 0; where
`call_weight` is not 0, `calculator_call` is 1 for each turn whose call is a valid expression.
"""

import ast
import math
import operator
from collections.abc import Callable

from nemorl.config.environment import CalculatorEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .tags import last_tagged

INSTRUCTIONS = (
    "You can use a calculator: write an expression such as <tool>12*(3+4)</tool> and stop; its result comes "
    "as the next message. When you know the answer, write it as <answer>84</answer>."
)
REWARD = "calculator"
CALL_REWARD = "calculator_call"


class CalculatorEnvironment(Environment):
    def __init__(self, config: CalculatorEnvConfig) -> None:
        self._turns_left = config.max_turns
        self._rewards_calls = config.call_weight != 0
        self._answer = ""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The opening, with the calculator explained. Raises ValueError for a task without an answer."""
        if task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._answer = task.answer
        first, *rest = task.messages
        if first.role == "system":
            return (Message("system", f"{first.content}\n\n{INSTRUCTIONS}"), *rest)
        return (Message("system", INSTRUCTIONS), *task.messages)

    async def step(self, action: Action) -> Step:
        self._turns_left -= 1
        if (answer := last_tagged(action.text, "answer")) is not None:
            return Step(rewards={REWARD: float(same_answer(answer, self._answer))})
        call = last_tagged(action.text, "tool")
        if call is None or self._turns_left == 0:
            return Step(rewards={REWARD: 0.0})
        try:
            result, is_valid = number_text(calculate(call)), True
        except ArithmeticRefused as refusal:
            result, is_valid = f"error: {refusal}", False
        rewards = {CALL_REWARD: float(is_valid)} if self._rewards_calls else {}
        return Step(messages=(Message("tool", result),), rewards=rewards, done=False)


class CalculatorFactory(EnvironmentFactory):
    def __init__(self, config: CalculatorEnvConfig) -> None:
        self._config, self.reward_weights = config, config.reward_weights

    def create(self) -> CalculatorEnvironment:
        return CalculatorEnvironment(self._config)

    async def answer_in(self, text: str) -> str | None:
        """The text in the tag; numbers as the calculator writes them."""
        answer = last_tagged(text, "answer")
        try:
            return answer if answer is None else str(float(answer))
        except ValueError:
            return answer


def same_answer(answer: str, expected: str) -> bool:
    """The same number (`84`, `84.0`, `8.4e1`) within a millionth of a millionth, or the same text."""
    try:
        difference = abs(float(answer) - float(expected))
    except ValueError:
        return answer == expected.strip()
    return difference <= 1e-12 * max(1.0, abs(float(expected)))


# Arithmetic from untrusted text: the keys of a calculator and no more.

Number = int | float

MAX_CHARACTERS = 200
MAX_DIGITS = 50  # of any number on the way
TOO_LARGE = f"more than {MAX_DIGITS} digits"
NOT_ARITHMETIC = "only numbers and + - * / // % ** ( ) are understood"

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ArithmeticRefused(ValueError):
    """An expression that is not evaluated; the message says why, in words for the one who wrote it."""


def calculate(expression: str) -> Number:
    """The value of an expression of numbers, `+ - * / // % **` and brackets. Raises ArithmeticRefused."""
    if len(expression) > MAX_CHARACTERS:
        raise ArithmeticRefused(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The last two are how the parser answers brackets nested too deep.
        raise ArithmeticRefused("not an expression") from None
    try:
        return _value(tree)
    except ZeroDivisionError:
        raise ArithmeticRefused("division by zero") from None
    except OverflowError:
        raise ArithmeticRefused(TOO_LARGE) from None


def number_text(value: Number) -> str:
    """The number as a calculator shows it: whole numbers in full, others with twelve significant digits."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.12g}"
    return str(int(value))


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool()):
            raise ArithmeticRefused(NOT_ARITHMETIC)
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            # Refused before it is computed: its size grows with the exponent, not with the text.
            if isinstance(op, ast.Pow) and a and b * math.log10(abs(a)) > MAX_DIGITS:
                raise ArithmeticRefused(TOO_LARGE)
            return _bounded(_BINARY[type(op)](a, b))
    raise ArithmeticRefused(NOT_ARITHMETIC)


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or not math.isfinite(number):
        raise ArithmeticRefused("no real number")
    if abs(number) >= 10**MAX_DIGITS:
        raise ArithmeticRefused(TOO_LARGE)
    return number
