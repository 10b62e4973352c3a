"""An exported folder on the Hugging Face hub."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.errors import NemorlError, UsageError, shorten
from nemorl.models.hf_config import BrokenModelFolder
from nemorl.models.hf_folder import HfFolder

from .card import CARD_FILE
from .checkpoints import ORIGIN_FILE

# By git's rules a name has no space, none of these characters, no `..`, and no dot or slash at an end.
_INVALID_BRANCH = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|//|@\{|^[./-]|[./]$|\.lock$|^@$")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


class PushError(NemorlError):
    """The hub did not take the folder; the message has the reason and the fix."""


@dataclass(frozen=True)
class Push:
    folder: Path
    repository: str  # org/name
    files: Sequence[Path]  # that are uploaded, in `folder`
    revision: str | None = None  # branch; None is the main one

    @property
    def has_card(self) -> bool:
        return any(path == self.folder / CARD_FILE for path in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def plan_push(place: Path, repository: str, revision: str | None = None) -> Push:
    """Find what of a run or an exported folder is uploaded.

    Raises UsageError if it is not complete, or for a name of a repository or a branch that the hub has not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"{repository} is no name of a repository: {error}; use ORG/NAME") from error
    if "/" not in repository:
        raise UsageError(f"{repository} names no owner; use ORG/{repository}, with your name or organization")
    if revision is not None and (not revision or _INVALID_BRANCH.search(revision)):
        raise UsageError(
            f"--revision {revision!r} is no name of a branch; use letters, digits, `.`, `_`, `-`"
        )
    folder = place if _holds_model(place) else place / "hf"
    if not _holds_model(folder):
        fix = "export one (`nemorl models export`), or train with checkpointing.save_hf"
        raise UsageError(f"{place} holds no exported model, and neither does {place / 'hf'}: {fix}")
    if (folder / _ADAPTER[0]).exists():
        if not (folder / _ADAPTER[1]).exists():
            raise UsageError(f"{folder} lacks {_ADAPTER[1]}: export it again")
    else:
        try:
            weights = HfFolder(folder)
            absent = {path for name in weights.names() if not (path := weights.file(name)).exists()}
        except BrokenModelFolder as error:
            raise UsageError(f"{error}: export it again") from error
        if absent:
            names = ", ".join(sorted(path.name for path in absent))
            raise UsageError(f"{folder} lacks {names}, which its index names: export it again")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in files if not _is_local(path.relative_to(folder))]
    return Push(folder, repository, kept, revision)


def push(plan: Push, *, private: bool = False) -> str:
    """Create the repository, unless it exists, and upload the files; the address of the commit.

    Files that the repository has with the same content are not sent again, so a push that was interrupted
    continues. The token is the one that huggingface_hub finds (HF_TOKEN, or `hf auth login`). Raises
    UsageError without one, and PushError.
    """
    from huggingface_hub import HfApi, constants, errors, get_token

    hub, token = constants.ENDPOINT, get_token()
    if token is None:
        raise UsageError(
            "there is no token for the hub: set HF_TOKEN to one that may write, or run `hf auth login`"
        )
    api = HfApi(token=token)
    try:
        api.create_repo(plan.repository, private=private or None, exist_ok=True)
        if plan.revision is not None:
            api.create_branch(plan.repository, branch=plan.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=plan.repository,
            folder_path=plan.folder,
            revision=plan.revision,
            commit_message="Upload a model exported by nemorl",
            allow_patterns=[str(path.relative_to(plan.folder)) for path in plan.files],
        )
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reason = _without(token, str(error))
        if status in (401, 403):
            fix = "use a token with write access to it, in HF_TOKEN"
            raise PushError(f"{hub} refuses {plan.repository} ({reason}); {fix}") from None
        raise PushError(f"{hub} does not take {plan.repository} ({reason}); push again to continue") from None
    except Exception as error:
        # The HTTP client of huggingface_hub is httpx or httpx2, by version.
        if not (isinstance(error, OSError) or type(error).__module__.startswith("httpx")):
            raise
        fix = "push again where there is a network; what was sent is not sent again"
        raise PushError(f"{hub} cannot be reached ({_without(token, str(error))}); {fix}") from None
    return str(commit.commit_url)


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / _ADAPTER[0]).exists()


def _is_local(path: Path) -> bool:
    """True for what is of this machine: hidden names, and the file that names the run's folder."""
    return path.name == ORIGIN_FILE or any(part.startswith(".") for part in path.parts)


def _without(token: str, text: str) -> str:
    return shorten(text.replace(token, "…").strip().partition("\n")[0])
