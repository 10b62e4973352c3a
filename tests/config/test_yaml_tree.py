from typing import Any

import pytest

from nemorl.config.yaml import parse_document, parse_value
from nemorl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),  # a text in YAML 1.1, without a dot
        ("1E+3", 1000.0),
        ("-.5", -0.5),
        ("3", 3),
        ("010", 10),  # 8 in YAML 1.1
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("1_000", "1_000"),
        ("true", True),
        ("no", "no"),  # false in YAML 1.1
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-01-02", "2026-01-02"),  # a date in YAML 1.1
        ("'5'", "5"),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = parse_value(text, "command line", ())

    assert read == value
    assert type(read) is type(value)


def test_every_value_has_its_line() -> None:
    document = parse_document(
        "policy:\n  layout:\n    tensor_parallel_size: 2\nrewards:\n  - function: f\n", "x.yaml"
    )

    assert document.origins["policy", "layout", "tensor_parallel_size"] == "x.yaml:3"
    assert document.origins["rewards", 0, "function"] == "x.yaml:5"


@pytest.mark.parametrize(
    ("text", "origin", "fix"),
    [
        ("a: 1\nb:\n\tc: 2\n", "x.yaml:3", "YAML does not allow tabs here; indent with spaces"),
        ("a: 1\n b: 2\n", "x.yaml:2", "a wrong indent"),
        ("a: b: c\n", "x.yaml:1", "put the value into quotes"),
        ("a: [1, 2\nb: 3\n", "x.yaml:2", "expected ',' or ']'"),
        ("a: *base\n", "x.yaml:1", "found undefined alias 'base'"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2", "another document"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "x.yaml:4", "duplicate key, first defined at x.yaml:3; remove one"),
        ("1: a\n", "x.yaml:1", "put the key into quotes"),
        (
            "a: !!python/object:os.system x\n",
            "x.yaml:1",
            "invalid value: could not determine a constructor for the tag",
        ),
        ("a: &x\n  - *x\n", "x.yaml:1", "an alias is inside its own value; write the value out"),
        ("- 1\n", "x.yaml:1", "expected sections such as `policy:` at the top level"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, origin: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_document(text, "x.yaml")

    (problem,) = refused.value.problems
    assert fix in problem.fix
    assert problem.origin == origin


def test_a_repeated_alias_is_fine() -> None:
    document = parse_document("a: &x {b: 1}\nc: *x\nd: *x\n", "x.yaml")

    assert document.tree == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1}}


def test_an_empty_file_is_an_empty_document() -> None:
    assert parse_document("# nothing yet\n", "x.yaml").tree == {}
