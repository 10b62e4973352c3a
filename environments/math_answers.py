"""Mathematical answers, compared by what they mean, or by a normalized text.

By meaning, with the math-verify library, 1/2 is 0.5 is \\frac{1}{2}. As normalized texts, 1/2 and 0.5 differ,
`\\frac12` and `$\\frac{1}{2}$` do not.
"""

import re
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

    def __init__(self, scoring: ScoringProcess | None) -> None:
        """Compare texts without a process for scoring."""
        self._scoring = scoring
        self._answer = ""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task without an answer."""
        if task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._answer = task.answer
        return task.messages

    async def step(self, action: Action) -> Step:
        if self._scoring is None:
            return Step(rewards={"math": compare_texts(self._answer, action.text)})
        return await self._scoring.step("math", verify_answer, self._answer, action.text)


class MathFactory(EnvironmentFactory):
    def __init__(self, config: MathEnvConfig) -> None:
        self.reward_weights = config.reward_weights
        by_meaning = config.comparison == "math_verify"
        self._scoring = ScoringProcess("math_verify", SECONDS) if by_meaning else None

    def create(self) -> MathEnvironment:
        return MathEnvironment(self._scoring)

    async def answer_in(self, text: str) -> str | None:
        """What the comparison finds in a text, in its simplest form: by meaning the same for 1/2 and 0.5."""
        if self._scoring is None:
            return stated_answer(text)
        return await self._scoring.call(found_answer, text)

    async def close(self) -> None:
        if self._scoring is not None:
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


_END = 300  # characters of an answer in which the final one is searched
_STATED = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# Of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1), in this order.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;"),
    *(",\\!", "{,}", '"', "\\dots"),
)
_BOXES = tuple(re.compile(rf"\\{name}{{(.*?)}}") for name in ("text", "textbf", "overline"))
_BOXED = re.compile(r"\\boxed{(.*)}")


def compare_texts(expected: str, text: str) -> float:
    """1 if the final answer that `text` states is the expected one, both normalized, else 0."""
    return float(stated_answer(text) == _normalized(expected))


def stated_answer(text: str) -> str | None:
    """What follows the last `Answer:` near the end of a text, normalized; None if there is none."""
    stated = _STATED.findall(text[-_END:])
    return _normalized(stated[-1]) if stated else None


def _normalized(answer: str) -> str:
    """Right of the last `=`, without spaces, units, dollars and boxes; fractions and roots have braces."""
    result = answer.rpartition("=")[2]
    for old, new in (*_REPLACED, *((one, "") for one in _REMOVED)):
        result = result.replace(old, new)
    if len(parts := result.split("$", 2)) == 3:
        result = f"${parts[1]}$"
    for box in (*_BOXES, _BOXED):
        result = box.sub(r"\1", result)
    result = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", result)  # \frac12
    result = re.sub(r"sqrt([^{])", r"sqrt{\1}", result)  # \sqrt2
    result = result.replace("$", "")
    without_commas = result.replace(",", "")
    return (without_commas if without_commas.isdigit() else result).strip()
