"""`nemorl rewards try`, `nemorl check --json` and `nemorl config --level`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Nemorl
from tests.config.experiments import GRPO, write

LINES = (
    '{"prompt": "1+1=", "completions": ["2", "3"], "answer": "2"}\n'
    '{"prompt": "1+2=", "completions": ["3", "3"], "answer": "3"}\n'
)
REWARDS = "def brief(completions):\n    return [-len(c) for c in completions]\n"
BROKEN = "def broken(completions):\n    return [c.nothing for c in completions]\n"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write(tmp_path, LINES, "answers.jsonl")


def test_parts_sums_and_groups_without_spread(nemorl: Nemorl, tmp_path: Path, samples: Path) -> None:
    write(tmp_path, REWARDS, "briefly.py")
    own = "  - function: exact_match\n  - {function: 'briefly:brief', weight: 0.5}\n"
    file = write(tmp_path, GRPO.replace("  - function: exact_match\n", own))

    outcome = nemorl("rewards", "try", file, "--samples", samples, "--json")

    assert outcome.status == 0
    found = json.loads(outcome.out)
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["exact_match"]["values"] == [1.0, 0.0, 1.0, 1.0]
    assert parts["brief"]["values"] == [-1.0] * 4
    assert found["totals"] == [0.5, -0.5, 0.5, 0.5]
    assert (found["equal_groups"], found["groups"]) == (1, 2)
    assert parts["exact_match"]["mean"] == 0.75
    shown = nemorl("rewards", "try", file, "--samples", samples)
    assert "4 answers of answers.jsonl, 1 of 2 groups without spread" in shown.out


def test_a_failing_function_shows_its_traceback(nemorl: Nemorl, tmp_path: Path, samples: Path) -> None:
    write(tmp_path, BROKEN, "breaks.py")
    file = write(tmp_path, GRPO.replace("function: exact_match", "function: 'breaks:broken'"))

    outcome = nemorl("rewards", "try", file, "--samples", samples)

    assert outcome.status == 1
    assert "reward `broken`: AttributeError: 'str' object has no attribute 'nothing'" in outcome.err
    assert 'breaks.py", line 2' in outcome.err


def test_samples_of_a_run_have_recorded_rewards(nemorl: Nemorl, tmp_path: Path) -> None:
    line = {
        "step": 1,
        "task": 7,
        "prompt": "1+1=",
        "completion": "2<end>",  # samples show the end token, which rewards are not given
        "answer": "2",
        "rewards": {"math": 1.0},
    }
    write(tmp_path, f"{json.dumps(line)}\nno JSON\n", "run/samples.jsonl")
    file = write(tmp_path, GRPO.replace("algorithm:", "env: {name: math}\nalgorithm:"))
    write(
        tmp_path, json.dumps({"eos_token": {"content": "<end>"}}), "models/arithmetic/tokenizer_config.json"
    )

    outcome = nemorl("rewards", "try", file, "--samples", tmp_path / "run", "--json")

    math, exact = json.loads(outcome.out)["parts"]
    assert (math["source"], math["values"], exact["values"]) == ("recorded", [1.0], [1.0])
    # One answer of a group: whether it has spread is not known, and a validation has other tasks.
    assert json.loads(outcome.out)["is_partial"] is True
    others = [line, {**line, "phase": "validation", "completion": "3"}]
    write(tmp_path, "".join(f"{json.dumps(each)}\n" for each in others), "run/samples.jsonl")
    shown = nemorl("rewards", "try", file, "--samples", tmp_path / "run")
    assert "2 answers of samples.jsonl, no group with several answers that have a sum" in shown.out
    assert "logger.trajectories: sampled or all record whole groups" in shown.err
    assert "line 2: `no JSON` is not JSON (at column 1); write {" in outcome.err


def test_what_has_no_answers_is_refused(nemorl: Nemorl, tmp_path: Path) -> None:
    file = write(tmp_path)
    absent = nemorl("rewards", "try", file, "--samples", tmp_path / "no.jsonl")
    empty = nemorl("rewards", "try", file, "--samples", write(tmp_path, '{"prompt": "a"}\n', "x.jsonl"))
    assert (absent.status, empty.status) == (2, 2)
    assert "No such file or directory; name a run folder" in absent.err
    assert "line 1: `completion` is missing; write a text as `completion`" in empty.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Answer: 4", "`Answer: 4` is not JSON (at column 1); write {"),
        ("[1]", "`[1]` is no object; write {"),
        ('{"completion": 4}', "`completion` is `4`; write a text as `completion`"),
        ('{"completions": []}', "`completions` is `[]`; write a text"),
        ('{"completion": "4", "rewards": [1]}', "`rewards` is `[1]`; write an object of numbers by name"),
        ('{"completion": "4", "rewards": {"a": "b"}}', '`rewards` is `{"a": "b"}`; write an object'),
        (f'{{"completion": {[1] * 90}}}', "`completion` is `[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1"),
    ],
)
def test_a_line_without_an_answer_is_named(nemorl: Nemorl, tmp_path: Path, line: str, says: str) -> None:
    lines = "\n".join([line] * 7)
    refused = nemorl(
        "rewards", "try", write(tmp_path), "--samples", write(tmp_path, f"\n{lines}\n", "x.jsonl")
    )
    assert refused.status == 2
    assert f"x.jsonl, line 2: {says}" in refused.err.replace("\n", " ")
    assert "and 2 further lines without answers" in refused.err


def test_check_prints_json(nemorl: Nemorl, experiment: Path, tmp_path: Path) -> None:
    broken = write(tmp_path, "run_dir: runs/x\nseed: -1\n", "broken.yaml")

    outcome = nemorl("check", "--json", experiment, broken, tmp_path / "nowhere.yaml")

    assert outcome.status == 2
    fine, wrong, absent = json.loads(outcome.out)
    assert (fine["ok"], fine["problems"], fine["memory"][1]["group"]) == (True, [], "policy")
    assert fine["memory"][1]["parts"]["weights"] > 0
    seed = next(problem for problem in wrong["problems"] if problem["field"] == "seed")
    expected = {"field": "seed", "value": -1, "origin": f"{broken}:2", "line": 2}
    assert {name: seed[name] for name in expected} == expected
    assert absent["problems"][0]["fix"].startswith("no such file")


def test_config_lists_the_fields_of_a_level(nemorl: Nemorl) -> None:
    simple, advanced, expert = (
        {line.partition(":")[0] for line in nemorl("config", "--level", level).out.splitlines()}
        for level in ("simple", "advanced", "expert")
    )
    assert simple < advanced < expert
    assert {"run_dir", "policy.model_path", "algorithm.num_steps", "rewards.0.weight"} <= simple
    assert "seed" in advanced - simple
    assert "policy.guards.loss.max_value" in expert - advanced
    refused = nemorl("config", "policy.guards", "--level", "simple")
    assert refused.status == 2
    assert "`policy.guards` has no simple fields; use a higher --level" in refused.err
