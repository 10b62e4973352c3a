"""Mathematical answers, compared by meaning with the math-verify library: 1/2 is 0.5 is \\frac{1}{2}."""

import signal
from collections.abc import Callable
from typing import TypeVar

from nemorl.config.environment import MathEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .scoring_process import ScoringProcess

# Processor time of one parse or one comparison, and of a complete call.
STEP_SECONDS = 3.0
SECONDS = 10.0
T = TypeVar("T")


class MathEnvironment(Environment):
    """One answer; the reward `math` is 1 when it equals the task's, else 0."""

    def __init__(self, scoring: ScoringProcess) -> None:
        self._scoring = scoring
        self._answer = ""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task without an answer."""
        if task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._answer = task.answer
        return task.messages

    async def step(self, action: Action) -> Step:
        return await self._scoring.step("math", verify_answer, self._answer, action.text)


class MathFactory(EnvironmentFactory):
    def __init__(self, config: MathEnvConfig) -> None:
        self.reward_weights = config.reward_weights
        self._scoring = ScoringProcess("math_verify", SECONDS)

    def create(self) -> MathEnvironment:
        return MathEnvironment(self._scoring)

    async def answer_in(self, text: str) -> str | None:
        """What the comparison finds in a text, in its simplest form: the same for 1/2 and 0.5."""
        return await self._scoring.call(found_answer, text)

    async def close(self) -> None:
        await self._scoring.close()


def found_answer(text: str) -> str | None:
    """The answer in a text as a canonical text; None if there is none. Needs the main thread (signals)."""
    from math_verify import parse
    from sympy import Basic, nsimplify  # type: ignore[import-untyped]

    if not (found := _step(parse, text, parsing_timeout=None)):
        return None
    if not isinstance(found[0], Basic):
        return str(found[-1])  # the text as it is
    try:
        return str(nsimplify(found[0], rational=True))
    except (TypeError, ValueError, AttributeError):  # neither a number nor a formula
        return str(found[0])


def verify_answer(expected: str, text: str) -> float:
    """1 if the answer found in `text` equals `expected`, else 0. Needs the main thread (signals).

    `expected` may be bare (`1/2`, `\\sqrt{2}`) or marked up as in a solution (`$\\frac{1}{2}$`).
    """
    from math_verify import parse, verify

    # A bare LaTeX answer is found only inside dollars; a number or a formula in plain text, without them.
    gold = _step(parse, expected, parsing_timeout=None) or _step(parse, f"${expected}$", parsing_timeout=None)
    answer = _step(parse, text, parsing_timeout=None)
    return float(bool(_step(verify, gold or [], answer or [], timeout_seconds=None)))


def _step(function: Callable[..., T], *arguments: object, **options: object) -> T | None:
    """Call math-verify; None after STEP_SECONDS of processor time (its own limits are of the clock)."""
    from math_verify import grader, parser
    from math_verify.errors import TimeoutException

    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True  # that its own limits are off

    def interrupt(*_: object) -> None:
        raise TimeoutException  # parse and verify catch it, and verify tries its next pair

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, STEP_SECONDS, STEP_SECONDS)
        return function(*arguments, **options)
    except TimeoutException:
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
