"""Models on the Hugging Face hub: where a config names an id such as `Qwen/Qwen3-0.6B` instead of a folder.

The files are downloaded once, with a progress bar, into the cache of huggingface_hub (`HF_HOME`). The config
of a run records the folder there, which names the commit, so that a resumed run has the same weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from nemorl.config.base import Config
from nemorl.config.experiment import Experiment
from nemorl.config.shipped import command_for
from nemorl.errors import NemorlError, Problem, shorten

from .published import PUBLISHED

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = [
    "*.json",
    "*.jinja",
    "*.safetensors",
    "*.model",
    "*.txt",
    "README.md",
]  # not weights in other formats
_CONFIGS = ["config.json", "generation_config.json"]
_OTHER_COPIES = ["original/*", "onnx/*", "*/*"]
_MODEL = "model_path"
_FIELDS = (_MODEL, "path")  # `path` of a tokenizer

Section = TypeVar("Section")


class HubError(NemorlError):
    """A model that cannot be downloaded; the message follows its id and has the fix."""


def is_hub_id(path: Path) -> bool:
    """True for `org/name` if neither the folder nor the folder `org` exists.

    False for the models of shipped experiments that a command creates, such as `models/arithmetic`.
    """
    is_id = bool(_ID.fullmatch(str(path))) and not path.exists() and not path.parent.exists()
    return is_id and command_for(str(path)) is None


def fetch_model(name: str, commit: str | None = None, files: Sequence[str] = _FILES) -> Path:
    """The folder of a model in the cache, after a download if it is not there. Raises HubError.

    Without a commit it is the newest one of the main branch.
    """
    from huggingface_hub import constants, errors, snapshot_download  # with an HTTP client

    hub = constants.ENDPOINT
    absent = "there is no such folder"
    try:
        folder = snapshot_download(
            name, revision=commit, allow_patterns=list(files), ignore_patterns=_OTHER_COPIES
        )
        return Path(folder)
    except errors.GatedRepoError as error:
        fix = f"accept the conditions of {hub}/{name} and set HF_TOKEN"
        raise HubError(f"{absent}, and the model on the hub requires permission; {fix}") from error
    except errors.RepositoryNotFoundError as error:
        fix = "correct the name, or set HF_TOKEN if it is private"
        raise HubError(f"{absent}, and {hub} has no such model; {fix}") from error
    except (OSError, errors.HfHubHTTPError, ValueError) as error:
        reason = shorten(str(error).partition("\n")[0])
        fix = f"run `hf download {name}` where there is a network, with HF_HOME on a disk that both share"
        problem = f"{absent}, and it cannot be downloaded from {hub} ({reason})"
        raise HubError(f"{problem}; {fix}, or name a folder that has the model") from error


def commits_in(config: str) -> dict[str, str]:
    """The commits of models of the hub that the config of a run records, by their ids."""
    found = re.findall(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)", config)
    return {f"{owner}/{name}": commit for owner, name, commit in found}


def with_local_models(
    experiment: Experiment, commits: Mapping[str, str] = MappingProxyType({}), *, weights: bool = True
) -> tuple[Experiment, list[Problem]]:
    """The experiment with folders in place of the ids of models on the hub, and what cannot be downloaded.

    Without `weights` only their config.json is downloaded, unless the shape is known without it; other files
    are there if the cache has them.
    """
    problems: list[Problem] = []
    locate = _Locator(commits, weights, problems)
    located = {
        name: locate(getattr(experiment, name), name)
        for name in ("policy", "generation", "critic", "reference", "teachers", "rewards")
    }
    changed = {name: section for name, section in located.items() if section != getattr(experiment, name)}
    return experiment.model_copy(update=changed), problems


@dataclass(frozen=True)
class _Locator:
    """Replaces ids in a section, and adds what cannot be downloaded to `problems`."""

    commits: Mapping[str, str]
    weights: bool
    problems: list[Problem]

    def __call__(self, section: Section, field: str) -> Section:
        result: Any = section
        name = field.rpartition(".")[2]
        if isinstance(section, dict):
            result = {key: self(one, f"{field}.{key}") for key, one in section.items()}
        elif isinstance(section, tuple):
            result = tuple(self(one, f"{field}.{place}") for place, one in enumerate(section))
        elif isinstance(section, Config):
            below = {key: self(getattr(section, key), f"{field}.{key}") for key in section.model_fields_set}
            changed = {key: value for key, value in below.items() if value != getattr(section, key)}
            result = section.model_copy(update=changed) if changed else section
        elif isinstance(section, Path) and name in _FIELDS and is_hub_id(section):
            # Where config.json suffices, the shapes of well-known models are known without it.
            if not self.weights and (name != _MODEL or str(section) in PUBLISHED):
                return section
            files = _FILES if self.weights else _CONFIGS
            try:
                result = fetch_model(str(section), self.commits.get(str(section)), files)
            except HubError as error:
                self.problems.append(Problem(field, str(section), str(error)))
        return result  # type: ignore[no-any-return]
