"""Arithmetic from untrusted text: what a calculator's keys can do, and no more."""

import ast
import math
import operator
from collections.abc import Callable

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
            if isinstance(op, ast.Pow):
                _check_power(a, b)
            return _bounded(_BINARY[type(op)](a, b))
    raise ArithmeticRefused(NOT_ARITHMETIC)


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a power before it is computed: its size grows with the exponent, not with the text."""
    if base and exponent * math.log10(abs(base)) > MAX_DIGITS:
        raise ArithmeticRefused(TOO_LARGE)


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or not math.isfinite(number):
        raise ArithmeticRefused("no real number")
    if abs(number) >= 10**MAX_DIGITS:
        raise ArithmeticRefused(TOO_LARGE)
    return number
