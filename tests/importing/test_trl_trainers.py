"""TRL's trainers: how they are recognized, and their keys and defaults against the installed version."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemorl.cli import main
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError
from nemorl.importing.document import PROJECTS, checked, import_file, import_values, to_text
from nemorl.importing.rules import CannotImport, Imported, Options, Part
from nemorl.importing.trl_trainers import IMPORTED, OWN, trainer_of

TRL = PROJECTS["trl"]
OFFLINE = [name for name in IMPORTED if name != "grpo"]
BASE: dict[str, Any] = {"model_name_or_path": "org/model", "dataset_name": "org/data"}
OPTIONS = Options(rows=800)
# By command: the config's classes, and those of its script.
_SCRIPT = [("trl/scripts/utils.py", "ScriptArguments"), ("trl/scripts/utils.py", "DatasetMixtureConfig")]
_SHARED = [
    ("transformers/training_args.py", "TrainingArguments"),
    ("trl/trainer/base_config.py", "_BaseConfig"),
    ("trl/trainer/model_config.py", "ModelConfig"),
]
_RENAMED = {"grpo": "GRPO", "sft": "SFT", "dpo": "DPO", "kto": "KTO", "rloo": "RLOO"}


@cache
def fields_of(path: str, name: str) -> dict[str, Any]:
    """Fields of a dataclass of an installed package and their literal defaults; nothing is imported."""
    package, _, inside = path.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / inside).read_text(encoding="utf-8"))
    (found,) = [one for one in module.body if isinstance(one, ast.ClassDef) and one.name == name]
    fields = [
        one for one in found.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    return {one.target.id: _default(one.value) for one in fields if isinstance(one.target, ast.Name)}


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        given = {one.arg: one.value for one in value.keywords}
        value = given.get("default") or given.get("default_factory")
        value = value.body if isinstance(value, ast.Lambda) else value
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:  # another constant, or a factory
        return None


def arguments_of(trainer: str) -> dict[str, Any]:
    """All keys that `trl TRAINER` reads, and their defaults."""
    found: dict[str, Any] = {}
    for path, name in [*_SHARED, *_SCRIPT]:
        found |= fields_of(path, name)
    config = f"{_RENAMED.get(trainer, trainer.title())}Config"
    found |= fields_of(f"trl/trainer/{trainer}_config.py", config)
    if trainer in ("grpo", "rloo"):
        found |= fields_of(f"trl/scripts/{trainer}.py", f"{trainer.upper()}ScriptArguments")
    return found


def imported(trainer: str, **values: Any) -> Imported:
    return import_values(TRL, {"trainer": trainer, **BASE, **values}, OPTIONS)


def experiment(trainer: str, folder: Path, **values: Any) -> Any:
    return checked(to_text(imported(trainer, **values), TRL, "test"), folder)


def test_own_keys_are_those_of_the_installed_version() -> None:
    every = {name: set(arguments_of(name)) for name in OWN}
    common = set.intersection(*every.values())
    assert {name: keys - common for name, keys in every.items()} == OWN


@pytest.mark.parametrize("trainer", IMPORTED)
def test_every_key_of_the_installed_version_has_a_rule(trainer: str) -> None:
    given = {key: value for key, value in arguments_of(trainer).items() if value is not None}
    rules = TRL.trainers[trainer].rules
    known = {key for rule in rules for key in rule.keys}
    assert not arguments_of(trainer).keys() - known
    rows = imported(trainer, **{**given, "report_to": "none", "max_steps": 10}).rows
    assert not [row.key for row in rows if row.outcome == "unknown"]
    # At TRL's own values what differs is only what the notes of docs/moving_in.md say.
    lost = {row.key for row in rows if row.outcome == "none" and row.changes_result}
    assert lost == {"lora_dropout"}


@pytest.mark.parametrize("trainer", IMPORTED)
def test_defaults_are_those_of_the_installed_version(trainer: str) -> None:
    theirs = arguments_of(trainer) | {"num_processes": 1, "num_machines": 1, "bf16": True}
    if trainer == "dpo":
        theirs["loss_type"] = "sigmoid"  # the only one of its list
    ours = TRL.trainers[trainer].defaults
    assert {key: theirs[key] for key in ours} == dict(ours)


# Values of other keys with which a key has an effect, and two of its own.
_PEFT = {"use_peft": True}
_EVALUATED = {"eval_strategy": "steps"}
_MIXTURE = [{"path": "org/a"}, {"path": "org/b", "name": "x", "split": "test"}]
SHARED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "model_name_or_path": ({}, "a/b", "a/c"),
    "model": ({"model_name_or_path": None}, "a/b", "a/c"),
    "per_device_train_batch_size": ({}, 8, 16),
    "gradient_accumulation_steps": ({}, 1, 2),
    "max_steps": ({}, 10, 20),
    "num_train_epochs": ({}, 1.0, 2.0),
    "max_length": ({}, 512, 1024),
    "learning_rate": ({}, 1e-6, 1e-5),
    "weight_decay": ({}, 0.0, 0.1),
    "adam_beta1": ({}, 0.9, 0.8),
    "adam_beta2": ({}, 0.9, 0.8),
    "adam_epsilon": ({}, 1e-8, 1e-7),
    "max_grad_norm": ({}, 1.0, 0.5),
    "lr_scheduler_type": ({}, "linear", "constant"),
    "warmup_steps": ({}, 10, 0.5),
    "warmup_ratio": ({}, 0.1, 0.2),
    "bf16": ({}, True, False),
    "gradient_checkpointing": ({}, True, False),
    "activation_offloading": ({}, True, False),
    "use_peft": ({}, True, False),
    "lora_r": (_PEFT, 8, 16),
    "lora_alpha": (_PEFT, 8, 16),
    "lora_target_modules": (_PEFT, ["q_proj"], ["o_proj"]),
    "target_modules": (_PEFT, ["q_proj"], ["o_proj"]),
    "num_processes": ({}, 2, 4),
    "num_machines": ({"num_processes": 4}, 1, 2),
    "report_to": ({}, "none", "wandb"),
    "project": ({"report_to": "wandb"}, "a", "b"),
    "trackio_space_id": ({"report_to": "trackio"}, "a", "b"),
    "seed": ({}, 1, 2),
    "dataset_name": ({}, "org/a", "org/b"),
    "dataset_config": ({}, "a", "b"),
    "dataset_train_split": ({}, "a", "b"),
    "datasets": ({}, _MIXTURE, _MIXTURE[:1]),
    "train_sampling_strategy": ({}, "random", "sequential"),
    "eval_strategy": ({}, "no", "epoch"),
    "eval_steps": (_EVALUATED, 10, 0.5),
    "eval_on_start": (_EVALUATED, True, False),
    "dataset_test_split": (_EVALUATED, "a", "b"),
    "output_dir": ({}, "a", "b"),
    "save_steps": ({}, 10, 0.5),
    "save_strategy": ({}, "no", "epoch"),
    "save_total_limit": ({}, 1, 2),
}
OWN_KEYS: dict[str, dict[str, tuple[dict[str, Any], Any, Any]]] = {
    "sft": {
        "max_seq_length": ({}, 512, 1024),
        "loss_type": ({}, "nll", "dft"),
        "completion_only_loss": ({}, True, False),
        "assistant_only_loss": ({}, True, False),
        "shuffle_dataset": ({"train_sampling_strategy": "sequential"}, True, False),
        "chat_template_path": ({}, "a.jinja", "b.jinja"),
    },
    "dpo": {
        "loss_type": ({}, ["sigmoid"], "ipo"),
        "loss_weights": ({"loss_type": ["sigmoid", "sft"]}, [1.0, 0.1], [1.0, 0.2]),
        "beta": ({}, 0.1, 0.2),
        "label_smoothing": ({"loss_type": "robust"}, 0.1, 0.2),
        "ld_alpha": ({}, 1.0, 0.5),
        "f_divergence_type": ({}, "reverse_kl", "forward_kl"),
        "use_weighting": ({}, False, True),
        "precompute_ref_log_probs": ({}, True, False),
    },
    "reward": {
        "center_rewards_coefficient": ({}, 0.1, 0.2),
        "chat_template_path": ({}, "a.jinja", "b.jinja"),
    },
    "kto": {
        "loss_type": ({}, "kto", "apo_zero_unpaired"),
        "beta": ({}, 0.1, 0.2),
        "desirable_weight": ({}, 1.0, 1.1),
        "undesirable_weight": ({}, 1.0, 1.1),
        "precompute_ref_log_probs": ({}, True, False),
    },
}


def tree(trainer: str, **values: Any) -> dict[str, Any] | str:
    try:
        return imported(trainer, **values).tree
    except CannotImport as error:
        return str(error)


@pytest.mark.parametrize("trainer", OFFLINE)
def test_every_mapped_key_changes_the_experiment(trainer: str) -> None:
    cases = SHARED | OWN_KEYS[trainer]
    mapped = {key for rule in TRL.trainers[trainer].rules if isinstance(rule, Part) for key in rule.keys}
    assert mapped == cases.keys()
    for key, (context, first, second) in cases.items():
        one, two = (tree(trainer, **context | {key: value}) for value in (first, second))
        assert isinstance(one, dict), f"{key}: {one}"
        assert one != two, key
        assert isinstance(two, dict) or f"{key} = {second}: this loss is not imported" in two, two


_TEXT = (
    "name",
    "model",
    "name_or_path",
    "modules",
    "report_to",
    "project",
    "id",
    "config",
    "split",
    "dir",
    "path",
)


@pytest.mark.parametrize("trainer", OFFLINE)
def test_a_wrong_type_is_an_error_that_names_the_key(trainer: str, tmp_path: Path) -> None:
    for key, (context, _, _) in (SHARED | OWN_KEYS[trainer]).items():
        if not key.endswith(_TEXT):
            with pytest.raises((CannotImport, ConfigError), match=f"{key} = maybe|from .*{key}"):
                experiment(trainer, tmp_path, **context | {key: "maybe"})


@pytest.mark.parametrize("loss", ["exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "discopop"])
def test_losses_of_dpo_without_counterpart_are_refused(loss: str) -> None:
    problem = tree("dpo", loss_type=loss)
    assert isinstance(problem, str)
    assert "this loss is not imported; those that are: sigmoid, sigmoid_norm, ipo" in problem
    assert problem.startswith(f"loss_type = {loss}: ")
    both = tree("dpo", loss_type=["sigmoid", "ipo"])
    assert isinstance(both, str)
    assert "loss_type = sigmoid, ipo: one of sigmoid, sigmoid_norm, ipo" in both
    half = tree("dpo", loss_type=["sigmoid", "sft"], loss_weights=[0.5, 1.0])
    assert half == "loss_weights: sigmoid has the weight 0.5; divide all of them by it"


@pytest.mark.parametrize(
    ("trainer", "values", "expected"),
    [
        ("sft", {}, {"name": "sft", "train_on": "all"}),
        ("sft", {"assistant_only_loss": True}, {"train_on": "completion"}),
        ("sft", {"completion_only_loss": True}, {"train_on": "completion"}),
        ("dpo", {}, {"name": "dpo", "num_steps": 300, "batch_size": 8, "reference": "live"}),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, {"sft_coefficient": 0.2}),
        ("reward", {"num_processes": 4}, {"name": "reward_model", "num_steps": 75, "batch_size": 32}),
        ("kto", {"desirable_weight": 1.5}, {"name": "kto", "desirable_weight": 1.5}),
    ],
)
def test_experiments_pass_the_checks(
    trainer: str, values: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 20, "use_peft": trainer != "reward"}
    found = experiment(trainer, tmp_path, **more, **values)
    assert {key: getattr(found.algorithm, key) for key in expected} == expected
    assert found.algorithm.validation.period == 20
    assert found.data.validation.split == "test"
    assert found.policy.head == ("scalar" if trainer == "reward" else "lm")
    assert found.policy.max_sequence_length == 1024


def test_several_datasets_are_a_mixture(tmp_path: Path) -> None:
    values = BASE | {"dataset_name": None, "datasets": _MIXTURE}
    found = experiment("sft", tmp_path, **values).data
    assert {name: (str(s.dataset.path), s.dataset.split) for name, s in found.train.sources.items()} == {
        "a": ("org/a", "train"),
        "b": ("org/b", "test"),
    }


@pytest.mark.parametrize(
    ("values", "trainer"),
    [
        ({"packing": True, "max_length": 512}, "sft"),
        ({"max_seq_length": 512}, "sft"),
        ({"beta": 0.1, "label_smoothing": 0.1}, "dpo"),
        ({"beta": 0.1, "loss_type": ["ipo"]}, "dpo"),
        ({"loss_type": "nll"}, "sft"),
        ({"center_rewards_coefficient": 0.01}, "reward"),
        ({"beta": 0.1, "desirable_weight": 1.0}, "kto"),
        ({"reward_funcs": ["a.b"], "scale_rewards": "group"}, "grpo"),
        ({"num_generations": 4, "loss_type": "dapo"}, "grpo"),
    ],
)
def test_keys_of_one_trainer_decide(values: dict[str, Any], trainer: str) -> None:
    assert trainer_of(BASE | values) == trainer


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "no key decides which of TRL's trainers this is for; give --trainer grpo|sft|dpo|reward|kto"),
        (
            {"beta": 0.1, "max_length": 512},
            "max_length: .*trainers dpo, kto have all keys of this config; give --trainer dpo|kto",
        ),
        (
            {"reward_funcs": ["a.b"], "num_generations": 4},
            "num_generations, reward_funcs: .*grpo, rloo have all .*; give --trainer grpo",
        ),
        ({"packing": True, "beta": 0.1}, r"no trainer of TRL has all of these keys.*packing: sft"),
        ({"reward_clip_range": [0, 1]}, "trl rloo: this trainer is not imported; those that are: grpo, sft"),
        ({"teacher_model_name_or_path": "a"}, "trl distillation: this trainer is not imported"),
    ],
)
def test_a_config_of_several_trainers_or_of_none_is_an_error(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(CannotImport, match=problem.replace("|", r"\|")):
        trainer_of(BASE | values)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


YAML = "model_name_or_path: org/m\ndataset_name: org/d\nmax_steps: 5\nbeta: 0.2\nmax_length: 512\n"


def test_the_option_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = write(tmp_path, "a.yaml", YAML), tmp_path / "out.yaml"
    command = ["import", str(config), "--from", "trl", "-o", str(out)]
    assert main(command) == 2
    assert "a.yaml: max_length: TRL's trainers dpo, kto have all keys" in capsys.readouterr().err
    assert main([*command, "--trainer", "dpo"]) == 0
    assert load_experiment(out).algorithm.name == "dpo"
    verl = ["import", str(write(tmp_path, "a.txt", "a=1")), "--from", "verl", "--trainer", "dpo"]
    assert main(verl) == 2
    assert "--trainer dpo: verl's configs name theirs; remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "algorithm"),
    [
        ("a.sh", "trl dpo --config a.yaml --beta 0.3\n", "dpo"),
        ("b.sh", "trl kto --config=a.yaml\n", "kto"),
        (
            "c.sh",
            "accelerate launch --num_processes 4 trl/scripts/sft.py --model_name_or_path a --max_steps 5",
            "sft",
        ),
        (
            "d.sh",
            "torchrun --nproc_per_node 2 reward.py --model_name_or_path a --max_steps 5",
            "reward_model",
        ),
        ("e.py", "import trl\ntrl.SFTTrainer(model='a', args=trl.SFTConfig(max_steps=5))\n", "sft"),
        ("f.py", "from trl import DPOConfig\nDPOConfig(max_steps=5)\nDPOTrainer(model='a')\n", "dpo"),
    ],
)
def test_commands_and_classes_name_the_trainer(name: str, text: str, algorithm: str, tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", YAML)
    found = import_file(TRL, write(tmp_path, name, text)).tree["algorithm"]
    assert (found["name"], found["num_steps"]) == (algorithm, 5)


def test_a_file_with_two_trainers_is_refused(tmp_path: Path) -> None:
    text = "from trl import *\nSFTConfig(max_steps=5)\nDPOConfig(max_steps=5)\n"
    with pytest.raises(CannotImport, match="there are calls of sft, dpo; give a file with one of them"):
        import_file(TRL, write(tmp_path, "a.py", text))
    with pytest.raises(CannotImport, match="--trainer kto: the file starts sft; leave the option out"):
        trainer_of({"trainer": "sft"}, "kto")
