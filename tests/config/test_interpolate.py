from typing import Any

import pytest

from nemorl.config.yaml import interpolate, parse_document
from nemorl.errors import Problem


def resolved(text: str) -> dict[str, Any]:
    document, problems = interpolate(parse_document(text, "x.yaml"))
    assert problems == []
    return document.tree


def refused(text: str) -> list[Problem]:
    return interpolate(parse_document(text, "x.yaml"))[1]


def test_a_whole_value_keeps_its_type() -> None:
    tree = resolved("a: {b: 64, c: [1, 2]}\nd: ${a.b}\ne: ${a.c}\nf: ${a}\ng: ${ a.c.1 }\n")

    assert (tree["d"], tree["e"], tree["f"], tree["g"]) == (64, [1, 2], {"b": 64, "c": [1, 2]}, 2)


@pytest.mark.parametrize(("value", "text"), [("64", "64"), ("1e-3", "0.001"), ("true", "true"), ("x", "x")])
def test_inside_a_text_it_becomes_text(value: str, text: str) -> None:
    assert resolved(f"a: {value}\nb: runs/${{a}}-${{a}}/z\n")["b"] == f"runs/{text}-{text}/z"


def test_references_lead_to_references() -> None:
    assert resolved("a: ${b}\nb: [x, '${c}']\nc: 3\n")["a"] == ["x", 3]


def test_two_dollars_write_the_braces_themselves() -> None:
    assert resolved("a: 'costs $${a} and $5'\n")["a"] == "costs ${a} and $5"


def test_an_unknown_reference_is_named_where_it_stands() -> None:
    (problem,) = refused("seed: 1\npolicy:\n  precision: ${polcy.dtype}\n")

    assert (problem.field, problem.value) == ("policy.precision", "${polcy.dtype}")
    assert problem.origin == "x.yaml:3"
    assert "`${polcy.dtype}` names nothing" in problem.fix


def test_a_circle_is_named_at_each_of_its_places() -> None:
    problems = refused("a: ${b}\nb: ${c}\nc: ${a}\n")

    assert [problem.field for problem in problems] == ["a", "b", "c"]
    assert "${b} -> ${c} -> ${a} -> ${b}" in problems[0].fix


@pytest.mark.parametrize("inner", ["{x: 1}", "[1]", "null"])
def test_a_section_cannot_stand_inside_a_text(inner: str) -> None:
    (problem,) = refused(f"a: {inner}\nb: runs/${{a}}\n")

    assert problem.fix == "`${a}` is no single value, so it cannot stand inside a text"


def test_an_empty_reference_is_unknown() -> None:
    assert "names nothing" in refused("a: ${}\n")[0].fix
