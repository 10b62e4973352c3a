"""Shipped experiments on the command line: `nemorl recipes`, names instead of files, `nemorl quickstart`."""

import json
import shutil
from pathlib import Path

import pytest

from nemorl.config import shipped
from nemorl.errors import RunStopped
from tests.cli.conftest import Nemorl, Outcome, Trainer
from tests.plan.models import write_model

ROOT = Path(__file__).parents[2]


def test_the_list_has_a_line_for_each_and_the_commands_before_a_run(nemorl: Nemorl) -> None:
    outcome = nemorl("recipes", "list", "guess")
    head, row = outcome.out.splitlines()
    assert head.split() == ["name", "algorithm", "model", "devices", "description"]
    assert row.split()[:6] == ["grpo_guess_number", "grpo", "models/arithmetic", "CPU", "GRPO", "in"]
    assert "nemorl models create arithmetic models/arithmetic" in outcome.err
    assert len(nemorl("recipes", "list").out.splitlines()) == 1 + len(shipped.recipes())


def test_the_list_as_json(nemorl: Nemorl) -> None:
    (only,) = json.loads(nemorl("recipes", "list", "algorithms/dapo", "--json").out)
    assert only == {
        "name": "algorithms/dapo",
        "algorithm": "dapo",
        "model": "runs/quickstart/sft/hf",
        "devices": "CPU",
        "description": "DAPO, on the sums of the quickstart after its first half (nemorl quickstart)",
        "needs": {"runs/quickstart/sft/hf": "nemorl train quickstart/sft"},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["recipes", "list", "quickstart/gpro"],
        ["recipes", "show", "quickstart/gpro"],
        ["recipes", "copy", "quickstart/gpro"],
        ["check", "quickstart/gpro"],
        ["train", "quickstart/gpro"],
        ["simulate", "quickstart/gpro"],
        ["plan", "layouts", "quickstart/gpro", "--gpus", "2"],
        ["slurm", "submit", "quickstart/gpro"],
    ],
    ids=" ".join,
)
def test_an_unknown_name_is_refused_with_the_nearest_one(nemorl: Nemorl, words: list[str]) -> None:
    outcome = nemorl(*words)
    assert outcome.status == 2
    assert "did you mean `quickstart/grpo`" in outcome.err
    assert "`nemorl recipes list` shows the experiments that come with nemorl" in outcome.err


def test_show_prints_the_file_and_what_it_builds_on(nemorl: Nemorl) -> None:
    outcome = nemorl("recipes", "show", "algorithms/dapo")
    assert outcome.out == (ROOT / "configs/algorithms/dapo.yaml").read_text(encoding="utf-8")
    assert "builds on quickstart/grpo, quickstart/sft" in outcome.err


def test_copy_overwrites_nothing_that_differs(nemorl: Nemorl, tmp_path: Path) -> None:
    files = ["dapo.yaml", "quickstart/grpo.yaml", "quickstart/sft.yaml"]
    outcome = nemorl("recipes", "copy", "algorithms/dapo")
    assert (outcome.status, sorted(outcome.out.splitlines())) == (0, files)
    assert "defaults: quickstart/grpo.yaml\n" in (tmp_path / "dapo.yaml").read_text(encoding="utf-8")
    assert nemorl("recipes", "copy", "algorithms/gspo").status == 0  # which has the same parents

    changed = tmp_path / "quickstart" / "sft.yaml"
    changed.write_text("seed: 1\n", encoding="utf-8")
    outcome = nemorl("recipes", "copy", "algorithms/rloo")
    assert outcome.status == 2
    assert outcome.err.startswith("quickstart/sft.yaml: exists and differs")
    assert not (tmp_path / "rloo.yaml").exists()
    assert nemorl("recipes", "copy", "algorithms/rloo", "--force").status == 0
    assert changed.read_bytes() == (ROOT / "configs/quickstart/sft.yaml").read_bytes()


def test_copy_to_a_file_and_to_a_folder(nemorl: Nemorl, tmp_path: Path) -> None:
    nemorl("recipes", "copy", "quickstart/sft", "mine/first.yaml")
    nemorl("recipes", "copy", "quickstart/sft", "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["first.yaml", "sft.yaml"]


def test_a_name_is_checked_and_keeps_file_and_line_in_errors(nemorl: Nemorl, tmp_path: Path) -> None:
    outcome = nemorl("check", "quickstart/sft")
    assert outcome.status == 2
    assert f"({ROOT}/configs/quickstart/sft.yaml:6)" in outcome.err
    assert "`nemorl models create arithmetic models/arithmetic` writes it" in outcome.err
    write_model(tmp_path / "models" / "arithmetic")
    assert (
        nemorl("check", "quickstart/sft", "policy.layout.tensor_parallel_size=1").out
        == "quickstart/sft: OK\n"
    )


def test_environments_of_a_named_experiment(nemorl: Nemorl) -> None:
    outcome = nemorl("env", "try", "grpo_guess_number", "--agent", "scripted", "--say", "5")
    assert outcome.status == 0
    assert "0+9=" in outcome.out


class TestQuickstart:
    def test_it_creates_the_model_and_trains_twice(
        self, nemorl: Nemorl, trainer: Trainer, tmp_path: Path
    ) -> None:
        outcome = self.run(nemorl, trainer, tmp_path)
        assert trainer.calls == [("train", 300), ("train", 120)]
        headings = [line for line in outcome.out.splitlines() if line.startswith("==")]
        assert headings == [
            "== 1/3  Create a model of about a million parameters ==",
            "== 2/3  Supervised fine-tuning on data with errors ==",
            "== 3/3  GRPO: two policy processes, a generation worker, held-out accuracy before and after ==",
        ]
        assert "run: runs/quickstart/grpo" in outcome.out
        assert (tmp_path / "place" / "models" / "arithmetic" / "config.json").exists()

    def test_it_deletes_nothing_and_continues_what_it_finds(
        self, nemorl: Nemorl, trainer: Trainer, tmp_path: Path
    ) -> None:
        place = tmp_path / "place"
        model = write_model(place / "models" / "arithmetic")
        run = place / "runs" / "quickstart" / "sft"
        for file in (run / "metrics.jsonl", run / "notes.txt", model / "notes.txt"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}\n", encoding="utf-8")
        weights = (model / "model.safetensors").read_bytes()
        outcome = self.run(nemorl, trainer, tmp_path)
        assert trainer.calls == [("resume", 300), ("train", 120)]
        assert (run / "notes.txt").exists()
        assert (model / "notes.txt").exists()
        assert (model / "model.safetensors").read_bytes() == weights
        assert "To start over, remove models/arithmetic and runs/quickstart" in outcome.out

    def test_it_ends_with_the_first_run_that_fails(
        self, nemorl: Nemorl, trainer: Trainer, tmp_path: Path
    ) -> None:
        trainer.failure = RunStopped("Stopped by SIGTERM after step 12.")
        assert nemorl("quickstart").status == 75
        assert trainer.calls == [("train", 300)]

    def test_a_folder_that_cannot_be_created_is_refused(self, nemorl: Nemorl, trainer: Trainer) -> None:
        Path("place").write_text("a file", encoding="utf-8")
        outcome = nemorl("quickstart", "--dir", "place/below")
        assert outcome.status == 2
        assert "below cannot be created (Not a directory); give another --dir" in outcome.err
        assert trainer.calls == []

    def run(self, nemorl: Nemorl, trainer: Trainer, tmp_path: Path) -> Outcome:
        """In a folder whose second run finds the model of the first, which the stand-in does not write."""
        model = write_model(tmp_path / "weights")
        hf = tmp_path / "place" / "runs" / "quickstart" / "sft" / "hf"
        shutil.copytree(model, hf)
        return nemorl("quickstart", "--dir", "place")
