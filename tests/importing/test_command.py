"""`nemorl import`: the file, the table, exit statuses and errors."""

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.cli import main
from nemorl.config.load import load_experiment
from nemorl.config.server_environments import NemoGymEnvConfig
from nemorl.importing.document import PROJECTS, import_values
from nemorl.importing.rules import Options, place
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
    assert "changed in meaning (3)" in shown.out
    assert "without counterpart, and the result changes" not in shown.out
    assert (
        f"{out} is written; run `nemorl check {out}`. 5 of 9 keys mapped, 3 changed in meaning, 0"
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
        "outcome": "changed",
        "fields": ["generation.sampling.top_p"],
        "note": "the loss is of the tokens that it keeps, and there of all tokens",
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


def test_variables_that_a_script_does_not_set_are_values_to_replace(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = config.with_suffix(".sh")
    words = (
        "actor_rollout_ref.model.path=$MODEL/a data.train_files=$HOME/b.parquet data.val_files=c.parquet "
        "trainer.default_local_dir=${ROOT}/d trainer.total_training_steps=5"
    )
    script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    assert main(["import", str(script), "--from", "verl"]) == 0
    shown = capsys.readouterr()
    lines = [line.strip() for line in shown.out.splitlines()]
    assert "run_dir: $ROOT/d  # nothing sets $ROOT; write the value" in lines
    assert "model_path: $MODEL/a  # nothing sets $MODEL; write the value" in lines
    assert "path: b.parquet" in lines
    assert "Values to replace: $ROOT/d, $MODEL/a." in shown.err


def test_defaults_in_a_complete_config_of_verl_are_known_and_do_nothing() -> None:
    """Hydra's config.yaml of a run has every key, those of distillation that is off included."""
    teacher = "distillation.teacher_models.teacher_model"
    defaults: dict[str, Any] = {
        **{f"sandbox_fusion.{name}": None for name in ("url", "max_concurrent", "memory_limit_mb")},
        **{f"skip.{name}.enable": False for name in ("rollout", "rollout_tq", "async_rollout")},
        "skip.rollout.dump_dir": "~/.verl/rollout_dump",
        "skip.rollout.steps": [],
        "distillation.enabled": False,
        "distillation.teacher_key": "data_source",
        "distillation.distillation_loss.loss_mode": "k3",
        f"{teacher}.model_path": None,
        f"{teacher}.inference.tensor_model_parallel_size": 2,
    }
    given = {"actor_rollout_ref.model.path": "org/model", "trainer.total_training_steps": 5}
    rows = {row.key: row for row in import_values(PROJECTS["verl"], defaults | given, compares=True).rows}
    for key in defaults:
        assert (rows[key].outcome, rows[key].fields, rows[key].changes_result) == ("none", (), False), key
    stored = import_values(PROJECTS["verl"], given | {"skip.rollout.enable": True})
    (row,) = [row for row in stored.rows if row.key == "skip.rollout.enable"]
    assert row.changes_result


def test_a_run_folder_of_verl_in_the_home_folder_is_one_in_the_current_folder(config: Path) -> None:
    values = {
        "actor_rollout_ref.model.path": "org/model",
        "trainer.default_local_dir": "$HOME/checkpoints/mine",
        "trainer.total_training_steps": 5,
    }
    assert import_values(PROJECTS["verl"], values).tree["run_dir"] == "checkpoints/mine"


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


def flat(values: Mapping[str, object]) -> str:
    """A YAML file with values by their dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        place(tree, key, value)
    return yaml.safe_dump(tree)


def imported_recipe(tmp_path: Path, name: str, **changes: object) -> Path:
    """The experiment `mine.yaml` of a recipe of NeMo-RL."""
    config, out = tmp_path / "recipe.yaml", tmp_path / "mine.yaml"
    config.write_text(flat(recipes("nemo-rl")[name] | changes), encoding="utf-8")
    assert main(["import", str(config), "--from", "nemo-rl", "-o", str(out)]) == 0
    return out


def test_settings_of_the_servers_of_nemo_gym_are_written_next_to_the_experiment(tmp_path: Path) -> None:
    out = imported_recipe(tmp_path, "recipes/llm/grpo-nanov3-30BA3B-2n8g-megatron_generation-async-gym.yaml")
    env = load_experiment(out).env
    assert isinstance(env, NemoGymEnvConfig)
    assert (env.url, env.url_of, env.skip_flagged) == ("http://127.0.0.1:11000", "head", True)
    servers = yaml.safe_load((tmp_path / "mine.nemo_gym.yaml").read_text(encoding="utf-8"))
    # Without what NeMo-RL itself reads.
    assert sorted(servers) == ["code_gen", "math_with_judge"]
    judged = servers["math_with_judge"]["resources_servers"]["math_with_judge"]
    assert judged == {"should_use_judge": False, "judge_model_server": {"name": "policy_model"}}


def test_rewards_of_nemo_gym_have_the_weights_of_gdpo(tmp_path: Path) -> None:
    out = imported_recipe(tmp_path, "recipes/llm/gdpo-qwen2.5-1.5b-1n8g-gym-multireward.yaml")
    env = load_experiment(out).env
    assert env.reward_weights == {"correctness": 1.0, "format": 0.5, "schema_valid": 0.25}


def test_a_chat_template_is_written_next_to_the_experiment(tmp_path: Path) -> None:
    out = imported_recipe(tmp_path, "sft.yaml", **{"policy.tokenizer.chat_template": "{{ messages }}"})
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


def error_of(file: Path, text: str, *arguments: str) -> str:
    """What `nemorl import` says of a file with this text, which is refused."""
    file.write_text(text, encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main(["import", str(file), *arguments]) == 2
    return stream.getvalue()


def test_every_problem_is_listed_at_once(config: Path) -> None:
    """Unknown keys as well, and values that a rule reads only after the one that it refuses."""
    text = TRL.replace("max_steps: 10\n", "").replace("loss_type: grpo", "loss_type: grppo")
    error = error_of(config, f"{text}num_generatoins: 4\nlearning_rate: fast\n", "--from", "trl")
    lines = error.splitlines()
    assert lines[0] == f"{config}: 4 problems"
    listed = "those that are: grpo, sapo, bnpo, dapo, cispo, dr_grpo"
    assert lines[1:] == [
        f"  loss_type = grppo: did you mean `grpo`? this loss is not imported; {listed}",
        "  learning_rate = fast: expected a number; correct the value",
        # The last question: other values may be all that is wrong.
        "  the run ends after epochs, and the number of rows of its data is not known; give --rows N",
        "  num_generatoins: unknown key; did you mean num_generations?",
    ]


def test_an_unknown_key_is_named_with_what_the_checks_refuse(config: Path) -> None:
    error = error_of(config, f"{TRL}beta: -1\nnum_generatoins: 4\n", "--from", "trl")
    assert "num_generatoins: unknown key; did you mean num_generations?" in error
    assert "algorithm.kl.coefficient = -1" in error


@pytest.mark.parametrize(
    ("key", "value", "choice"),
    [
        ("algorithm.adv_estimator", "grp", "grpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gsp", "gspo"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token_mean", "token-mean"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_k", "low_var_kl"),
    ],
)
def test_a_misspelled_value_has_its_choices(config: Path, key: str, value: str, choice: str) -> None:
    base = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": "True",
        "trainer.total_training_steps": 5,
    }
    words = " ".join(f"{name}={given}" for name, given in (base | {key: value}).items())
    script = config.with_suffix(".sh")
    error = error_of(script, f"python3 -m verl.trainer.main_ppo {words}\n", "--from", "verl")
    assert f"{key} = {value}: did you mean `{choice}`? " in error


def test_a_value_of_the_origin_is_no_misspelling_of_another(config: Path) -> None:
    script = config.with_suffix(".sh")
    words = "algorithm.adv_estimator=gpdo trainer.total_training_steps=5"
    error = error_of(script, f"python3 -m verl.trainer.main_ppo {words}\n", "--from", "verl")
    assert "adv_estimator = gpdo: this estimator is not imported; those that are: grpo, " in error


def test_what_is_no_yaml_has_its_line(config: Path) -> None:
    problems = {
        "grpo:\n  a: 1\n b: [\n": f"{config}:3: invalid YAML: ",
        "grpo:\n  a: '${grpo.b'\n": f"{config}:2: invalid reference; close its braces",
        "grpo: {a: 1}\n---\ngrpo: {a: 2}\n": f"{config}:2: invalid YAML: ",
    }
    for text, problem in problems.items():
        assert error_of(config, text, "--from", "nemo-rl").startswith(problem)


def test_a_file_without_sections_is_no_config(config: Path) -> None:
    for text, what in {"3\n": "a single value", "- a\n": "a list"}.items():
        error = error_of(config, text, "--from", "nemo-rl")
        assert error.strip() == (
            f"{config}: there is {what} at the top level; name a config, which has sections there"
        )


@pytest.mark.parametrize("names", [7, {"a": "b"}, ["base.yaml", None], True])
def test_defaults_are_paths(config: Path, names: object) -> None:
    (config.parent / "base.yaml").write_text("grpo: {a: 1}\n", encoding="utf-8")
    error = error_of(config, yaml.safe_dump({"defaults": names}), "--from", "nemo-rl")
    assert error.strip() == (f"{config}: defaults = {names}: expected a path or a list of paths; correct it")


def test_a_list_does_not_replace_an_inherited_section(config: Path) -> None:
    (config.parent / "base.yaml").write_text("grpo: {a: {b: 1}, c: [{d: 1}]}\n", encoding="utf-8")
    error = error_of(config, "defaults: base.yaml\ngrpo: {a: [3], c: {d: 2}}\n", "--from", "nemo-rl")
    assert error.splitlines()[1:] == [
        "  grpo.a = [3]: the inherited file has a section there; give a section",
        "  grpo.c = {'d': 2}: the inherited file has a list there; give a list",
    ]


def test_references_without_a_value_are_listed_in_our_words(config: Path) -> None:
    text = "grpo: {a: '${policy.nam}', b: '${env:X}', c: '${div:1,0}', d: '${mul:${z},2}', e: '${grpo.e}'}\n"
    assert error_of(config, text, "--from", "nemo-rl").splitlines() == [
        f"{config}: 5 problems",
        "  grpo.a = ${policy.nam}: there is no key `policy.nam`; correct the reference, or give the key",
        "  grpo.b = ${env:X}: `env` is no resolver that is read; write the value instead",
        "  grpo.c = ${div:1,0}: the reference has no value (division by zero); write the value instead",
        "  grpo.d = ${mul:${z},2}: there is no key `z`; correct the reference, or give the key",
        "  grpo.e = ${grpo.e}: circular reference; write the value",
    ]


def test_an_empty_file_is_no_config(config: Path) -> None:
    for name in ("empty.yaml", "empty.sh"):
        file = config.with_name(name)
        for text in ("", "# later\n"):
            error = error_of(file, text, "--from", "verl")
            assert f"{file}: the file has no keys; name a config of verl" in error
            assert "policy." not in error


def test_a_missing_key_is_that_of_the_origin(config: Path) -> None:
    error = error_of(config, "trainer: {total_training_steps: 5}\n", "--from", "verl")
    assert "(from actor_rollout_ref.model.path, which is not given)" in error


def test_reward_functions_are_remarked_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names, note in (
        (
            "[rewards.accuracy, mine.length]",
            "as TRL calls them; keep rewards, mine where a run can import it",
        ),
        ("accuracy_reward", "functions of TRL, which has to be installed where a run starts"),
    ):
        config.write_text(TRL.replace("[rewards.accuracy]", names), encoding="utf-8")
        assert main(["import", str(config), "--from", "trl", "--json"]) == 0
        (row,) = [row for row in json.loads(capsys.readouterr().out)["keys"] if row["key"] == "reward_funcs"]
        assert (row["outcome"], row["note"], row["changes_result"]) == ("changed", note, False)
    error = error_of(config, TRL.replace("[rewards.accuracy]", "accuracy_rewrd"), "--from", "trl")
    assert "reward_funcs = accuracy_rewrd: did you mean `accuracy_reward`?" in error


def test_what_follows_from_a_wrong_value_is_not_listed(config: Path) -> None:
    """The number of prompts is read with the length of the run, too."""
    recipe = flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | {"grpo.num_prompts_per_step": "many"})
    error = error_of(config, recipe, "--from", "nemo-rl")
    assert (
        error.strip() == f"{config}: grpo.num_prompts_per_step = many: expected an integer; correct the value"
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("policy.optimizer.kwargs.betas", [0.9], "expected a value of the type that the key has there"),
        ("policy.scheduler", [{"name": 3}], "expected a value of the type that the key has there"),
        ("policy.train_global_batch_size", 0, "expected at least 1"),
    ],
)
def test_a_value_at_which_a_rule_fails_is_named_with_its_own_key(
    config: Path, key: str, value: object, problem: str
) -> None:
    """And not with all keys of the rule: the recipe's optimizer is one of torch's, which others are near."""
    recipe = flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | {key: value})
    error = error_of(config, recipe, "--from", "nemo-rl")
    assert error.startswith(f"{config}: {key} = {value}: {problem}")
    assert len(error.splitlines()) == 1


def test_all_values_at_which_a_rule_fails_are_named(config: Path) -> None:
    changed: dict[str, object] = {"policy.optimizer.kwargs.betas": [0.9], "policy.scheduler": [{"name": 3}]}
    error = error_of(config, flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | changed), "--from", "nemo-rl")
    for key, value in changed.items():
        assert f"{key} = {value}" in error
    assert "megatron" not in error


def test_a_value_in_place_of_a_section_is_an_error(config: Path) -> None:
    """Its keys would have their defaults: here Adam's learning rate."""
    recipe = {
        key: value
        for key, value in recipes("nemo-rl")["grpo_math_1B.yaml"].items()
        if not key.startswith(("policy.optimizer.", "cluster."))
    }
    error = error_of(config, flat(recipe | {"policy.optimizer": 7, "cluster": "none"}), "--from", "nemo-rl")
    assert set(error.splitlines()[1:]) == {
        "  policy.optimizer = 7: expected a section; correct it, or leave it out",
        "  cluster = none: expected a section; correct it, or leave it out",
    }


def test_an_item_of_a_list_is_named_with_the_key_of_the_list(config: Path) -> None:
    """And not with others of its rule that have the same value, such as an engine's parallel sizes."""
    recipe = flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | {"policy.generation.stop_strings": [1]})
    error = error_of(config, recipe, "--from", "nemo-rl")
    assert "generation.stop_strings.0 = 1  (from policy.generation.stop_strings)" in error


def test_a_filter_of_no_distribution_is_refused(config: Path) -> None:
    recipe = flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | {"policy.generation.top_p": 3.0})
    error = error_of(config, recipe, "--from", "nemo-rl")
    assert "generation.sampling.top_p = 3.0  (from policy.generation.top_p)" in error


def test_a_value_that_is_no_number_is_named_with_its_own_key(config: Path) -> None:
    recipe = flat(recipes("nemo-rl")["grpo_math_1B.yaml"] | {"loss_fn.ratio_clip_min": float("nan")})
    error = error_of(config, recipe, "--from", "nemo-rl")
    assert "algorithm.loss.clip_low = NaN  (from loss_fn.ratio_clip_min)" in error


def steps_and_notes(recipe: str, rows: int | None = None, **values: object) -> tuple[int, dict[str, str]]:
    """Steps of the run that a recipe of NeMo-RL becomes, and the notes on its keys."""
    imported = import_values(PROJECTS["nemo-rl"], recipes("nemo-rl")[recipe] | values, Options(rows=rows))
    return imported.tree["algorithm"]["num_steps"], {row.key: row.note for row in imported.rows}


def test_an_epoch_of_dynamic_sampling_has_a_step_for_each_batch_of_its_loader() -> None:
    """The recipe draws 3 * 512 rows at a time, of 95% of 1,791,700."""
    recipe = "recipes/llm/dapo-qwen2.5-7b.v2.yaml"
    assert steps_and_notes(recipe)[0] == 1_702_115 // 1536
    assert steps_and_notes(recipe, **{"grpo.use_dynamic_sampling": False})[0] == 1_702_115 // 512


def test_epochs_of_data_whose_rows_are_not_known_are_reported() -> None:
    values = {"data.train.dataset_name": "mine", "grpo.num_prompts_per_step": 32}
    steps, notes = steps_and_notes("grpo_math_1B.yaml", **values)
    assert steps == 1_000_000
    assert "give --rows N" in notes["grpo.max_num_epochs"]
    steps, notes = steps_and_notes("grpo_math_1B.yaml", 3200, **values)
    assert (steps, notes["grpo.max_num_epochs"]) == (100, "")


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma3_text"])
def test_adapters_of_trl_without_targets_have_those_of_peft(family: str) -> None:
    peft = pytest.importorskip("peft.utils.constants")
    values = yaml.safe_load(TRL) | {"use_peft": True}
    targets = import_values(PROJECTS["trl"], values).tree["policy"]["lora"]["targets"]
    assert targets == peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[family]


def test_a_folder_that_cannot_be_written_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert main(["import", str(config), "--from", "trl", "-o", str(config.parent / "mine.yaml")]) == 2
    problem = (
        f"{config.parent}: nothing can be written here: Permission denied; name a file in another folder"
    )
    assert problem in capsys.readouterr().err
    assert [path.name for path in config.parent.iterdir()] == ["grpo.yaml"]


@pytest.mark.parametrize("recipe", ["grpo_math_1B.yaml", "recipes/llm/dapo-qwen2.5-7b.v2.yaml"])
def test_the_overrides_of_the_page_make_an_imported_recipe_run_here(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs/moving_in.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^nemorl train experiment\.yaml (.*?)^```", page, re.DOTALL | re.MULTILINE)
    sizes = re.sub(r"(\S*){(\w+(?:,\w+)+)}(\S*)", each_of_braces, command.replace("\\\n", " "))
    prompts = tmp_path / "examples" / "prompts"
    prompts.mkdir(parents=True)
    (prompts / "cot.txt").write_text("Think step by step.\n{}\n", encoding="utf-8")
    out = imported_recipe(tmp_path, recipe, **{"data.default.prompt_file": "examples/prompts/cot.txt"})
    assert "Think" in load_experiment(out).data.prompt_template
    reward = "def digits(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    (tmp_path / "my_rewards.py").write_text(reward, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop("my_rewards", None))  # other tests have one of that name
    assert main(["models", "create", "arithmetic", "models/arithmetic"]) == 0
    capsys.readouterr()
    assert main(["train", str(out), *shlex.split(sizes), "--dry-run"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    # The tiny model's tokens are digits: it cannot encode the words of a recipe's prompt.
    assert (data["prompt_template"], data.get("system_prompt")) == ("{prompt}", None)


def each_of_braces(match: re.Match[str]) -> str:
    """The words that a shell makes of `a{b,c}d`."""
    return " ".join(f"{match[1]}{one}{match[3]}" for one in match[2].split(","))
