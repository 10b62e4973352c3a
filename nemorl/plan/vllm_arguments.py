"""What vLLM's `AsyncEngineArgs` takes, read from its installed source: importing it takes 12 seconds."""

import ast
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nemorl.errors import Violation

_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}


def argument_violations(given: Mapping[str, object]) -> Iterator[Violation]:
    """What of `generation.vllm_kwargs` the installed vLLM does not know, or takes in another type."""
    known = engine_arguments()
    for name, value in given.items() if known else ():
        field = f"generation.vllm_kwargs.{name}"
        if name not in known:
            near = get_close_matches(name, known, 1)
            mend = "the installed vLLM's AsyncEngineArgs have no such argument"
            yield Violation(field, value, mend + (f"; did you mean {near[0]}?" if near else ": leave it out"))
        elif not _fits(value, known[name]):
            yield Violation(field, value, f"vLLM wants {ast.unparse(known[name])} here")


@cache
def engine_arguments() -> Mapping[str, ast.expr]:
    """Names and annotations; none where vLLM is not installed."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    source = Path(package.origin).with_name("engine") / "arg_utils.py"
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):  # of a version that is laid out otherwise
        return {}
    return {
        field.target.id: field.annotation
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _fits(value: object, wanted: ast.expr) -> bool:
    """Whether a value may be of an annotated type; what is no plain type is left to vLLM."""
    match wanted:
        case ast.BinOp(left, ast.BitOr(), right):
            return _fits(value, left) or _fits(value, right)
        case ast.Constant(None):
            return value is None
        case ast.Subscript(ast.Name("Literal"), ast.Tuple(choices)):
            return value in [choice.value for choice in choices if isinstance(choice, ast.Constant)]
        case ast.Subscript(ast.Name(name)) | ast.Name(name) if name in _KINDS:
            return isinstance(value, _KINDS[name]) and (name == "bool" or not isinstance(value, bool))
    return True
