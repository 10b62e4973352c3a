import json
from dataclasses import replace
from pathlib import Path

import pytest

import nemorl as package
from nemorl.commands import doctor
from nemorl.megatron.kernels import Installed
from nemorl.plan.machine import Gpu, read_machine
from tests.cli.conftest import Nemorl, Trainer
from tests.config.experiments import write
from tests.full_disk import files_end_at


def test_check_looks_at_every_file(nemorl: Nemorl, experiment: Path, tmp_path: Path) -> None:
    broken = write(tmp_path, "seed: -1\n", "broken.yaml")

    outcome = nemorl("check", broken, tmp_path / "nowhere.yaml", experiment)

    assert outcome.status == 2
    assert outcome.out == f"{experiment}: OK\n"
    assert f"{broken}: 5 configuration errors" in outcome.err
    assert "nowhere.yaml: 1 configuration error" in outcome.err
    assert "policy x 1" in outcome.err


def test_check_without_weights_lists_what_was_not_verified(
    nemorl: Nemorl, experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    tasks = "data.train={name: tasks, path: absent.jsonl}"

    required = nemorl("check", experiment, tasks)
    without = nemorl("check", "--no-weights", experiment, tasks)
    wrong = nemorl("check", "--no-weights", experiment, "policy.layout.tensor_parallel_size=3")

    assert (required.status, without.status, wrong.status) == (2, 0, 2)
    assert "3 configuration errors" in required.err
    later = "will be verified on the target machine"
    first, *lines = without.out.splitlines()
    assert first == f"{experiment}: OK"
    assert [line.strip() for line in lines] == [
        f"policy.model_path = {tmp_path}/model: {later} (the folder holds no weights)",
        f"policy.model_path = {tmp_path}/model: {later} (the folder holds no tokenizer.json: name a folder "
        "that does in policy.tokenizer.path)",
        f"data.train.path = absent.jsonl: {later} (the file cannot be read: No such file or directory)",
    ]
    assert "together 3." in without.err  # the plan
    assert "it must divide the model's 8 attention heads" in wrong.err


def test_check_names_a_staleness_that_is_hardly_meant(nemorl: Nemorl, experiment: Path) -> None:
    def said(staleness: int, *words: str) -> list[str]:
        outcome = nemorl("check", experiment, f"algorithm.max_staleness={staleness}", *words)
        assert outcome.status == 0
        return outcome.out.splitlines()[1:]

    field, docs = "  algorithm.max_staleness = ", " (docs/asynchronous.md)"
    unweighted = "nothing weights samples by their age; set algorithm.correction.name"
    steps = "algorithm.num_steps=9"
    assert said(0, steps) == said(1, steps) == []
    assert said(4, steps) == [f"{field}4: {unweighted}{docs}"]
    assert said(4, steps, "algorithm.correction.name=tis") == []
    assert said(9, steps) == [
        f"{field}9: its first weights may sample all 9 steps; 1 to 8 is usual{docs}",
        f"{field}9: {unweighted}{docs}",
    ]


def test_only_what_has_a_trained_head_is_served_as_a_reward_model(nemorl: Nemorl, experiment: Path) -> None:
    model = experiment.parent / "model"
    outcome = nemorl("serve", "reward", model)
    assert outcome.status == 2
    assert "this is a LlamaForCausalLM, which has no trained head" in outcome.err
    assert "policy.head = lm" in nemorl("serve", "reward", experiment).err


def test_what_is_wrong_with_a_served_model_names_its_folder(nemorl: Nemorl, experiment: Path) -> None:
    model = experiment.parent / "model"
    (model / "tokenizer.json").unlink()
    outcome = nemorl("serve", model, "generation.max_new_tokens=0")
    assert outcome.status == 2
    assert outcome.err.startswith(f"{model}: 1 configuration error")
    outcome = nemorl("serve", model)
    assert outcome.err.startswith(f"{model}: 1 configuration error")
    assert f"policy.model_path = {model}\n" in outcome.err


def test_a_policy_that_samples_its_own_tokens_is_not_served(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("serve", experiment, "generation={backend: megatron}")

    assert outcome.status == 2
    assert "generation.backend = megatron" in outcome.err
    assert "set one that has engines" in outcome.err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 0, ""),
        (["seed=7"], 0, ""),
        (["seed=-1"], 2, "seed = -1  (command line)"),
        (["seed", "=", "1"], 2, "without spaces around `=`"),
    ],
)
def test_check_of_a_sound_file(
    nemorl: Nemorl, experiment: Path, words: list[str], status: int, says: str
) -> None:
    outcome = nemorl("check", experiment, *words)

    assert outcome.status == status
    assert says in outcome.err


def test_check_requires_a_file(nemorl: Nemorl) -> None:
    assert nemorl("check", "seed=1").err == "seed=1: name the experiment file in which to set these fields\n"
    assert "the experiment file comes first" in nemorl("train", "seed=1", "x.yaml").err


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--seed", " (fields are set without dashes, as `seed=value`)"),
        ("--steps", " (fields are set without dashes, as `algorithm.num_steps=value`)"),
        (
            "--policy.micro-batch-tokens",
            " (fields are set without dashes, as `policy.micro_batch_tokens=value`)",
        ),
        ("--zzz", ""),
    ],
)
def test_a_field_set_as_other_programs_have_it(
    nemorl: Nemorl, experiment: Path, option: str, hint: str
) -> None:
    err = nemorl("train", experiment, option, "1").err

    assert err.endswith(f"unrecognized arguments: {option} 1{hint}\n")


def test_a_field_without_a_value_has_a_hint(nemorl: Nemorl, experiment: Path) -> None:
    err = nemorl("check", experiment, "algorithm.num_steps").err

    assert "no such file; to set this field, write `algorithm.num_steps=VALUE`" in err


def test_only_the_experiment_file_is_required(nemorl: Nemorl) -> None:
    assert nemorl("train").err.endswith("the following arguments are required: CONFIG\n")


def test_eval_prints_metrics(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    outcome = nemorl("eval", experiment, "seed=7")

    assert outcome.status == 0
    assert trainer.calls == [("evaluate", 7)]
    assert "validation/reward  0.75" in outcome.out
    assert "samples: samples.jsonl" in outcome.out


@pytest.mark.parametrize(
    ("origin", "line"), [(None, "model: {0}"), ("step 6 of runs/x", "model: {0} (step 6 of runs/x)")]
)
def test_eval_says_what_it_measured(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, tmp_path: Path, origin: str | None, line: str
) -> None:
    trainer.origin = origin

    out = nemorl("eval", experiment).out

    assert line.format(tmp_path / "model") in out.splitlines()


def test_eval_takes_a_sampling_that_cannot_be_trained_on(
    nemorl: Nemorl, trainer: Trainer, experiment: Path
) -> None:
    both = "generation.sampling={top_p: 0.9, min_p: 0.1}"
    assert nemorl("train", experiment, both).status == 2
    assert nemorl("eval", experiment, both).status == 0


def test_eval_requires_validation_tasks(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    outcome = nemorl("eval", experiment, "data.validation=null")

    assert outcome.status == 2
    assert "data.validation is not given" in outcome.err


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ([], "policy as hf"),
        (["--adapter"], "policy as adapter"),
        (["--megatron"], "policy as megatron"),
        (["--model", "critic"], "critic as hf"),
        (["--max-shard-gigabytes", "0.5"], "policy as hf in files of 500000000"),
        (["--quantize", "int8"], "policy as hf in int8 but None"),
        (["--quantize", "int4", "--ignore", "a*", "--ignore", "b"], "policy as hf in int4 but ['a*', 'b']"),
    ],
)
def test_models_export_hands_over_both_folders_the_model_and_the_form(
    nemorl: Nemorl, trainer: Trainer, flags: list[str], what: str
) -> None:
    assert nemorl("models", "export", *flags, "runs/x/checkpoints/step_10", "out").status == 0
    assert trainer.calls == [(f"export {what}", (Path("runs/x/checkpoints/step_10"), Path("out")))]


def test_models_export_refuses_layers_to_ignore_where_none_is_quantized(
    nemorl: Nemorl, trainer: Trainer
) -> None:
    outcome = nemorl("models", "export", "--ignore", "*mlp*", "runs/x/checkpoints/step_10", "out")
    assert (outcome.status, trainer.calls) == (2, [])
    assert "add --quantize, or remove it" in outcome.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "--max-shard-gigabytes", "2"], "--max-shard-gigabytes is for a Hugging Face folder"),
        (["--max-shard-gigabytes", "0"], "argument --max-shard-gigabytes: '0': expected a number above 0"),
    ],
)
def test_models_export_refuses_sizes_of_files_that_are_none(
    nemorl: Nemorl, trainer: Trainer, flags: list[str], message: str
) -> None:
    outcome = nemorl("models", "export", *flags, "runs/x/checkpoints/step_10", "out")
    assert (outcome.status, trainer.calls) == (2, [])
    assert message in outcome.err


def test_models_are_created_and_imported(nemorl: Nemorl, tmp_path: Path) -> None:
    """With the real thing: a tiny model is written, taken in, and refused where a folder exists already."""
    assert nemorl("models", "create", "arithmetic", "tiny", "--seed", "3").out == "model: tiny\n"

    imported = nemorl("models", "import", "tiny", "again")
    twice = nemorl("models", "import", "tiny", "again")

    assert imported.status == 0
    assert "family: llama" in imported.out
    assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert twice.status == 2
    assert twice.err == "again exists already: name another folder, or remove it\n"


def test_a_model_without_room_is_a_sentence(nemorl: Nemorl, tmp_path: Path) -> None:
    with files_end_at(10_000):
        outcome = nemorl("models", "create", "arithmetic", "tiny")

    assert outcome.status == 1
    assert outcome.err.startswith("The model tiny could not be written to .: ")
    assert outcome.err.endswith(" MB are free on its disk. Make room, or name another folder.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_model_is_a_sentence(nemorl: Nemorl) -> None:
    outcome = nemorl("models", "import", "nowhere", "out")

    assert outcome.status == 2
    assert "nowhere/config.json" in outcome.err


def test_a_report_of_nothing_is_refused(nemorl: Nemorl) -> None:
    outcome = nemorl("report", "nowhere")

    assert outcome.status == 2
    assert "nowhere holds no run" in outcome.err


def test_config_is_a_line_for_each_field_in_a_pipe(nemorl: Nemorl) -> None:
    outcome = nemorl("config", "policy.layout.pipeline_parallel_size")

    assert outcome.status == 0
    assert outcome.out == (
        "policy.layout.pipeline_parallel_size: integer >= 1, default 1. Stages that share the layers (PP).\n"
    )


def test_config_fits_a_terminal_of_80_columns(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")  # a terminal without colors

    lines = nemorl("config").out.splitlines()

    assert max(map(len, lines)) <= 80
    at = lines.index("policy.layout")
    assert lines[at - 1 : at + 2] == ["", "policy.layout", "How the policy is spread over processes."]
    at = lines.index("  sequence_parallel: true or false, default false")
    assert lines[at + 1 : at + 3] == [
        "      Split the activations between the tensor-parallel regions by tokens (SP).",
        "      Requires TP of 2 or more.",
    ]


def test_config_knows_all_fields(nemorl: Nemorl) -> None:
    out = nemorl("config").out

    assert "\nalgorithm.kl.estimator [online]: " in out
    assert "\npolicy.schedule.decay_steps [linear|cosine]: integer >= 1, required. " in out


def test_config_names_a_shared_field_once(nemorl: Nemorl) -> None:
    lines = nemorl("config", "generation").out.splitlines()

    assert [line.partition(":")[0] for line in lines].count("generation.endpoint.port") == 1
    assert all(line.startswith("generation.") for line in lines)  # a line for each field


def test_config_of_an_unknown_section(nemorl: Nemorl) -> None:
    outcome = nemorl("config", "policy.optimiser")

    assert outcome.status == 2
    assert "did you mean `policy.optimizer`?" in outcome.err


def test_doctor_is_content_here(nemorl: Nemorl) -> None:
    outcome = nemorl("doctor")

    assert outcome.status == 0
    assert "ready to train on this machine" in outcome.out


def test_doctor_names_what_is_missing(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", {"megatron-kore": "policy workers"})
    monkeypatch.setattr(doctor, "OPTIONAL", {"flash-atten": "speed"})

    outcome = nemorl("doctor")

    assert outcome.status == 1
    assert outcome.out.endswith("not ready: megatron-kore\n")


def test_doctor_says_which_kernels_a_gpu_would_lack(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("a GPU", 80 * 10**9)
    monkeypatch.setattr(doctor, "read_machine", lambda: replace(read_machine(), gpus=(gpu,)))
    monkeypatch.setattr(Installed, "find", lambda: Installed({"transformer_engine": "2.8.0"}))

    monkeypatch.setenv("COLUMNS", "200")

    lines = nemorl("doctor").out.splitlines()

    found = {line[:22].strip(): line for line in lines if "kernel" in line or "gradient" in line}
    assert "torch varlen_attn (flash_attn not found)" in found["attention kernel"]
    assert "transformer_engine 2.8.0" in found["layer kernels"]
    assert "FusedAdam of transformer_engine 2.8.0" in found["optimizer kernel"]
    assert "not fused (fused_weight_gradient_mlp_cuda not found)" in found["gradient accumulation"]
    assert "  Adam: FusedAdam (apex not found)" in lines
    assert "    otherwise torch's AdamW" in lines


def test_the_version(nemorl: Nemorl) -> None:
    assert nemorl("--version").out == f"nemorl {package.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "x.yaml", "--reseume"],
        ["check", "x.yaml", "--dry-run"],
        ["models"],
        ["models", "fetch", "gpt", "out"],
        ["report", "a", "b"],
    ],
)
def test_wrong_usage_is_status_2(nemorl: Nemorl, words: list[str]) -> None:
    outcome = nemorl(*words)

    assert outcome.status == 2
    assert outcome.err.startswith("usage: nemorl")


@pytest.mark.parametrize("command", ["train", "check", "eval", "models", "report", "config", "doctor"])
def test_every_command_has_help(nemorl: Nemorl, command: str) -> None:
    assert nemorl(command, "--help").status == 0
    assert f"    {command} " in nemorl("--help").out
