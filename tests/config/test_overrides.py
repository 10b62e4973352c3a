from typing import Any

import pytest

from nemorl.config.load import apply_overrides
from nemorl.config.yaml import parse_document
from nemorl.errors import ConfigError, Problem

TEXT = """\
seed: 1
policy: {precision: float32, optimizer: {name: adam, lr: 0.1}}
rewards: [{function: a, weight: 1}, {function: b}]
generation: {max_batch_size: 3, max_new_tokens: 2}
"""


def overridden(*overrides: str) -> dict[str, Any]:
    return apply_overrides(parse_document(TEXT, "x.yaml"), overrides).tree


def refused(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as error:
        overridden(*overrides)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("1e-6", 1e-6), ("[1, 2]", [1, 2]), ("true", True), ("", None), ("a=b", "a=b")],
)
def test_the_value_is_yaml(text: str, value: Any) -> None:
    assert overridden(f"policy.precision={text}")["policy"]["precision"] == value


def test_a_section_is_merged() -> None:
    assert overridden("policy.optimizer={lr: 0.2}")["policy"]["optimizer"] == {"name": "adam", "lr": 0.2}


def test_new_sections_come_into_being() -> None:
    assert overridden("cluster.deadlines.start=5")["cluster"] == {"deadlines": {"start": 5}}


def test_the_later_of_two_wins() -> None:
    assert overridden("seed=2", "seed=3")["seed"] == 3


def test_a_number_is_a_place_in_a_list() -> None:
    assert overridden("rewards.1.weight=2", "rewards.0.function=c")["rewards"] == [
        {"function": "c", "weight": 1},
        {"function": "b", "weight": 2},
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_another_variant_drops_the_old_ones_fields_whatever_the_order(turned: bool) -> None:
    overrides = ["generation.backend=trtllm", "generation.max_num_tokens=4"]

    tree = overridden(*(reversed(overrides) if turned else overrides))

    assert tree["generation"] == {"backend": "trtllm", "max_num_tokens": 4, "max_new_tokens": 2}


@pytest.mark.parametrize("turned", [False, True])
def test_fields_next_to_the_choice_of_a_variant_are_its_own(turned: bool) -> None:
    overrides = ["generation.backend=trtllm", "generation.max_batch_size=4"]

    tree = overridden(*(reversed(overrides) if turned else overrides))

    assert tree["generation"]["max_batch_size"] == 4


def test_the_document_is_left_as_it_was() -> None:
    document = parse_document(TEXT, "x.yaml")

    apply_overrides(document, ["policy.optimizer.lr=5", "rewards.0.weight=7"])

    assert document.tree == parse_document(TEXT, "x.yaml").tree


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        *(
            (word, "such as `algorithm.num_steps=20`")
            for word in ("seed", "=3", "policy..precision=3", ".seed=1")
        ),
        ("other.yaml", "one experiment file is read, and it comes first"),
        ("rewards[0].weight=2", "write `rewards.0.weight=2`"),
        ("+policy/optimizer/lr=2", "write `policy.optimizer.lr=2`"),
    ],
)
def test_an_override_written_otherwise_is_refused(override: str, fix: str) -> None:
    problem = refused(override)

    assert problem.value == override
    assert fix in problem.fix


def test_all_that_an_override_says_is_from_the_command_line() -> None:
    document = parse_document(TEXT, "x.yaml")

    origins = apply_overrides(document, ["rewards=[{function: c}]", "logger.console=rich"]).origins

    places = [("rewards", 0, "function"), ("logger",), ("logger", "console")]
    assert [origins[place] for place in places] == ["command line"] * 3
    assert origins["policy",] == "x.yaml:2"


def test_a_place_that_a_list_does_not_have_is_refused() -> None:
    problem = refused("rewards.2.weight=1")

    assert (problem.field, problem.fix) == (
        "rewards.2",
        "the list has items 0 to 1; use one of them, or set the complete list as `[...]`",
    )


def test_broken_yaml_names_the_field() -> None:
    assert refused("generation.stop_token_ids=[1, 2").origin.startswith(
        "command line, generation.stop_token_ids"
    )
