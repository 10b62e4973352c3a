"""Models named by an id of the hub, against a local stand-in for its HTTP interface."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemorl.config.environment import LocalModelRewardConfig
from nemorl.config.load import load_experiment
from nemorl.models import hub as hub_module
from nemorl.models.create import create_tiny_model
from nemorl.models.hub import HubError, is_hub_id, with_local_models
from tests.hub import COMMIT, serving

CONFIG = """
run_dir: {run_dir}
policy: {{model_path: {model}, precision: float32, max_sequence_length: 32}}
data: {{chat: false, train: {{name: arithmetic, size: 20}}}}
algorithm: {{name: sft, num_steps: 1, batch_size: 2}}
"""
SEVERAL = """
run_dir: run
policy: {model_path: org/policy, tokenizer: {path: org/tokens}, max_sequence_length: 32}
data: {chat: false, train: {name: arithmetic, size: 20}}
teachers: {main: {model_path: org/teacher}}
rewards: [{kind: local_model, model_path: org/none}]
generation: {max_new_tokens: 8}
algorithm:
  {name: on_policy_distillation, num_steps: 1, num_prompts_per_step: 1, num_generations_per_prompt: 1}
"""


def check(
    tmp_path: Path, model: str, endpoint: str, *options: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    config = tmp_path / "experiment.yaml"
    config.write_text(CONFIG.format(run_dir=tmp_path / "run", model=model), encoding="utf-8")
    return nemorl(tmp_path, endpoint, "train", str(config), "--dry-run", *options, **variables)


def nemorl(
    tmp_path: Path, endpoint: str, *words: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")} | variables
    command = [sys.executable, "-m", "nemorl.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_model_of_the_hub_becomes_a_folder(tmp_path: Path) -> None:
    served = tmp_path / "hub" / "models" / "org" / "tiny"
    served.parent.mkdir(parents=True)
    create_tiny_model(served)
    (served / "pytorch_model.bin").write_bytes(b"other weights")
    with serving(tmp_path / "hub") as hub:
        planned = check(tmp_path, "org/tiny", hub.url)
        assert not any("lfs" in request or "tokenizer" in request for request in hub.requests)
        downloaded = nemorl(tmp_path, hub.url, "check", str(tmp_path / "experiment.yaml"))
        assert downloaded.returncode == 0, downloaded.stderr
        asked = list(hub.requests)
        absent = check(tmp_path, "org/none", hub.url)
    folder = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert planned.returncode == 0, planned.stderr
    assert "model_path: org/tiny\n" in planned.stdout  # whose weights the run will download
    later = "will be verified on the target machine (the folder holds no"
    assert planned.stderr.count(f"policy.model_path = {folder}: {later}") == 2  # weights and tokenizer
    assert "Fetching" in downloaded.stderr  # the progress bar
    for file in folder.iterdir():
        assert file.read_bytes() == (served / file.name).read_bytes()
    assert (folder / "model.safetensors").is_file()
    assert not any("pytorch_model.bin" in request for request in asked if request.startswith("GET"))
    assert any(request.startswith("GET /lfs/") for request in asked)
    # Without a network the files of the cache are used, and others come with a fix.
    cached = check(tmp_path, "org/tiny", hub.url)
    assert cached.returncode == 0, cached.stderr
    assert f"model_path: {folder}\n" in cached.stdout  # with the commit: a resumed run has the same weights
    assert check(tmp_path, "org/tiny", hub.url, HF_HUB_OFFLINE="1").returncode == 0
    other = check(tmp_path, "org/other", hub.url)
    assert other.returncode == 2
    words = " ".join(other.stderr.split())
    assert "policy.model_path = org/other" in words
    assert f"it cannot be downloaded from {hub.url}" in words
    assert "run `hf download org/other` where there is a network" in words
    assert words.count("policy.model_path") == 1  # and is not reported as a missing folder, too
    assert absent.returncode == 2
    assert f"{hub.url} has no such model" in " ".join(absent.stderr.split())


def test_plans_download_config_json_only(tmp_path: Path) -> None:
    served = tmp_path / "hub" / "models" / "org" / "tiny"
    served.parent.mkdir(parents=True)
    create_tiny_model(served)
    config = tmp_path / "experiment.yaml"
    config.write_text(CONFIG.format(run_dir=tmp_path / "run", model="org/tiny"), encoding="utf-8")
    time = ("plan", "time", str(config), "--hardware", "h100", "policy.precision=bfloat16")
    with serving(tmp_path / "hub") as hub:
        planned = nemorl(tmp_path, hub.url, *time)
        listed = nemorl(tmp_path, hub.url, "plan", "layouts", str(config), "--gpus", "1")
        checked = nemorl(tmp_path, hub.url, "check", "--no-weights", str(config))
        rehearsed = nemorl(tmp_path, hub.url, "plan", "rehearse", str(config))
        absent = nemorl(tmp_path, hub.url, *time, "policy.model_path=org/none")
        asked = [request for request in hub.requests if request.startswith("GET")]
    assert planned.returncode == 0, planned.stderr
    assert listed.returncode == 0, listed.stderr
    assert checked.returncode == 0, checked.stderr
    assert "(the folder holds no weights" in checked.stdout
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert any("config.json" in request for request in asked)
    assert not any("safetensors" in request or "lfs" in request for request in asked)
    assert absent.returncode == 2
    assert "policy.model_path = org/none" in " ".join(absent.stderr.split())


def test_a_resumed_run_has_the_commit_of_its_start_and_serve_the_newest(tmp_path: Path) -> None:
    served = tmp_path / "hub" / "models" / "org" / "tiny"
    served.parent.mkdir(parents=True)
    create_tiny_model(served)
    snapshots = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots"
    with serving(tmp_path / "hub") as hub:
        check(tmp_path, "org/tiny", hub.url)
        nemorl(tmp_path, hub.url, "check", str(tmp_path / "experiment.yaml"))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text(check(tmp_path, "org/tiny", hub.url).stdout)
        hub.commit = "f" * 40
        resumed = check(tmp_path, "org/tiny", hub.url, "--resume")
        refused = nemorl(tmp_path, hub.url, "serve", "org/tiny", "generation.backend=megatron")
        absent = nemorl(tmp_path, hub.url, "serve", "org/none")
    assert f"model_path: {snapshots / COMMIT}\n" in resumed.stdout, resumed.stderr
    assert "this back end samples inside the policy" in " ".join(refused.stderr.split())
    assert (snapshots / hub.commit / "model.safetensors").is_file()
    assert absent.returncode == 2
    assert f"{hub.url} has no such model" in " ".join(absent.stderr.split())


def test_ids_work_in_every_section_that_has_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(name: str, commit: str | None, files: Sequence[str]) -> Path:
        if name == "org/none":
            raise HubError("no such model")
        return tmp_path / name / str(commit)

    monkeypatch.setattr(hub_module, "fetch_model", fetched)
    file = tmp_path / "experiment.yaml"
    file.write_text(SEVERAL, encoding="utf-8")
    experiment, problems = with_local_models(load_experiment(file, []), {"org/policy": "c1"})
    assert experiment.policy.model_path == tmp_path / "org" / "policy" / "c1"
    assert experiment.policy.tokenizer.path == tmp_path / "org" / "tokens" / "None"
    assert experiment.teachers["main"].model_path == tmp_path / "org" / "teacher" / "None"
    (reward,) = experiment.rewards
    assert isinstance(reward, LocalModelRewardConfig)
    assert str(reward.model_path) == "org/none"
    assert [(p.field, p.value, p.fix) for p in problems] == [
        ("rewards.0.model_path", "org/none", "no such model")
    ]


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("models", False),
        ("/models/tiny", False),
        ("../models/tiny", False),
        ("a/b/c", False),
        ("here/absent", False),
        ("here/there", False),
    ],
)
def test_ids_are_distinguished_from_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_id: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "there").mkdir(parents=True)
    assert is_hub_id(Path(path)) is is_id
