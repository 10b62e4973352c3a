"""The verdict, picture and layouts of an unsaved experiment."""

import json
import shutil
from pathlib import Path

import pytest

from nemorl.cli import main
from nemorl.config import shipped
from nemorl.config.policy import LayoutConfig
from nemorl.config.yaml import parse_document
from nemorl.errors import ConfigError
from nemorl.models.create import create_tiny_model
from nemorl.plan.machine import read_machine
from nemorl.run.inspection import prepare
from nemorl.ui import compose
from nemorl.ui.yaml_edit import edit, set_value
from tests.config.experiments import GRPO
from tests.plan.models import write_model
from tests.ui.folders import append_steps, make_run, step_metrics

ROOT = Path(__file__).parents[2]
NAMES = [recipe.name for recipe in shipped.recipes()]
# Edits that break an experiment in its syntax, its types, between sections and at the machine.
BREAKS = [
    [],
    [{"path": ["seed"], "value": -1}],
    [{"path": ["policy", "layout", "tensor_parallel_size"], "value": 7}],
    [{"path": ["algorithm", "num_step"], "value": 3}, {"path": ["run_dir"], "value": None}],
    [{"path": ["rewards"], "value": {"function": "exact_mach"}, "append": True}],
]


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def verdict(text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """What `nemorl check --json` prints of a file with this text."""
    file.write_text(text, encoding="utf-8")
    main(["check", "--json", str(file)])
    report = json.loads(capsys.readouterr().out)[0]
    assert report.pop("file") == str(file)
    return report  # type: ignore[no-any-return]


@pytest.mark.ci
def test_the_verdict_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every shipped experiment without models of the hub, and of broken variants of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    create_tiny_model("models/arithmetic")  # of the experiments that are valid
    copies = tmp_path / "configs"
    shutil.copytree(shipped.FOLDER, copies)
    known = set()
    for number, name in enumerate(NAMES):
        text = shipped.file_of(name).read_text(encoding="utf-8")
        model = shipped.describe(name)
        assert model is not None
        if "/" in model.model and not model.model.startswith(("models/", "runs/")):
            continue  # `nemorl check` downloads it
        file = copies / f"{name}.yaml"
        for broken in (BREAKS[0], BREAKS[1 + number % (len(BREAKS) - 1)])[: 1 + (number % 3 == 0)]:
            changed = edit(text, compose.own_edits(text, str(file), broken))
            ours = compose.check(changed, str(file))["report"]
            assert ours == verdict(changed, file, capsys), name
            known |= {bool(ours["ok"]), *(problem["field"] for problem in ours["problems"])}
    assert {True, False, "seed", "algorithm.num_step", "run_dir"} <= known


@pytest.mark.usefixtures("in_root")
def test_problems_have_their_line_and_a_broken_text_has_no_form() -> None:
    text = "run_dir: runs/x\nseed: -1   # negative\n"
    report = compose.check(text, "x.yaml")["report"]
    seed = next(problem for problem in report["problems"] if problem["field"] == "seed")
    assert (seed["line"], seed["value"], seed["origin"]) == (2, -1, "x.yaml:2")
    broken = compose.check("a: [}", "x.yaml")
    assert (broken["form"], broken["picture"]) == (None, None)
    assert broken["broken"]["fix"].startswith("invalid YAML")
    assert broken["broken"]["line"] == 1


def test_a_run_folder_that_holds_a_run_is_a_problem_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of `nemorl train`; `nemorl check` does not look there."""
    monkeypatch.chdir(tmp_path)
    text = "# where\nrun_dir: runs/x\n"
    assert compose.check(text, "x.yaml")["occupied"] is None
    make_run(tmp_path / "runs" / "x", steps=0)
    assert compose.check(text, "x.yaml")["occupied"] is None  # a start that failed leaves nothing to lose
    append_steps(tmp_path / "runs" / "x", [step_metrics(1)])
    found = compose.check(text, "x.yaml", "8x80")
    assert found["occupied"] == {
        "field": "run_dir",
        "value": "runs/x",
        "fix": "the folder contains a run; continue it with --resume, or set another folder",
        "origin": "x.yaml:2",
        "line": 2,
    }
    assert "run_dir" not in {problem["field"] for problem in found["report"]["problems"]}
    (tmp_path / "full.yaml").write_text(GRPO, encoding="utf-8")
    write_model(tmp_path / "models" / "arithmetic")
    make_run(tmp_path / "runs" / "sums")
    ours = compose.check(GRPO, "full.yaml")
    with pytest.raises(ConfigError) as refused:
        prepare(Path("full.yaml"), [], read_machine(), new_run=True)  # as `nemorl train` does
    theirs = {(problem.field, problem.fix) for problem in refused.value.problems}
    assert (ours["occupied"]["field"], ours["occupied"]["fix"]) in theirs


@pytest.mark.usefixtures("in_root")
def test_whole_runs_are_ranked_for_algorithms_that_sample() -> None:
    known = [fact["name"] for fact in compose.preset_facts() if fact["ranks"]]
    assert known == ["1x80", "8x80", "8x141"]
    for name, samples in (("quickstart/grpo", True), ("offline/dpo", False), ("quickstart/sft", False)):
        file = shipped.file_of(name)
        picture = compose.check(file.read_text(encoding="utf-8"), str(file), "8x80")["picture"]
        assert picture["samples"] is samples, name


def test_sizes_of_presets_are_in_one_unit() -> None:
    titles = [fact["title"] for fact in compose.preset_facts()]
    assert titles[1:3] == ["CPU, 8 cores, 32 GB", "1 x 24 GB"]
    assert not any("GiB" in title for title in titles)
    assert compose.preset_facts()[1]["memory"] == 32 * 10**9


@pytest.mark.usefixtures("in_root")
def test_the_picture_has_models_engines_and_what_does_not_fit() -> None:
    name = "recipes/grpo-qwen3-30b-a3b-4n8g-ep8dp32"
    text, file = shipped.file_of(name).read_text(encoding="utf-8"), str(shipped.file_of(name))
    picture = compose.check(text, file, "8x80")["picture"]
    nodes = {node["name"]: node for node in picture["nodes"]}
    assert (nodes["policy"]["devices"], nodes["policy"]["processes"]) == (32, 32)
    assert nodes["policy"]["parts"]["weights"] > 1e9
    assert nodes["generation"]["shares"] is True
    assert {"from": "policy", "to": "generation", "what": "weights"} in picture["edges"]
    small = compose.check(text, file, "1x24")["picture"]
    policy = next(node for node in small["nodes"] if node["name"] == "policy")
    assert policy["fits"] is False
    assert any("24 GB" in problem for problem in small["problems"])


@pytest.mark.usefixtures("in_root")
def test_layouts_are_those_of_the_planner_and_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    name = "recipes/grpo-qwen3-30b-a3b-4n8g-ep8dp32"
    text, file = shipped.file_of(name).read_text(encoding="utf-8"), str(shipped.file_of(name))
    found = compose.layouts(text, file, "8x80", 8)
    gigabytes = str(found["room"] / 1e9)
    main(["plan", "layouts", file, "--gpus", "8", "--memory-gb", gigabytes, "--json"])
    theirs = json.loads(capsys.readouterr().out)
    assert found["count"] == len(theirs)
    assert [row["memory"] for row in found["rows"][:9]] == [row["memory_on_device"] for row in theirs[:9]]
    changed = edit(text, found["rows"][0]["edits"])
    again = compose.layouts(changed, file, "8x80", 8)
    assert [row["is_current"] for row in again["rows"]].index(True) == 0
    suggested = compose.suggestions(text, file, "8x80", 8)["rows"][0]
    assert parse_document(edit(text, suggested["edits"]), "x").tree["generation"]["replicas"] >= 1  # type: ignore[index]


@pytest.mark.usefixtures("in_root")
def test_layouts_say_what_the_plan_offloads() -> None:
    """On hardware whose copies to the host the plan of time knows."""
    name = "recipes/grpo-qwen3-30b-a3b-4n8g-ep8dp32"
    text, file = shipped.file_of(name).read_text(encoding="utf-8"), str(shipped.file_of(name))
    policy = {
        "recompute": {"name": "auto"},
        "offload_activations": {"layers": "auto"},
        "micro_batch_tokens": 65536,
    }
    changed = edit(text, [{"path": ["policy", field], "value": value} for field, value in policy.items()])
    kept = {preset: compose.layouts(changed, file, preset, 4)["rows"] for preset in ("8x141", "1x24")}
    assert any("; offloaded: the first " in row["recompute"] for row in kept["8x141"])
    assert not any("offloaded" in row["recompute"] for row in kept["1x24"])


def test_a_layout_replaces_all_of_an_inherited_one(tmp_path: Path) -> None:
    """PP2 over an inherited TP2 is no TP2 PP2."""
    inherited, chosen = LayoutConfig(tensor_parallel_size=2), LayoutConfig(pipeline_parallel_size=2)
    change = compose._layout_edit(chosen, inherited)
    assert change["value"] == {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert compose._layout_edit(chosen, chosen)["value"] == {"pipeline_parallel_size": 2}
    assert compose._layout_edit(LayoutConfig(), LayoutConfig())["value"] == {}


def test_an_item_of_an_inherited_list_becomes_an_own_list(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rewards:\n  - {function: exact_match}\n", encoding="utf-8")
    file, text = str(tmp_path / "x.yaml"), "defaults: base.yaml\n"
    change = {"path": ["rewards", 0, "weight"], "value": 2}
    expected = "defaults: base.yaml\nrewards:\n  - function: exact_match\n    weight: 2\n"
    assert edit(text, compose.own_edits(text, file, [change])) == expected
    added = {"path": ["rewards"], "value": {"function": "format_tags"}, "append": True}
    assert "exact_match" in edit(text, compose.own_edits(text, file, [added]))


def test_a_new_variant_drops_the_fields_of_the_old() -> None:
    text = "generation:\n  backend: torch\n  max_kv_tokens: 5   # of torch\n  replicas: 2\n"
    dropped = ["max_kv_tokens", "max_batch_size"]
    change = {"path": ["generation", "backend"], "value": "vllm", "drops": dropped}
    assert edit(text, compose.own_edits(text, "x.yaml", [change])) == (
        "generation:\n  backend: vllm\n  replicas: 2\n"
    )


def test_a_recipe_is_one_complete_file() -> None:
    text = compose.recipe_text("quickstart/grpo")
    tree = parse_document(text, "x").tree
    assert "defaults" not in tree
    assert tree["policy"]["layout"] == {"tensor_parallel_size": 2}  # type: ignore[index]
    assert text.startswith("# Second half of `nemorl quickstart`")
    sft = shipped.file_of("quickstart/sft").read_text(encoding="utf-8")
    assert compose.recipe_text("quickstart/sft") == sft
    assert set_value(text, ("seed",), 3) != text
