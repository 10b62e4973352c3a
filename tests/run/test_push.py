"""`nemorl push` against a stand-in for the hub: what arrives, where, and what is said if it cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

from nemorl.cli import main
from nemorl.errors import UsageError
from nemorl.models.create import create_tiny_model
from nemorl.run.push import plan_push
from tests.hub_uploads import TOKEN, UploadHub, taking_uploads


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an exported model, its card, and files of this machine."""
    folder = tmp_path / "run" / "hf"
    create_tiny_model(folder)
    (folder / "README.md").write_text("---\ntags: [nemorl]\n---\n# Mine\n")
    (folder / "nemorl.json").write_text('{"run": "/home/me/run", "step": 3}')
    (folder / ".card.sha256").write_text("0")
    return tmp_path / "run"


@dataclass
class Outcome:
    status: int
    out: str
    err: str


Push = Callable[..., Outcome]


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Push:
    """The command, with a hub or none that answers."""

    def push(hub: UploadHub | None, *words: str, token: str | None = TOKEN) -> Outcome:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9" if hub is None else hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        status = main(["push", *words])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        return Outcome(status, out, " ".join(err.split()))

    return push


def test_a_model_arrives_without_files_of_the_machine(run_dir: Path, push: Push) -> None:
    with taking_uploads() as hub:
        first = push(hub, str(run_dir), "org/name", "--private", "--revision", "step-3")
        assert first.status == 0, first.err
        sent = [request for request in hub.requests if request.startswith("PUT")]
        again = push(hub, str(run_dir / "hf"), "org/name")
        assert again.status == 0, again.err
        assert [request for request in hub.requests if request.startswith("PUT")] == sent  # it is there
    assert f"pushed: {hub.url}/org/name/commit/" in "".join(first.out.split("\n"))
    assert hub.private == {"org/name": True}
    expected = {
        path.name: path.read_bytes()
        for path in (run_dir / "hf").iterdir()
        if path.name not in ("nemorl.json", ".card.sha256")
    }
    assert "model.safetensors" in expected
    assert hub.branches["org/name", "step-3"] == expected
    assert hub.branches["org/name", "main"] == expected


def test_what_is_missing_is_said_with_the_fix(run_dir: Path, push: Push) -> None:
    with taking_uploads() as hub:
        hub.read_only = True
        refused = push(hub, str(run_dir), "org/name")
    assert refused.status == 1
    assert "use a token with write access to it, in HF_TOKEN" in refused.err
    without = push(None, str(run_dir), "org/name", token=None)
    assert without.status == 2
    assert "there is no token for the hub: set HF_TOKEN" in without.err
    unreachable = push(None, str(run_dir), "org/name")
    assert unreachable.status == 1
    assert "http://127.0.0.1:9 cannot be reached" in unreachable.err


def test_a_dry_run_lists_the_files_and_needs_no_token(run_dir: Path, push: Push) -> None:
    done = push(None, str(run_dir), "org/name", "--dry-run", token=None)
    assert done.status == 0, done.err
    size = (run_dir / "hf" / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in done.out
    assert "nothing was uploaded (--dry-run)" in done.out
    assert "nemorl.json" not in done.out


@pytest.mark.parametrize(
    ("remove", "repository", "message"),
    [
        ("model.safetensors", "org/name", "holds neither model.safetensors nor"),
        ("config.json", "org/name", "holds no exported model, and neither does"),
        ("generation_config.json", "org/na me", "is no name of a repository"),
        ("generation_config.json", "name", "name names no owner; use ORG/name, with your name"),
    ],
)
def test_what_is_no_complete_model_is_refused(
    run_dir: Path, remove: str, repository: str, message: str
) -> None:
    (run_dir / "hf" / remove).unlink(missing_ok=True)
    with pytest.raises(UsageError, match=message):
        plan_push(run_dir, repository)


@pytest.mark.parametrize("revision", ["x y", "a..b", "-x", "v1.", "a:b", "a//b", ""])
def test_an_invalid_branch_is_refused_before_anything_is_sent(
    run_dir: Path, push: Push, revision: str
) -> None:
    refused = push(None, str(run_dir), "org/name", f"--revision={revision}")
    assert refused.status == 2
    assert f"--revision {revision!r} is no name of a branch; use letters, digits" in refused.err
    assert plan_push(run_dir, "org/name", "step-3").revision == "step-3"


def test_a_folder_without_a_card_is_mentioned(run_dir: Path, push: Push) -> None:
    assert "card" not in push(None, str(run_dir), "org/name", "--dry-run").err
    (run_dir / "hf" / "README.md").unlink()
    done = push(None, str(run_dir), "org/name", "--dry-run")
    assert done.status == 0
    folder = run_dir / "hf"
    assert f"{folder} has no README.md, so the model has no card on the hub" in done.err
    assert f"`nemorl models card {folder}` writes one" in done.err
