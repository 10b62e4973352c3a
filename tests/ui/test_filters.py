"""Filters leave the rows that Python's own evaluation leaves, and wrong ones name what is wrong and where."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemorl.ui.filters import FilterError, Kind, parse_filter

TEXTS = ["stop", "length", "error"]


class Columns:
    """A table of named columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self.kinds: dict[str, Kind] = {
            "reward": "number",
            "rewards.format": "number",
            "rewards.my-part": "number",
            "rewards.two words": "number",
            "step": "number",
            "stop": "text",
            "player": "text",
            "failed": "boolean",
        }
        self.texts = {"stop": TEXTS, "player": ["", "stop"]}

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> NDArray[Any]:
        if name in self.texts:
            return np.array([self.texts[name].index(row[name]) for row in self.rows], np.uint16)
        dtype = {"step": np.int32, "failed": np.bool_}.get(name, np.float32)
        return np.array([row[name] for row in self.rows], dtype)


def row(**changes: object) -> dict[str, object]:
    of_rewards = {"rewards.format": 1.0, "rewards.my-part": 0.5, "rewards.two words": float("nan")}
    return {"reward": 0.1, "step": 3, "stop": "stop", "player": "", "failed": False, **of_rewards, **changes}


ROWS = Columns(
    [
        row(),
        row(reward=-1.0, stop="length"),
        row(reward=-0.5, stop="length", **{"rewards.format": 0.0}),
        row(step=7, stop="error", failed=True, reward=float("nan")),
        row(step=8, player="stop"),
    ]
)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", [0, 1, 2, 3, 4]),
        ('reward < 0 and stop == "length" and rewards.format == 1', [1]),
        ("reward == 0.1", [0, 4]),  # written as float32
        ("reward == reward", [0, 1, 2, 4]),  # known ones
        ("not failed and step >= 8", [4]),
        ("failed", [3]),
        ("failed == false and not (step < 8)", [4]),
        ("stop in ('length', 'error')", [1, 2, 3]),
        ('step not in [3, 7] or stop == "error"', [3, 4]),
        ("-1 <= reward < 0", [1, 2]),
        ("3 < step < 8", [3]),
        ("rewards.my-part == 0.5 and step == 7", [3]),
        ('rewards["two words"] == rewards["two words"]', []),
        ("stop == player", [4]),
        ('"length" != stop', [0, 3, 4]),
        ("step < 99999999999999999999", [0, 1, 2, 3, 4]),
        ("reward < 1e300", [0, 1, 2, 4]),
        ("true or failed", [0, 1, 2, 3, 4]),
        ("step in ()", []),
    ],
)
def test_rows_that_a_filter_leaves(text: str, left: list[int]) -> None:
    assert np.flatnonzero(parse_filter(text, ROWS).mask(ROWS)).tolist() == left


@pytest.mark.parametrize(
    ("text", "problem", "wrong", "fix"),
    [
        ("rewrd < 0", "no column rewrd", "rewrd", "did you mean `reward`?"),
        ("step == 1 and rewards.fromat == 1", "no column rewards.fromat", "rewards.fromat", "rewards.format"),
        ("reward < ", "expected a column, a number, a text, not or (, found the end", "", ""),
        ("reward = 0", "= is no part of a filter", "=", "write =="),
        ("failed && step > 1", "&& is no part of a filter", "&&", "write and"),
        ('stop == "length', "the text has no end", '"length', 'close it with "'),
        (
            "stop == 3",
            "stop (a text) is compared with 3 (a number)",
            "stop == 3",
            'write, for example, stop == "…"',
        ),
        ("reward == 'a'", "reward (a number) is compared with 'a' (a text)", "reward == 'a'", "reward == 0"),
        ('stop < "a"', "< is for numbers, and stop (a text) is compared", "<", "use == or !="),
        (
            "reward and failed",
            "reward (a number) is no condition",
            "reward",
            "write, for example, reward == 0",
        ),
        ("(reward < 0", "expected ) for the ( of column 1, found the end", "", ""),
        ("reward < 0 stop", "expected and, or, or the end, found stop", "stop", ""),
        ("stop in 'a'", '( and constants, such as ("stop")', "'a'", ""),
        ("stop in ('a', 3)", "3 (a number) is compared with stop (a text)", "3", ""),
        ("reward < 0 $", "$ is no part of a filter", "$", "remove it"),
        ("(" * 60 + "failed", "more than 50 levels", "(", "simplify"),
        ("not " * 60 + "failed", "more than 50 levels", "not", "simplify"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, problem: str, wrong: str, fix: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(text, ROWS)
    error = caught.value
    assert problem in error.message
    assert text[error.start : error.end] == wrong
    assert fix in error.fix


def test_a_text_that_no_row_has_is_remarked() -> None:
    parsed = parse_filter('stop == "lenght"', ROWS)
    assert parsed.remarks == ("no row has stop 'lenght'; did you mean `length`?",)
    assert not parsed.mask(ROWS).any()


NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([0.1, -0.5, 1.5, 0.25]),
)
VALUES = st.sampled_from([0.1, -0.5, 0.0, 1.0, float("nan"), float("inf")])
ROW = st.fixed_dictionaries(
    {
        "reward": VALUES,
        "rewards.format": VALUES,
        "rewards.my-part": VALUES,
        "rewards.two words": VALUES,
        "step": st.integers(-3, 9),
        "stop": st.sampled_from(TEXTS),
        "player": st.sampled_from(["", "stop"]),
        "failed": st.booleans(),
    }
)
NAMES = {
    "reward": 'row["reward"]',
    "rewards.format": 'row["rewards.format"]',
    'rewards["two words"]': 'row["rewards.two words"]',
    "step": 'row["step"]',
}
# Each part as written in a filter, and as Python. Constants have the precision of the column that they meet.
NUMERIC = st.sampled_from(sorted(NAMES.items()))
OPERATOR = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


@st.composite
def conditions(draw: st.DrawFn) -> tuple[str, str]:
    kind = draw(st.sampled_from(["number", "columns", "chain", "text", "in", "boolean"]))
    (name, python), operator = draw(NUMERIC), draw(OPERATOR)
    value = draw(NUMBERS)
    constant = f"as_in({python}, {value!r})"
    if kind == "number":
        return f"{name} {operator} {value!r}", f"{python} {operator} {constant}"
    if kind == "columns":
        other, of_other = draw(NUMERIC)
        return f"{name}{operator}{other}", f"{python} {operator} {of_other}"
    if kind == "chain":
        return f"{value!r} <= {name} {operator} step", f'({constant} <= {python} {operator} row["step"])'
    text = draw(st.sampled_from([*TEXTS, "none"]))
    sign, negated = draw(st.sampled_from(["==", "!="])), draw(st.sampled_from(["in", "not in"]))
    if kind == "text":
        return f'stop {sign} "{text}"', f'row["stop"] {sign} {text!r}'
    if kind == "in":
        among = draw(st.lists(st.sampled_from([*TEXTS, "none"]), max_size=3))
        listed = ", ".join(map(repr, among))
        return f"stop {negated} [{listed}]", f'row["stop"] {negated} [{listed}]'
    return "failed", 'row["failed"]'


def combined(parts: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    joined = st.tuples(parts, st.sampled_from([" and ", " or "]), parts)
    return st.one_of(
        joined.map(lambda of: (of[0][0] + of[1] + of[2][0], of[0][1] + of[1] + of[2][1])),
        parts.map(lambda of: (f"not ({of[0]})", f"not ({of[1]})")),
        parts.map(lambda of: (f"( {of[0]})", f"({of[1]})")),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(conditions(), combined, max_leaves=6), st.lists(ROW, min_size=1, max_size=8))
def test_filters_are_python_conditions(parts: tuple[str, str], rows: list[dict[str, Any]]) -> None:
    text, python = parts
    table = Columns(rows)
    exact = [
        {key: np.float32(value) if isinstance(value, float) else value for key, value in each.items()}
        for each in rows
    ]

    def as_in(value: object, constant: float) -> object:
        return np.float32(constant) if isinstance(value, np.float32) else constant

    expected = [bool(eval(python, {"row": each, "as_in": as_in})) for each in exact]
    assert parse_filter(text, table).mask(table).tolist() == expected


@given(st.text(alphabet="rewad<>=!()[]\"' 01.,andorti&\\", max_size=30))
def test_any_text_is_a_filter_or_an_error_with_a_place(text: str) -> None:
    places = [0]
    try:
        parse_filter(text, ROWS).mask(ROWS)
    except FilterError as error:
        places.append(error.start)
    assert 0 <= max(places) <= len(text)
