"""Configs as their projects read them: inheritance, resolvers, overrides, scripts, Python files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.yaml import leaves
from nemorl.importing import nemo_rl, openrlhf, trl, verl
from nemorl.importing.rules import CannotImport
from nemorl.importing.sources import read_command


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_defaults_interpolations_and_resolvers(tmp_path: Path) -> None:
    write(
        tmp_path,
        base__yaml="a: {n: 4, twice: '${mul:${a.n}, 2}', most: '${max:1,3}'}\nb: {x: 1, y: '${.x}'}\n"
        "c: {z: 1}\n",
        other__yaml="b: {x: 5}\n",
        recipe__yaml="defaults: [base.yaml, other.yaml]\na: {n: 8}\nc: {_override_: true, w: '${div:9,2}'}\n",
    )
    found = dict(leaves(nemo_rl.read(tmp_path / "recipe.yaml")))
    assert found == {"a.n": 8, "a.twice": 16, "a.most": 3, "b.x": 5, "b.y": 5, "c.w": 4.5}


def test_a_reference_without_a_value_is_named(tmp_path: Path) -> None:
    write(tmp_path, recipe__yaml="a: '${missing}'\n")
    with pytest.raises(CannotImport, match=r"recipe\.yaml: .*missing"):
        nemo_rl.read(tmp_path / "recipe.yaml")
    with pytest.raises(CannotImport, match=r"nothing\.yaml: cannot be read"):
        nemo_rl.read(tmp_path / "nothing.yaml")


SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
N=${N:-8}  # GPUs
length=$((1024 * 2))
total=$((length + 512))
export MODEL=org/model
DATA=(
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/b.parquet']"
    # a comment
    data.max_prompt_length=${length}
)
EXTRA=()
if [ "$N" = 8 ]; then
    EXTRA+=(+trainer.extra=True)
else
    EXTRA+=(trainer.extra=False)
fi
LAUNCH=(python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.rollout.max_model_len=$total \\
    actor_rollout_ref.actor.optim.betas='[0.9,0.98]' \\
    trainer.n_gpus_per_node=$N "${EXTRA[@]}" "$@"
"""


def test_a_script_is_read_and_not_executed(tmp_path: Path) -> None:
    write(tmp_path, run__sh=SCRIPT)
    assert dict(leaves(verl.read(tmp_path / "run.sh"))) == {
        "data.train_files": ["$HOME/data/gsm8k/train.parquet", "$HOME/b.parquet"],
        "data.max_prompt_length": 2048,
        "actor_rollout_ref.model.path": "org/model",
        "actor_rollout_ref.rollout.max_model_len": 2560,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.98],
        "trainer.n_gpus_per_node": 8,
        "trainer.extra": True,
    }


CASES = """
MODE=${MODE:-dppo_tv}
case $MODE in
    dppo_tv)  BOUND=0.15 ;;
    dppo_kl | other)
        BOUND=0.05
        ;;
    *) echo "unknown: $MODE"; exit 1 ;;
esac
case "$BOUND" in
    0.*) KIND=small ;;
    *) KIND=large ;;
esac
python3 -m verl.trainer.main_ppo a.bound=${BOUND} a.kind=$KIND
"""


@pytest.mark.parametrize(("mode", "bound"), [("dppo_tv", 0.15), ("other", 0.05)])
def test_the_first_pattern_of_a_case_decides(tmp_path: Path, mode: str, bound: float) -> None:
    write(tmp_path, run__sh=CASES.replace("MODE:-dppo_tv", f"MODE:-{mode}"))
    assert dict(leaves(verl.read(tmp_path / "run.sh"))) == {"a.bound": bound, "a.kind": "small"}


@pytest.mark.parametrize(
    ("choice", "engine"),
    [
        ("$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)", "vllm"),
        ('"$([ "$SERVER" = remote ] && echo npu || echo gpu)"', "vllm"),
        ('"$([[ "$SERVER" == local ]] && echo npu || echo gpu)"', "sglang"),
    ],
)
def test_a_choice_inside_a_value_is_followed_as_a_branch(tmp_path: Path, choice: str, engine: str) -> None:
    """verl's scripts recognize Ascend devices this way; an import does not hold, as in `if`."""
    script = f"""
SERVER=local
DEVICE=${{DEVICE:-{choice}}}
case "${{DEVICE}}" in
    gpu)
        ENGINE=${{ENGINE:-vllm}}
        ;;
    npu) ENGINE=sglang ;;
esac
python3 -m verl.trainer.main_ppo a.engine=${{ENGINE}}
"""
    write(tmp_path, run__sh=script)
    assert verl.read(tmp_path / "run.sh") == {"a": {"engine": engine}}


def test_a_script_without_a_command_is_refused() -> None:
    with pytest.raises(CannotImport, match="no command"):
        read_command("echo hello\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("True", True),
        ("null", None),
        ("a", "a"),
        ("[1,2]", [1, 2]),
        ("['a','b']", ["a", "b"]),
    ],
)
def test_values_of_overrides(text: str, value: Any) -> None:
    tree = verl.from_words(["verl.trainer.main_ppo", f"++a.b={text}"], "words")
    assert tree == {"a": {"b": value}}


def test_a_hydra_file_over_a_trainer(tmp_path: Path) -> None:
    write(
        tmp_path, mine__yaml="defaults: [ppo_megatron_trainer, _self_]\nhydra: {a: 1}\ntrainer: {nnodes: 2}\n"
    )
    assert verl.read(tmp_path / "mine.yaml") == {"trainer": {"nnodes": 2}, "model_engine": "megatron"}


def test_trl_as_yaml_words_and_python(tmp_path: Path) -> None:
    write(
        tmp_path,
        a__yaml="model_name_or_path: org/m\nbeta: 0.1\n",
        a__sh="trl grpo --model_name_or_path org/m --beta 0.1 --learning-rate 1e-6 --bf16 "
        "--reward_funcs a.b c.d\n",
        a__py="""
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(beta=0.1, output_dir=str(1), loss_type="grpo")
GRPOTrainer(model="org/m", args=args)
""",
    )
    assert trl.read(tmp_path / "a.yaml") == {"model_name_or_path": "org/m", "beta": 0.1}
    assert trl.read(tmp_path / "a.sh") == {
        "trainer": "grpo",
        "model_name_or_path": "org/m",
        "beta": 0.1,
        "learning_rate": 1e-6,
        "bf16": True,
        "reward_funcs": ["a.b", "c.d"],
    }
    assert trl.read(tmp_path / "a.py") == {
        "trainer": "grpo",
        "beta": 0.1,
        "loss_type": "grpo",
        "model": "org/m",
    }


def test_launchers_of_trl_give_the_number_of_processes(tmp_path: Path) -> None:
    write(
        tmp_path,
        two__yaml="num_processes: 16\nnum_machines: 2\n",
        train__yaml="model_name_or_path: org/m\nbeta: 0.1\nnum_processes: 2\n",
        a__sh="N=4\nTOKENS=1 accelerate launch --num_processes $N \\\n  grpo.py --beta 0.2\n",
        b__sh="accelerate launch --config_file two.yaml trl/scripts/grpo.py --beta 0.2\n",
        c__sh="torchrun --nproc-per-node=8 --nnodes 2 train.py --beta 0.2\n",
        d__sh="trl grpo --config train.yaml --beta 0.3\n",
        e__sh="trl grpo --accelerate_config zero2 --beta 0.2\n",
    )
    read = {name: trl.read(tmp_path / f"{name}.sh") for name in "abcde"}
    assert [read[name].get("num_processes") for name in "abcde"] == [4, 16, 16, 2, 8]
    assert [read[name].get("num_machines") for name in "abc"] == [None, 2, 2]
    assert read["d"] == {
        "trainer": "grpo",
        "model_name_or_path": "org/m",
        "num_processes": 2,
        "beta": 0.3,
    }
    write(tmp_path, f__sh="accelerate launch --config_file none.yaml grpo.py --beta 0.2\n")
    with pytest.raises(CannotImport, match=r"none\.yaml: there is no such file here or in"):
        trl.read(tmp_path / "f.sh")


@pytest.mark.parametrize("command", ["trl rloo", "accelerate launch trl/scripts/rloo.py"])
def test_other_trainers_of_trl_are_refused(tmp_path: Path, command: str) -> None:
    write(tmp_path, a__sh=f"{command} --model_name_or_path org/m --beta 0.2\n")
    with pytest.raises(CannotImport, match="trl rloo: this trainer is not imported; those that are: grpo"):
        trl.read(tmp_path / "a.sh")


def test_commands_of_openrlhf(tmp_path: Path) -> None:
    write(
        tmp_path,
        sft__sh="read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   --adam.lr 5e-6 \\\n"
        "   --ds.packing_samples\nEOF\n    # --more\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi\n',
        ppo__sh='M=org/m\nray job submit --address="http://a:1" -- python3 -m openrlhf.cli.train_ppo_ray \\\n'
        "  --actor.model_name_or_path $M --actor.eps_clip_low_high 0.2 0.27 --logger.wandb.key {token}\n",
        slurm__sh='srun bash -c \\\n"pip install x \\\n  && ray job submit -- python3 -m '
        'openrlhf.cli.train_rm \\\n --data.max_len 512" &\n',
        run__sh="torchrun --nproc_per_node 4 --nnodes 2 -m openrlhf.cli.train_dpo --model.beta 0.2\n",
        text__txt="--actor.model_name_or_path org/m --algo.kl.use_loss",
    )
    assert dict(leaves(openrlhf.read(tmp_path / "sft.sh"))) == {
        "trainer": "sft",
        "adam.lr": 5e-6,
        "ds.packing_samples": True,
    }
    assert openrlhf.read(tmp_path / "ppo.sh") == {
        "trainer": "ppo_ray",
        "actor.model_name_or_path": "org/m",
        "actor.eps_clip_low_high": [0.2, 0.27],
        "logger.wandb.key": "{token}",
    }
    assert openrlhf.read(tmp_path / "slurm.sh") == {"trainer": "rm", "data.max_len": 512}
    assert openrlhf.read(tmp_path / "run.sh") == {
        "trainer": "dpo",
        "model.beta": 0.2,
        "nproc_per_node": 4,
        "nnodes": 2,
    }
    assert openrlhf.read(tmp_path / "text.txt")["trainer"] == "ppo_ray"


def test_options_of_earlier_openrlhf(tmp_path: Path) -> None:
    write(
        tmp_path,
        run__sh="python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --advantage_estimator group_norm "
        "--prompt_max_len 1024 --generate_max_len 512 --l2 0.1 --bf16 --gradient_checkpointing\n",
        bad__sh="python3 -m openrlhf.cli.train_kto --pretrain org/m\n",
    )
    assert openrlhf.read(tmp_path / "run.sh") == {
        "trainer": "ppo_ray",
        "actor.model_name_or_path": "org/m",
        "algo.advantage.estimator": "group_norm",
        "rollout.max_new_tokens": 512,
        "data.max_len": 1536,
        "actor.adam.weight_decay": 0.1,
        "critic.adam.weight_decay": 0.1,
        "ds.param_dtype": "bf16",
        "actor.gradient_checkpointing_enable": True,
    }
    with pytest.raises(CannotImport, match=r"train_kto is not imported; openrlhf\.cli\.train_ppo_ray"):
        openrlhf.read(tmp_path / "bad.sh")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.yaml", nemo_rl.read),
        ("a.sh", verl.read),
        ("a.sh", openrlhf.read),
        ("a.sh", trl.read),
        ("a.py", trl.read),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, name: str, read: Callable[[Path], Mapping[str, Any]]
) -> None:
    file = tmp_path / name
    file.write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(CannotImport, match=rf"{name}:2: the byte 0xe9 is no UTF-8; .* `iconv"):
        read(file)
    file.write_bytes(b"a: 1\0\n")
    with pytest.raises(CannotImport, match=rf"{name}: there are null bytes"):
        read(file)
    file.write_bytes(b"a" * 9 * 2**20)
    with pytest.raises(CannotImport, match="9 MiB are no config; name the config"):
        read(file)


def test_files_that_inherit_from_each_other_or_from_none_are_named(tmp_path: Path) -> None:
    write(
        tmp_path, a__yaml="defaults: b.yaml\n", b__yaml="defaults: ./a.yaml\n", c__yaml="defaults: [d.yaml]\n"
    )
    with pytest.raises(CannotImport, match=r"b\.yaml: defaults = \./a\.yaml: the file inherits from itself"):
        nemo_rl.read(tmp_path / "a.yaml")
    with pytest.raises(
        CannotImport, match=r"c\.yaml: defaults = d\.yaml: there is no file .*; correct the path"
    ):
        nemo_rl.read(tmp_path / "c.yaml")


def test_two_files_may_inherit_from_the_same_one(tmp_path: Path) -> None:
    write(tmp_path, a__yaml="defaults: [b.yaml, c.yaml]\n", b__yaml="defaults: d.yaml\n")
    write(tmp_path, c__yaml="defaults: d.yaml\n", d__yaml="x: 1\n")
    assert nemo_rl.read(tmp_path / "a.yaml") == {"x": 1}


def test_powers_of_a_script_are_not_computed() -> None:
    words = read_command("N=$((9**9**9))\npython -m verl.trainer.main_ppo a.n=$N\n")
    assert words[-1] == "a.n=$((9**9**9))"
