"""`nemorl import`: the file, the table, exit statuses and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.cli import main
from nemorl.config.load import load_experiment
from nemorl.importing.rules import place
from tests.importing.recipes import recipes
from tests.plan.models import write_model

TRL = """\
model_name_or_path: org/model
reward_funcs: [rewards.accuracy]
dataset_name: org/data
max_steps: 10
loss_type: grpo
scale_rewards: batch
logging_steps: 5
top_p: 0.9
use_vllm: true
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "grpo.yaml"
    file.write_text(TRL, encoding="utf-8")
    return file


def test_a_file_is_written_and_loads(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    assert main(["import", str(config), "--from", "trl", "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert "mapped (" in shown.out
    assert "changed in meaning (1)" in shown.out
    assert "without counterpart, and the result changes (1)" in shown.out
    assert (
        f"{out} is written; run `nemorl check {out}`. 6 of 9 keys mapped, 1 changed in meaning, 1"
        in shown.err
    )
    text = out.read_text(encoding="utf-8")
    assert text.startswith("# Imported from TRL: grpo.yaml\n")
    assert "# From dataset_name\ndata:\n" in text
    assert load_experiment(out).algorithm.num_steps == 10
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("imported-")] == []


def test_without_out_the_experiment_is_the_output(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(config), "--from", "trl"]) == 0
    assert capsys.readouterr().out.startswith("# Imported from TRL")


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(config), "--from", "trl", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {row["key"]: row for row in report["keys"]}
    assert keys["loss_type"]["outcome"] == "mapped"
    assert keys["top_p"] == {
        "key": "top_p",
        "value": 0.9,
        "outcome": "none",
        "fields": [],
        "note": "the loss would need the tokens that the engine's filter kept; left out",
        "changes_result": True,
    }
    assert report["experiment"]["algorithm"]["loss"]["aggregation"] == "seq-mean-token-mean"


def test_an_unknown_key_is_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(f"{TRL}num_generatoins: 4\n", encoding="utf-8")
    assert main(["import", str(config), "--from", "trl"]) == 1
    assert "1 unknown key: num_generatoins; check them by hand" in capsys.readouterr().err


def test_what_cannot_be_imported_is_an_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(f"{TRL}num_generations: 3\n", encoding="utf-8")
    assert main(["import", str(config), "--from", "trl"]) == 2
    assert (
        "num_generations = 3: the 8 trajectories of a step are no multiple of it" in capsys.readouterr().err
    )
    assert main(["import", "nothing.yaml", "--from", "verl"]) == 2
    assert "nothing.yaml: there is no such file; name the config of verl" in capsys.readouterr().err
    assert main(["import", str(config), "--from", "trl", "-o", str(config)]) == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_a_file_of_another_project_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "trl": TRL,
        "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a",
        "nemo-rl": "grpo:\n  num_prompts_per_step: 4\npolicy:\n  model_name: a\n",
    }
    for project, text in texts.items():
        config.write_text(text, encoding="utf-8")
        for other in texts.keys() - {project}:
            assert main(["import", str(config), "--from", other]) == 2
            assert f"{config}: this is a config of" in (error := capsys.readouterr().err)
            assert f"use --from {project}" in error
    config.write_text("policy:\n  model_path: a\n", encoding="utf-8")
    assert main(["import", str(config), "--from", "verl"]) == 2
    assert "this is an experiment of nemorl already" in capsys.readouterr().err


def test_a_folder_is_no_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(config.parent), "--from", "trl"]) == 2
    assert "is a folder; name one config of TRL in it, such as grpo.yaml" in capsys.readouterr().err


def test_values_to_replace_have_a_comment(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(TRL.replace("dataset_name: org/data\n", ""), encoding="utf-8")
    assert main(["import", str(config), "--from", "trl"]) == 0
    shown = capsys.readouterr()
    assert (
        "    path: data/train.jsonl  # write the rows of the dataset here; dataset_name is not" in shown.out
    )
    assert "Values to replace: data/train.jsonl." in shown.err


def test_trl_without_vllm_samples_in_its_processes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(TRL.replace("use_vllm: true\n", ""), encoding="utf-8")
    assert main(["import", str(config), "--from", "trl", "--json"]) == 0
    generation = json.loads(capsys.readouterr().out)["experiment"]["generation"]
    assert generation["backend"] == "megatron"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("bf16: maybe", "bf16 = maybe: expected true or false; correct the value"),
        ("learning_rate: fast", "learning_rate = fast: expected a number; correct the value"),
        ("num_iterations: 1.5", "num_iterations = 1.5: expected an integer; correct the value"),
        (
            "importance_sampling_level: word",
            "importance_sampling_level = word: expected one of token, sequence; correct the value",
        ),
        ("adam_beta1: 2", "policy.optimizer.beta1 = 2  (from adam_beta1)"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(
    config: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str
) -> None:
    config.write_text(f"{TRL}{line}\n", encoding="utf-8")
    assert main(["import", str(config), "--from", "trl"]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert str(config) in error


def test_an_experiment_that_is_not_valid_is_an_error(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"{TRL}beta: -1\n", encoding="utf-8")
    assert main(["import", str(config), "--from", "trl"]) == 2
    error = capsys.readouterr().err
    assert "imported: 1 configuration error" in error
    assert "algorithm.kl.coefficient = -1" in error


def test_a_chat_template_is_written_next_to_the_experiment(tmp_path: Path) -> None:
    values = recipes("nemo-rl")["sft.yaml"] | {"policy.tokenizer.chat_template": "{{ messages }}"}
    tree: dict[str, Any] = {}
    for key, value in values.items():
        place(tree, key, value)
    config, out = tmp_path / "sft.yaml", tmp_path / "mine.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["import", str(config), "--from", "nemo-rl", "-o", str(out)]) == 0
    assert (tmp_path / "mine.jinja").read_text(encoding="utf-8") == "{{ messages }}"
    assert load_experiment(out).policy.tokenizer.chat_template == tmp_path / "mine.jinja"


def test_an_imported_recipe_passes_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With folders in place of the model and the data: all checks but that of GPUs, which are not here."""
    recipe = recipes("nemo-rl")["grpo_math_8B_megatron.yaml"]
    model = write_model(tmp_path / "model", max_position_embeddings=131072)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1+1=", "output": "2"}\n', encoding="utf-8")
    kept = {key: value for key, value in recipe.items() if not key.startswith("data.train.")}
    changed = {
        "policy.model_name": str(model),
        "policy.tokenizer.name": str(model),
        "checkpointing.checkpoint_dir": str(tmp_path / "run"),
        "data.train.data_path": str(rows),
        "data.default.prompt_file": None,
        "grpo.val_period": 0,
        "grpo.max_num_steps": 100,
    }
    tree: dict[str, Any] = {}
    for key, value in (kept | changed).items():
        place(tree, key, value)
    config, out = tmp_path / "recipe.yaml", tmp_path / "experiment.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["import", str(config), "--from", "nemo-rl", "-o", str(out)]) == 0
    capsys.readouterr()
    code = main(["check", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert f"{out}: OK" in shown.out
