"""Model cards: what they say comes from the files of the run, and an edited one is kept."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from nemorl.cli import main
from nemorl.config.load import load_experiment, to_yaml
from nemorl.errors import UsageError
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics
from nemorl.run.card import CARD_FILE, CURVES_FILE, Facts, curves_svg, is_edited, read_lm_eval, write_card
from nemorl.run.checkpoints import Origin
from tests.config.experiments import GRPO, write

LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.0125,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": "N/A",
            "sample_len": 100,
        },
        "mine": {"alias": "mine", "acc,none": 0.75, "acc_stderr,none": 0.1},
    },
    "configs": {
        "gsm8k": {"dataset_path": "openai/gsm8k", "dataset_name": "main"},
        "mine": {"dataset_path": "json"},
    },
    "n-shot": {"gsm8k": 5, "mine": 0},
    "lm_eval_version": "0.4.9",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model as the hub's cache keeps it, with its card."""
    folder = tmp_path / "home/hub/models--org--base/snapshots/0123abcd"
    create_tiny_model(folder)
    (folder / CARD_FILE).write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    """The folder `hf` of a run with three steps."""
    run_dir = tmp_path / "private" / "sums"
    (run_dir / "hf").mkdir(parents=True)
    text = GRPO.replace("models/arithmetic", str(base))
    experiment = load_experiment(write(tmp_path, text), [f"run_dir={run_dir}", "seed=7"])
    (run_dir / "config.yaml").write_text(to_yaml(experiment))
    lines = [
        {"step": 1, "version": 1, "reward/mean": 0.25, "time/step": 1800.0, "tokens/trained": 1000.0},
        {"step": 2, "version": 2, "reward/mean": 0.5, "validation/accuracy": 0.375, "time/step": 1800.0},
        {"step": 3, "version": 3, "reward/mean": 0.75, "validation/accuracy": 0.875, "time/step": 1800.0},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {
        "versions": {"torch": "2.13.0", "nemorl": "0.1.0"},
        "machine": {"host": "secret-host", "cores": 2, "memory_gigabytes": 25.3},
        "run": {"policy device": "cpu", "policy layout": "TP2"},
    }
    (run_dir / "header.json").write_text(json.dumps([start]))
    Origin(str(run_dir), 2).write(run_dir / "hf")
    return run_dir / "hf"


def test_a_card_has_what_the_run_knows(folder: Path) -> None:
    assert write_card(Facts.read(folder, folder.parent, 2))
    card = ModelCard.load(folder / CARD_FILE)
    data = card.data.to_dict()
    assert data["base_model"] == "org/base"
    assert data["license"] == "apache-2.0"
    assert data["language"] == "en"
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["nemorl", "grpo"]
    assert "datasets" not in data  # sums are made, not on the hub
    (result,) = card.data.eval_results or []
    assert (result.metric_name, result.metric_value) == ("accuracy", 0.375)  # of step 2, which was exported
    text = card.text
    assert "# sums-step-2" in text
    assert "by grpo from [org/base](https://huggingface.co/org/base)" in text
    for row in (
        "| seed | 7 |",
        "| device | cpu |",
        "| layout | TP2 |",
        "| memory of the driver's node | 25.3 GB |",
        "| time of the steps | 1.00 h |",
        "| tokens trained | 1,000 |",
        "| torch | 2.13.0 |",
        "| 0.375 | validation at step 2 |",
    ):
        assert row in text, row
    assert f"]({CURVES_FILE})" in text
    assert "secret-host" not in text
    assert "private" not in text
    assert "snapshots" not in text


def test_what_is_not_known_is_left_out(folder: Path, base: Path) -> None:
    (base / CARD_FILE).unlink()
    (folder.parent / "metrics.jsonl").unlink()
    (folder.parent / "header.json").unlink()
    write_card(Facts.read(folder, folder.parent, 2))
    card = ModelCard.load(folder / CARD_FILE)
    assert "license" not in card.data.to_dict()
    assert card.data.eval_results is None
    for heading in ("## Curves", "## Evaluation", "## Versions", "| device |", "None"):
        assert heading not in card.text, heading
    (folder.parent / "config.yaml").write_text("of: another version\n")
    write_card(Facts.read(folder, folder.parent, 2))
    assert "## Training" not in (folder / CARD_FILE).read_text()
    assert "base_model" not in ModelCard.load(folder / CARD_FILE).data.to_dict()


def test_results_of_lm_eval_are_rows_and_metadata(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps(LM_EVAL))
    assert main(["models", "card", str(folder), "--lm-eval", str(results)]) == 0
    card = ModelCard.load(folder / CARD_FILE)
    found = {(r.dataset_type, r.metric_name): r.metric_value for r in card.data.eval_results or []}
    assert found["openai/gsm8k", "exact_match (strict-match), 5-shot"] == 0.25
    assert found["openai/gsm8k", "exact_match (flexible-extract), 5-shot"] == 0.5
    assert found["mine", "acc, 0-shot"] == 0.75
    assert len(found) == 4  # with the validation
    assert "| mine | acc, 0-shot | 0.75 ± 0.1 | lm-evaluation-harness 0.4.9 |" in card.text
    with pytest.raises(UsageError, match=r"holds no results of lm-evaluation-harness .*: name the results_"):
        list(read_lm_eval(folder.parent / "config.yaml"))


def test_an_edited_card_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts.read(folder, folder.parent, 2)
    assert write_card(facts)
    assert write_card(facts)  # nemorl's own is
    assert not is_edited(folder)
    card = folder / CARD_FILE
    card.write_text(card.read_text() + "\nMy words.\n")
    edited = card.read_text()
    assert not write_card(facts)
    assert main(["models", "card", str(folder)]) == 2
    assert "was edited; it is not overwritten" in " ".join(capsys.readouterr().err.split())
    assert card.read_text() == edited


def test_folders_without_a_run_are_refused_with_the_fix(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "card", str(tmp_path)]) == 2
    assert "is not a folder that nemorl exported" in " ".join(capsys.readouterr().err.split())
    moved = folder.parent.rename(tmp_path / "moved")
    assert main(["models", "card", str(moved / "hf")]) == 2
    assert "name it with --run if it was moved" in " ".join(capsys.readouterr().err.split())
    assert main(["models", "card", str(moved / "hf"), "--run", str(moved)]) == 0


def test_curves_are_one_image_with_a_panel_each() -> None:
    steps = [StepMetrics(n, n, {"reward/mean": n / 10, "entropy": 2.0, "lr": 1e-6}) for n in range(1, 1001)]
    image = curves_svg(steps)
    assert image is not None
    root = ElementTree.fromstring(image)
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    points = [tuple(map(float, point.split(","))) for point in lines[0].attrib["points"].split()]
    assert len(points) <= 400
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] > points[-1][1]  # it rises
    assert curves_svg(steps[:1]) is None
