"""Edits of experiment files against edits of their trees, over all shipped configs and forms of YAML."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemorl.config.yaml import FieldPath, parse_document
from nemorl.errors import ConfigError
from nemorl.ui.yaml_edit import EditError, append, edit, remove, set_value

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
# Forms that the shipped files do not have.
FORMS = """\
# head
run_dir: "runs/x"   # quoted

policy:   # why
  # about the path
  model_path: 'models/a'
  layout: {tensor_parallel_size: 2,   # two
           data_parallel_size: 1}
  tokenizer:
  optimizer:
      name: adam
      # deep
      lr: 1e-6
rewards:
- function: exact_match  # first
  weight: 1
# between
- kind: judge
  prompt: |
    Rate {completion}

    from 0 to 10.

  url: http://x/v1
- {function: format_tags, weight: 0.5}
data:
  train: &tasks {name: tasks, path: a.jsonl}
  validation: *tasks
  shards:
    - - a
      - b
    -
      name: c
env:
  name: tools
  tools: [a.b:c, d.e:f]
  text: >+
    folded

algorithm: {}
# tail"""


def read(text: str) -> dict[str, Any]:
    return parse_document(text, "text").tree


def paths(value: Any, path: FieldPath = ()) -> list[FieldPath]:
    members = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(members, dict):
        return []
    return [p for key, below in members.items() for p in ((*path, key), *paths(below, (*path, key)))]


def at(tree: Any, path: FieldPath) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def own_lines(text: str, path: FieldPath) -> range:
    """Lines of a value, by the origins of all values in it and of the next value behind it."""
    given = {p: int(o.rpartition(":")[2]) for p, o in parse_document(text, "t").origins.items()}
    # What an alias repeats is where the alias is.
    origins = {p: max(given[p[:size]] for size in range(1, len(p) + 1)) for p in given}
    inside = [line for p, line in origins.items() if p[: len(path)] == path]
    later = [line for line in origins.values() if line > max(inside)]
    return range(min(inside) - 1, (min(later) if later else text.count("\n") + 2) - 1)


TEXTS = [FORMS, *(file.read_text(encoding="utf-8") for file in CONFIGS)]
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
    st.sampled_from(
        ["1e-6", "no", "null", "a: b", "x #y", "- a", "{", "010", "1_000", "~", "a\nb", "'", '"', "é"]
    ),
)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
).filter(lambda value: "${" not in str(value))


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, FieldPath, Any]:
    text = draw(st.sampled_from(TEXTS))
    path = draw(st.sampled_from(paths(read(text))))
    return text, path, draw(values)


@settings(max_examples=120, deadline=None)
@given(edits())
@example((FORMS, ("data", "validation", "name"), None))
def test_set_changes_one_value_and_its_lines_only(case: tuple[str, FieldPath, Any]) -> None:
    text, path, value = case
    expected = deepcopy(read(text))
    at(expected, path[:-1])[path[-1]] = value
    try:
        new = set_value(text, path, value)
    except EditError as error:
        assert "repeats it as *tasks" in str(error)  # noqa: PT017
        return
    assert read(new) == expected
    old, lines = own_lines(text, path), text.splitlines()
    assert new.splitlines()[: old.start] == lines[: old.start]
    after = lines[old.stop :]
    assert new.splitlines()[len(new.splitlines()) - len(after) :] == after
    assert comments(text, old) <= comments(new)


def replaced(text: str, other: str) -> list[str]:
    """The lines of a text between those that it begins and ends with as another text does."""
    lines, others = text.splitlines(), other.splitlines()
    while lines and others and lines[0] == others[0]:
        del lines[0], others[0]
    while lines and others and lines[-1] == others[-1]:
        del lines[-1], others[-1]
    return lines


def comments(text: str, without: range = range(0)) -> set[str]:
    """Whole lines that are comments."""
    lines = (line for number, line in enumerate(text.splitlines()) if number not in without)
    return {line for line in lines if line.lstrip().startswith("#")}


@settings(max_examples=120, deadline=None)
@given(edits(), keys)
def test_a_new_key_adds_lines_and_changes_none(case: tuple[str, FieldPath, Any], key: str) -> None:
    text, path, value = case
    tree = read(text)
    section = at(tree, path)
    if not isinstance(section, dict) or key in section or "repeats" in refused(text, (*path, key), value):
        return
    expected = deepcopy(tree)
    at(expected, path)[key] = value
    new = set_value(text, (*path, key), value)
    assert read(new) == expected
    assert comments(text) <= comments(new)
    # At most the line of a section that is written in one line, or has no field yet.
    assert len(replaced(text, new)) <= 1 or text == FORMS


def refused(text: str, path: FieldPath, value: Any) -> str:
    try:
        set_value(text, path, value)
    except EditError as error:
        return str(error)
    return ""


@settings(max_examples=120, deadline=None)
@given(edits())
def test_remove_takes_the_lines_of_one_value(case: tuple[str, FieldPath, Any]) -> None:
    text, path, _ = case
    expected = deepcopy(read(text))
    while len(path) > 1 and isinstance(path[-2], str) and len(at(expected, path[:-1])) == 1:
        if isinstance(at(expected, path[:-1]), list):
            break
        path = path[:-1]
    del at(expected, path[:-1])[path[-1]]
    try:
        new = remove(text, path)
    except EditError as error:
        assert "repeats it as *tasks" in str(error)  # noqa: PT017
        return
    assert read(new) == expected
    assert comments(text, own_lines(text, path)) <= comments(new)
    # At most a line that keeps other values, such as that of a section in one line; an alias is written out.
    assert len(replaced(new, text)) <= 1 + (path[:2] == ("data", "validation"))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_append(text: str, data: st.DataObject) -> None:
    tree = read(text)
    lists = [path for path in paths(tree) if isinstance(at(tree, path), list)]
    if not lists:
        return
    path, value = data.draw(st.sampled_from(lists)), data.draw(values)
    expected = deepcopy(tree)
    at(expected, path).append(value)
    new = append(text, path, value)
    assert read(new) == expected
    assert comments(text) <= comments(new)


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        ("policy.optimizer.lr", 2e-05, "      lr: 1e-6\n", "      lr: 2e-5\n"),
        ("run_dir", "runs/y", 'run_dir: "runs/x"   # quoted', "run_dir: runs/y   # quoted"),
        ("policy.tokenizer.path", "t", "  tokenizer:\n", "  tokenizer:\n    path: t\n"),
        ("data.validation.path", "b", " *tasks\n", "\n    name: tasks\n    path: b\n"),
        ("policy.model_path", "no", "model_path: 'models/a'", 'model_path: "no"'),
        ("policy.layout.data_parallel_size", 4, "data_parallel_size: 1}", "data_parallel_size: 4}"),
        ("algorithm.name", "grpo", "algorithm: {}", "algorithm: {name: grpo}"),
    ],
)
def test_set_by_example(path: str, value: object, old: str, new: str) -> None:
    assert FORMS.count(old) == 1
    assert set_value(FORMS, tuple(path.split(".")), value) == FORMS.replace(old, new)


def test_a_new_key_comes_where_the_order_has_it() -> None:
    text = "a: 1\nc: 3  # three\nd: 4\n"
    assert set_value(text, ("b",), 2, ["a", "b", "c", "d"]) == "a: 1\nb: 2\nc: 3  # three\nd: 4\n"
    assert set_value(text, ("e",), {"x": [1], "s": {"z": "t"}}) == text + "e:\n  x: [1]\n  s:\n    z: t\n"
    assert set_value("# only this", ("a", "b"), 1) == "# only this\na:\n  b: 1\n"


def test_several_edits_and_windows_lines() -> None:
    text = "a: 1\r\nrewards:\r\n  - function: x\r\n"
    changes = [
        {"path": ["rewards"], "value": {"function": "f", "weight": 0.5}, "append": True},
        {"path": ["a"], "remove": True},
    ]
    expected = "rewards:\r\n  - function: x\r\n  - function: f\r\n    weight: 0.5\r\n"
    assert edit(text, changes) == expected
    assert edit(
        expected, [{"path": ["rewards", 1], "remove": True}, {"path": ["rewards", 0], "remove": True}]
    ) == ("rewards: []\r\n")


def test_what_cannot_be_edited_is_named() -> None:
    with pytest.raises(EditError, match=r"line 28 repeats it as \*tasks; edit the text"):
        set_value(FORMS, ("data", "train", "path"), "b")
    with pytest.raises(EditError, match=r"run_dir is no section; correct it in the text"):
        set_value(FORMS, ("run_dir", "x"), 1)
    with pytest.raises(EditError, match=r"rewards\.7 does not exist; append to the list instead"):
        set_value(FORMS, ("rewards", 7), 1)
    with pytest.raises(EditError, match=r"a is written in a form that cannot be edited here"):
        remove("? a\n: 1\nb: 2\n", ("a",))
    with pytest.raises(ConfigError, match="invalid YAML"):
        set_value("a: [", ("a",), 1)
