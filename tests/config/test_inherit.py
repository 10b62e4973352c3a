from pathlib import Path

import pytest

from nemorl.config.load import read_document
from nemorl.errors import ConfigError, Problem
from tests.config.experiments import write


def refused(file: Path) -> Problem:
    with pytest.raises(ConfigError) as error:
        read_document(file)
    (problem,) = error.value.problems
    return problem


def test_the_file_wins_over_what_it_inherits(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\npolicy: {precision: float32, max_sequence_length: 64}\n", "base.yaml")
    file = write(tmp_path, "defaults: base.yaml\npolicy: {max_sequence_length: 128}\n")

    document = read_document(file)

    assert document.tree == {"seed": 1, "policy": {"precision": "float32", "max_sequence_length": 128}}
    assert document.origins["policy", "precision"] == f"{tmp_path / 'base.yaml'}:2"
    assert document.origins["policy", "max_sequence_length"] == f"{file}:2"


def test_parents_are_read_depth_first_and_later_ones_win(tmp_path: Path) -> None:
    write(tmp_path, "a: root\nb: root\nc: root\nd: root\n", "root.yaml")
    write(tmp_path, "defaults: ../root.yaml\nb: left\nc: left\nd: left\n", "parents/left.yaml")
    write(tmp_path, "c: right\nd: right\n", "parents/right.yaml")
    file = write(tmp_path, "defaults: [parents/left.yaml, parents/right.yaml]\nd: file\n")

    assert read_document(file).tree == {"a": "root", "b": "left", "c": "right", "d": "file"}


def test_one_parent_may_come_by_two_ways(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\n", "root.yaml")
    write(tmp_path, "defaults: root.yaml\na: 1\n", "left.yaml")
    write(tmp_path, "defaults: root.yaml\nb: 2\n", "right.yaml")
    file = write(tmp_path, "defaults: [left.yaml, right.yaml]\n")

    assert read_document(file).tree == {"seed": 1, "a": 1, "b": 2}


def test_lists_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, "rewards: [{function: a}, {function: b}]\n", "base.yaml")
    file = write(tmp_path, "defaults: base.yaml\nrewards: [{function: c}]\n")

    assert read_document(file).tree == {"rewards": [{"function": "c"}]}


# What a parent says, what its heir says, and what holds.
CHANGES = {
    "no field of the old variant": (
        "{policy: {optimizer: {name: adam, lr: 0.1, beta1: 0.5}}}",
        "{policy: {optimizer: {name: sgd, momentum: 0.5}}}",
        {"policy": {"optimizer": {"name": "sgd", "momentum": 0.5}}},
    ),
    "what all back ends share": (
        "{generation: {backend: torch, replicas: 2, max_kv_tokens: 9, sampling: {top_k: 5, top_p: 0.5}}}",
        "{generation: {backend: vllm, sampling: {top_p: 0.9}}}",
        {"generation": {"backend": "vllm", "replicas": 2, "sampling": {"top_k": 5, "top_p": 0.9}}},
    ),
    "a parent that names none has the default": (
        "{generation: {max_batch_size: 3, max_new_tokens: 8}}",
        "{generation: {backend: trtllm, delta: true}}",
        {"generation": {"backend": "trtllm", "max_new_tokens": 8, "delta": True}},
    ),
    "a field that the old variant could not have": (
        "{generation: {max_num_seqs: 3, max_batch_size: 3}}",
        "{generation: {backend: vllm}}",
        {"generation": {"backend": "vllm", "max_num_seqs": 3}},
    ),
    "parts that a preset sets": (
        "{algorithm: {name: grpo, num_steps: 9, num_prompts_per_step: 4, loss: {clip_high: 0.5}}}",
        "{algorithm: {name: dapo, num_steps: 10}}",
        {"algorithm": {"name": "dapo", "num_steps": 10, "num_prompts_per_step": 4}},
    ),
    "a parent without the choice, which has no default": (
        "{algorithm: {num_steps: 9}}",
        "{algorithm: {name: sft, batch_size: 4}}",
        {"algorithm": {"name": "sft", "num_steps": 9, "batch_size": 4}},
    ),
}


@pytest.mark.parametrize(("parent", "heir", "tree"), CHANGES.values(), ids=CHANGES.keys())
def test_what_stays_when_the_variant_changes(tmp_path: Path, parent: str, heir: str, tree: object) -> None:
    write(tmp_path, parent, "base.yaml")
    file = write(tmp_path, heir.replace("{", "{defaults: base.yaml, ", 1))

    assert read_document(file).tree == tree


def test_the_same_variant_keeps_its_keys(tmp_path: Path) -> None:
    write(tmp_path, "algorithm: {name: grpo, num_steps: 9}\n", "base.yaml")
    file = write(tmp_path, "defaults: base.yaml\nalgorithm: {name: grpo, num_minibatches: 2}\n")

    assert read_document(file).tree == {"algorithm": {"name": "grpo", "num_steps": 9, "num_minibatches": 2}}


def test_a_circle_is_named(tmp_path: Path) -> None:
    write(tmp_path, "defaults: b.yaml\n", "a.yaml")
    write(tmp_path, "defaults: ./a.yaml\n", "b.yaml")

    problem = refused(tmp_path / "a.yaml")

    assert problem.field == "defaults"
    assert f"{tmp_path}/a.yaml -> {tmp_path}/b.yaml -> {tmp_path}/a.yaml" in problem.fix


def test_a_file_that_is_its_own_parent_is_a_circle(tmp_path: Path) -> None:
    assert "remove one of the links" in refused(write(tmp_path, "defaults: experiment.yaml\n")).fix


def test_a_missing_parent_is_named_with_its_heir(tmp_path: Path) -> None:
    file = write(tmp_path, "defaults: nowhere.yaml\n")

    problem = refused(file)

    assert (problem.field, problem.value) == ("defaults", str(tmp_path / "nowhere.yaml"))
    assert problem.fix == f"no such file; `defaults` of {file} names it"


def test_a_missing_file_is_named_with_one_of_a_similar_name(tmp_path: Path) -> None:
    fix = "correct the path of the experiment file"
    problem = refused(tmp_path / "nowhere.yaml")
    assert (problem.value, problem.fix) == (str(tmp_path / "nowhere.yaml"), f"no such file; {fix}")

    (tmp_path / "nowhere_2.yaml").touch()
    problem = refused(tmp_path / "nowhere.yaml")
    assert problem.fix == f"no such file; did you mean `nowhere_2.yaml`? {fix}"


def test_a_folder_is_no_experiment(tmp_path: Path) -> None:
    assert refused(tmp_path).fix == "the file cannot be read: Is a directory"


def test_a_binary_file_is_no_experiment(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")

    assert "not UTF-8 text" in refused(tmp_path / "x.yaml").fix


def test_defaults_are_paths(tmp_path: Path) -> None:
    problem = refused(write(tmp_path, "seed: 1\ndefaults: {a: b}\n"))

    assert problem.fix == "expected a path or a list of paths, relative to this file"
    assert problem.origin.endswith("experiment.yaml:2")
