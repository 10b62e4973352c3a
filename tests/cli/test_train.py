import importlib
import socket
import sys
from copy import copy
from pathlib import Path

import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.errors import RunError
from tests.cli.conftest import Nemorl, Trainer
from tests.config.experiments import GRPO, write


def test_a_run_that_ends_well(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    outcome = nemorl("train", experiment)

    assert outcome.status == 0
    assert outcome.out == "run: runs/sums\n"
    assert trainer.calls == [("train", 10)]


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.num_steps=3", "seed=1", "--resume"],
        ["--resume", "algorithm.num_steps=3", "seed=1"],
        ["algorithm.num_steps=3", "--resume", "seed=1"],
    ],
)
def test_overrides_and_options_come_in_any_order(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, words: list[str]
) -> None:
    assert nemorl("train", experiment, *words).status == 0
    assert trainer.calls == [("resume", 3)]


def test_a_run_over_several_nodes_joins_a_ray_that_is_there(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused = nemorl("train", experiment, "cluster.num_nodes=2")
    assert refused.status == 2
    assert "cluster.num_nodes = 2" in refused.err
    assert "nemorl slurm submit CONFIG --nodes 2" in refused.err.replace("\n      ", " ")
    assert not trainer.calls
    assert nemorl("check", experiment, "cluster.num_nodes=2").status == 0  # it may be for elsewhere
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert nemorl("train", experiment, "cluster.num_nodes=2").status == 0


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("ppo", "ppo", ()),
        ("ppo", "grpo", ("algorithm.name = grpo", "was trained with `ppo`", "set `ppo`, or start a new run")),
        ("sft", "grpo", ("algorithm.name = grpo", "was trained with `sft`")),
        ("grpo with a critic", "grpo", ("algorithm.critic = null", "was trained with a critic")),
    ],
)
def test_a_run_continues_with_its_own_algorithm(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, then: str, now: str, said: tuple[str, ...]
) -> None:
    run_dir = experiment.parent / "runs/sums"
    run_dir.mkdir(parents=True)
    critic = None if then in ("sft", "grpo") else {"warmup_steps": 0}
    algorithm = {"name": then.partition(" ")[0], "critic": critic}
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"algorithm": algorithm}), encoding="utf-8")
    arguments = ("train", experiment, "--resume", f"algorithm.name={now}")

    assert nemorl(*arguments).status == 0  # without a checkpoint it starts over
    (run_dir / "checkpoints/step_00000002").mkdir(parents=True)
    outcome = nemorl(*arguments)

    assert outcome.status == (2 if said else 0), outcome.err
    assert all(part in outcome.err for part in said)
    assert len(trainer.calls) == (1 if said else 2)


def test_a_refused_config_starts_nothing(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    outcome = nemorl("train", experiment, "algorithm.num_steps=0", "policy.layout.tensor_parallel_size=3")

    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.splitlines()[:3] == [
        f"{experiment}: 1 configuration error",
        "  algorithm.num_steps = 0  (command line)",
        "      expected a value of at least 1: Steps of the run.",
    ]
    assert trainer.calls == []


def test_more_minibatches_than_trajectories(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("check", experiment, "algorithm.num_minibatches=513")

    assert outcome.status == 2
    assert "algorithm.num_minibatches = 513" in outcome.err
    assert "it must divide the 32 trajectories (4 prompts x 8 generations) of a step" in outcome.err


def test_config_model_and_files_are_refused_in_one_list(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl(
        "train",
        experiment,
        "policy.layout={tensor_parallel_size: 3, sequence_parallel: true}",
        "algorithm.num_minibatches=7",
        "data.train={name: jsonl, path: nowhere.jsonl}",
        "rewards=[{function: exact_mach}, {function: nowhere.at_all:f}]",
    )

    assert outcome.status == 2
    for part in (
        "6 configuration errors",
        "policy.layout.tensor_parallel_size = 3",
        "algorithm.num_minibatches = 7",
        "data.train.path = nowhere.jsonl",
        "rewards.0.function = exact_mach",
        "did you mean `exact_match`? built-in rewards: constant, exact_match, format_tags",
        "cannot import nowhere.at_all: ModuleNotFoundError",
        "put it in the current folder or install it",
    ):
        assert part in outcome.err


def test_a_reward_in_the_current_folder_is_found(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_sums.py").write_text(
        "def close(completions, **columns): return [1.0] * len(completions)\n", encoding="utf-8"
    )

    assert nemorl("train", experiment, "rewards=[{function: own_sums:close}]").status == 0


@pytest.mark.parametrize(
    ("text", "reward", "fix"),
    [
        (
            "def close(prompt, answers): ...",
            "{function: own:close}",
            "accepts (prompt, answers); `trl` functions receive keyword arguments",
        ),
        (
            "def close(completions, /): ...",
            "{function: own:close}",
            "accepts (completions); `trl` functions receive keyword arguments",
        ),
        (
            "def close(completions, level): ...",
            "{function: own:close}",
            "requires level, and the tasks of",
        ),
        ("def close(): ...", "{function: own:close}", "accepts no parameters; `trl` functions receive"),
        ("def close(completions): ...", "{function: own:clos}", "own has no clos; did you mean `close`?"),
        ("close = 3", "{function: own:close}", "close in own is not callable: it is of type int"),
        ("def close(completions): ...", "{function: own:close, arguments: {k: 1}}", "takes no argument k"),
        (
            "import sys; sys.exit(3)",
            "{function: own:close}",
            "cannot import own: SystemExit: 3; correct the module",
        ),
        ("1 / 0", "{function: own:close}", "cannot import own: ZeroDivisionError"),
    ],
)
def test_a_reward_that_would_fail_in_the_first_step_is_refused(
    nemorl: Nemorl,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    reward: str,
    fix: str,
) -> None:
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    importlib.invalidate_caches()

    outcome = nemorl("train", experiment, "--dry-run", f"rewards=[{reward}]")

    assert outcome.status == 2
    assert "rewards.0.function = own:clos" in outcome.err
    assert fix in outcome.err


def test_arguments_that_all_tasks_lack_are_listed_once(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("check", experiment, "rewards=[{function: overlong_penalty}]")

    assert outcome.err.startswith(f"{experiment}: 1 configuration error\n")
    assert "the tasks of data.train and data.validation have the columns" in outcome.err
    assert "; set it in rewards.0.arguments\n" in outcome.err  # no default in a function that is built in


@pytest.mark.parametrize(
    ("reward", "field", "fix"),
    [
        (
            "{function: overlong_penalty, arguments: {max_length: 8, buffer: 9}}",
            "rewards.0.arguments",
            "`overlong_penalty` does not accept these: buffer = 9 is not between 1 and max_length = 8",
        ),
        ("{function: overlong_penalty}", "rewards.0.function", "it requires buffer, max_length"),
        (
            "{kind: judge, url: 'http://a/v1', model: m, prompt: '{completion}', api_key_env: NO_SUCH_KEY}",
            "rewards.0.api_key_env = NO_SUCH_KEY",
            "this environment variable is not set",
        ),
        (
            "{kind: local_model, model_path: model}",
            "rewards.0.model_path = model",
            "this is a LlamaForCausalLM, which has no trained head",
        ),
        (
            "{kind: local_model, model_path: nowhere}",
            "rewards.0.model_path = nowhere",
            "",
        ),
    ],
)
def test_built_in_rewards_and_keys_are_tried(
    nemorl: Nemorl, experiment: Path, reward: str, field: str, fix: str
) -> None:
    outcome = nemorl("check", experiment, f"rewards=[{reward}]")
    assert outcome.status == 2
    assert field in outcome.err
    assert fix in outcome.err
    sound = "{function: overlong_penalty, arguments: {max_length: 8, buffer: 4}}"
    assert nemorl("check", experiment, f"rewards=[{sound}, {{function: repetition_penalty}}]").status == 0


def test_columns_of_the_tasks_can_be_asked_for(nemorl: Nemorl, experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "levels.py").write_text(
        "def close(completions, answer, level): return level", encoding="utf-8"
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "level": 1}\n', encoding="utf-8")
    tasks = ["data.train={name: jsonl, path: tasks.jsonl}", "data.validation=null"]

    assert nemorl("train", experiment, "--dry-run", "rewards=[{function: levels:close}]", *tasks).status == 0


@pytest.mark.parametrize("run_dir", ["/proc/run", "/proc/1/new/run"])
def test_a_run_folder_that_cannot_be_written_is_refused(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, run_dir: str
) -> None:
    outcome = nemorl("train", experiment, f"run_dir={run_dir}")

    assert outcome.status == 2
    assert f"run_dir = {run_dir}" in outcome.err
    assert "is not writable" in outcome.err
    assert trainer.calls == []


def test_a_failed_run_is_a_sentence(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    trainer.failure = RunError("policy rank 1 died in stage 'training'")

    outcome = nemorl("train", experiment)

    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err == "policy rank 1 died in stage 'training'\n"


def test_what_else_failed_with_it_is_said_too(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    trainer.failure = RunError("policy rank 1 died")
    trainer.failure.add_note("on the other side: generation rank 0 waited")

    outcome = nemorl("train", experiment)

    assert outcome.err == "policy rank 1 died\non the other side: generation rank 0 waited\n"


def test_developers_may_see_where_it_failed(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.failure = RunError("it failed")

    with pytest.raises(RunError):
        nemorl("--traceback", "train", experiment)
    monkeypatch.setenv("NEMORL_TRACEBACK", "1")
    with pytest.raises(RunError):
        nemorl("train", experiment)


def test_an_interrupted_run_says_so(nemorl: Nemorl, trainer: Trainer, experiment: Path) -> None:
    trainer.failure = KeyboardInterrupt()

    outcome = nemorl("train", experiment)

    assert (outcome.status, outcome.err) == (130, "nemorl train was interrupted\n")


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs/sums").mkdir(parents=True)
    (tmp_path / "runs/sums/metrics.jsonl").write_text('{"step": 1, "version": 1}\n')

    refused = nemorl("train", experiment)

    assert refused.status == 2
    assert "run_dir = runs/sums" in refused.err
    assert "continue it with --resume, or set another folder" in refused.err
    assert nemorl("train", experiment, "--dry-run").status == 0
    assert nemorl("train", experiment, "--resume").status == 0


def test_a_run_folder_that_is_a_file_is_refused(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("train", experiment, f"run_dir={experiment}")

    assert outcome.status == 2
    assert "this is a file" in outcome.err


def test_a_dry_run_shows_the_experiment_and_the_plan_and_writes_nothing(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))

    outcome = nemorl("train", experiment, "--dry-run", "policy.optimizer.lr=1e-5", "generation.replicas=3")

    assert outcome.status == 0
    assert trainer.calls == []
    assert sorted(tmp_path.rglob("*")) == before
    assert "generation x 3" in outcome.err
    assert yaml.safe_load(outcome.out)["policy"]["optimizer"]["weight_decay"] == 0.0
    resolved = write(tmp_path, outcome.out, "resolved.yaml")
    expected = load_experiment(experiment, ["policy.optimizer.lr=1e-5", "generation.replicas=3"])
    assert load_experiment(resolved) == expected


def test_text_with_square_brackets_is_shown_as_it_is(nemorl: Nemorl, tmp_path: Path) -> None:
    """rich would take `[red]` for a color."""
    file = write(tmp_path, GRPO)

    outcome = nemorl("train", file, "data.prompt_template='[red]no place[/red]'")

    assert "data.prompt_template = [red]no place[/red]" in outcome.err


@pytest.mark.parametrize(
    ("run_dir", "fix"),
    [
        ("r" * 300, "a name in the path has 300 bytes, and at most 255 are allowed; shorten it"),
        ("/".join(["r" * 100] * 50), "bytes and may have 4000; shorten it"),
        ("model", "this is in the model folder of policy.model_path; set another folder"),
        ("model/../model/run", "this is in the model folder of policy.model_path; set another folder"),
        ("experiment.yaml", "this is a file; set a folder"),
        ("experiment.yaml/run", "experiment.yaml is a file, not a folder; set another folder"),
        ('"a\\0b"', "the path contains unprintable characters"),
    ],
)
def test_an_odd_run_folder_is_refused(
    nemorl: Nemorl, trainer: Trainer, experiment: Path, run_dir: str, fix: str
) -> None:
    outcome = nemorl("train", experiment, f"run_dir={run_dir}")

    assert outcome.status == 2
    assert "1 configuration error" in outcome.err
    assert "run_dir = " in outcome.err
    assert fix in outcome.err
    assert trainer.calls == []


GPUS = ["cluster.gpus_per_node=8", "policy.precision=float32"]


def test_gpus_that_this_machine_lacks_are_left_to_the_target(
    nemorl: Nemorl, trainer: Trainer, experiment: Path
) -> None:
    lacking = "cluster.gpus_per_node = 8"
    left = f"{lacking}: will be verified on the target machine (this machine has no GPUs)"

    checked = nemorl("check", experiment, *GPUS)
    assert (checked.status, checked.out) == (0, f"{experiment}: OK\n  {left}\n")
    assert left in nemorl("train", experiment, *GPUS, "--dry-run").err
    for command in (["check", "--here"], ["train"]):
        outcome = nemorl(*command, experiment, *GPUS)
        assert outcome.status == 2
        assert f"{lacking}  (command line)" in outcome.err
        assert "this machine has no GPUs; start the run on a machine with 8" in outcome.err
    assert trainer.calls == []


def test_a_server_that_does_not_answer_is_left_to_the_target(
    nemorl: Nemorl, trainer: Trainer, experiment: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        reward = f"rewards=[{{kind: judge, url: '{url}', model: m, prompt: '{{completion}}'}}]"
        assert nemorl("check", "--here", experiment, reward).out == f"{experiment}: OK\n"

    left = f"rewards.0.url = {url}: will be verified on the target machine (this machine cannot connect to it"
    assert left in nemorl("check", experiment, reward).out
    outcome = nemorl("train", experiment, reward)
    assert (outcome.status, trainer.calls) == (2, [])
    assert "(Connection refused); start the server" in outcome.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def close(completions): raise LookupError('no word')", "LookupError: no word"),
        ("def close(completions): return [float('nan')] * 2", "returned nan; return a finite number"),
        ("def close(completions): return 1.0", "returned 1.0 for 2 completions; return one per completion"),
        ("def close(completions): return [1.0] * 3", "returned 3 values for 2 completions; return one per"),
        ("import time\ndef close(completions): time.sleep(60)", "no answer within 0.2 s"),
        ("import time\nasync def close(completions): time.sleep(60)", "no answer within 5.4 s"),
        ("def close(completions): return [1 / len(c) for c in completions]", None),
    ],
)
def test_a_reward_that_scores_no_answer_is_refused(
    nemorl: Nemorl,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    reason: str | None,
) -> None:
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    importlib.invalidate_caches()

    outcome = nemorl("check", experiment, "rewards=[{function: own:close, deadline: 0.2}]")

    assert outcome.status == (0 if reason is None else 2)
    if reason is not None:
        assert "rewards.0.function = own:close" in outcome.err
        assert f"it failed on every test answer to the first task: {reason}" in outcome.err


@pytest.mark.parametrize(
    ("folders", "place"),
    [
        (["step_4", "step_12", "step_16.corrupt"], "after step 12"),
        ([], "from the start, as there is no checkpoint yet"),
        (["step_16.corrupt"], None),  # `--resume` would be refused
    ],
)
@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (RunError("policy rank 1 died"), 1, "policy rank 1 died"),
        (KeyboardInterrupt(), 130, "nemorl train was interrupted"),
    ],
)
def test_a_run_that_ends_early_says_how_to_continue_it(
    nemorl: Nemorl,
    trainer: Trainer,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folders: list[str],
    place: str | None,
    failure: BaseException,
    status: int,
    message: str,
) -> None:
    def steps_and_fails(experiment: object, **options: object) -> None:
        run = tmp_path / "runs" / "sums"
        for folder in folders:
            (run / "checkpoints" / folder).mkdir(parents=True)
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text("{}\n")
        raise copy(failure)  # without the notes of another test

    monkeypatch.setattr("nemorl.run.train.train", steps_and_fails)

    outcome = nemorl("train", experiment, "seed=7")

    assert outcome.status == status
    hint = f"To continue {place}: nemorl train {experiment} seed=7 --resume\n" if place else ""
    assert outcome.err == f"{message}\n{hint}"
