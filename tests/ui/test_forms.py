"""Forms of experiments against the schema, which `nemorl config` describes independently."""

import json
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.load import Loaded, examine
from nemorl.config.schema import describe
from nemorl.config.yaml import parse_document
from nemorl.ui.forms import Node, form, walk

BASE = """\
run_dir: runs/x
policy: {model_path: models/arithmetic}
data:
  train: {name: arithmetic}
algorithm:
  name: grpo
  num_steps: 3   # few
  num_prompts_per_step: 4
  num_generations_per_prompt: 2
"""


def nodes_of(tree: dict[str, Any]) -> list[Node]:
    text = json.dumps(tree)
    loaded = examine(Path("x.yaml"), text=text)
    return form(loaded, tree)


def loaded(text: str) -> tuple[Loaded, dict[str, Any]]:
    return examine(Path("x.yaml"), text=text), parse_document(text, "x.yaml").tree


def by_path(text: str) -> dict[str, Node]:
    return {".".join(map(str, node["path"])): node for node in walk(form(*loaded(text)))}


def put(tree: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    result = deepcopy(tree)
    at: Any = result
    for step, following in pairwise(path):
        if isinstance(at, dict) and at.get(step) is None:
            at[step] = [] if isinstance(following, int) else {}
        if isinstance(at, list) and step == len(at):
            at.append({})
        at = at[step]
    if isinstance(at, list):
        at.append(value)
    else:
        at[path[-1]] = value
    return result


def test_every_field_of_the_schema_is_reachable() -> None:
    """By choosing each variant of each section, and adding those that are null and items of lists."""
    found: set[str] = set()
    waiting: list[dict[str, Any]] = [parse_document(BASE, "x").tree]
    visited: set[tuple[str, str]] = set()
    while waiting:
        tree = waiting.pop()
        for node in walk(nodes_of(tree)):
            name = ".".join("0" if isinstance(step, int) else str(step) for step in node["path"])
            if node["kind"] not in ("section", "sections", "mapping"):
                found.add(name)
                continue
            if node["kind"] != "section":
                member = 0 if node["kind"] == "sections" else "NAME"
                options = [one["name"] for one in node["variants"]]
                places = [(f"{name}.{member}", [*node["path"], member], options)] if not node["items"] else []
            else:
                options = [one["name"] for one in node["variants"]] if "variants" in node else []
                places = [(name, node["path"], options or [""])] if options or not node["present"] else []
            for place, path, choices in places:
                for choice in choices:
                    if (place, choice) in visited:
                        continue
                    visited.add((place, choice))
                    if node.get("tag") and choice:
                        found.add(f"{place}.{node['tag']}")
                    chosen = {node["tag"]: choice} if choice and node.get("tag") else {}
                    waiting.append(put(tree, path, chosen))
    described = {field.path for field in describe()}
    assert described - found == set()


def test_values_have_their_origin_and_limits() -> None:
    fields = by_path(BASE)
    steps = fields["algorithm.num_steps"]
    assert (steps["value"], steps["origin"], steps["is_own"]) == (3, "x.yaml:7", True)
    assert (steps["kind"], steps["min"], steps["level"]) == ("integer", 1, "simple")
    lr = fields["policy.optimizer.lr"]
    assert (lr["value"], lr["default"], lr["origin"], lr["is_own"]) == (1e-6, 1e-6, "default", False)
    assert (lr["kind"], lr["above"]) == ("number", 0)
    precision = fields["policy.precision"]
    assert (precision["kind"], precision["choices"]) == ("choice", ["float32", "bfloat16"])
    assert fields["policy.lora"]["present"] is False
    assert fields["generation"]["chosen"] == "torch"
    assert fields["generation.stop_token_ids"]["item"]["kind"] == "integer"
    assert fields["policy.guards.loss.max_value"]["level"] == "expert"


def test_a_preset_is_the_origin_of_what_it_sets() -> None:
    fields = by_path(BASE.replace("name: grpo", "name: dapo"))
    high = fields["algorithm.loss.clip_high"]
    assert high["value"] != high["default"]
    assert high["origin"] == "preset dapo"


@pytest.mark.parametrize(
    ("algorithm", "unused"),
    [
        ("grpo", {"critic", "reference", "teachers"}),
        ("ppo", {"reference", "teachers"}),
        ("on_policy_distillation", {"critic", "reference"}),
    ],
)
def test_the_algorithm_decides_which_sections_are_used(algorithm: str, unused: set[str]) -> None:
    nodes = form(*loaded(BASE.replace("name: grpo", f"name: {algorithm}")))
    assert {node["name"] for node in nodes if node["unused"]} == unused


def test_sft_uses_no_engine() -> None:
    text = "run_dir: runs/x\npolicy: {model_path: m}\ndata: {train: {name: arithmetic}}\n"
    nodes = form(*loaded(text + "algorithm: {name: sft, num_steps: 1, batch_size: 4}\n"))
    assert {"generation", "env", "rewards"} <= {node["name"] for node in nodes if node["unused"]}


def test_invalid_values_stay_in_the_form() -> None:
    text = BASE.replace("num_steps: 3", "num_steps: few").replace("arithmetic}\nalg", "nothing}\nalg")
    fields = by_path(text)
    assert fields["algorithm.num_steps"]["value"] == "few"
    assert fields["data.train"]["chosen"] == "nothing"
    assert fields["data.train"]["fields"] == []
