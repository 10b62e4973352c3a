"""What a person needs to know to repeat a run: versions, machine, commit. Imports nothing heavy."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from .files import JsonObject

PACKAGES = ("nemorl", "torch", "megatron-core", "transformers", "ray", "numpy", "pydantic")


def collect_facts(resumed_step: int | None) -> JsonObject:
    """One start of a run. `resumed_step` is the step of the checkpoint it goes on from, if any."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "resumed_step": resumed_step,
        "git_commit": git_commit(Path(__file__)),
        "versions": {"python": platform.python_version(), **installed_versions()},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        },
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(file: Path) -> str | None:
    """The commit that `file` is from, `+changes` if the work tree differs; None if git does not track it."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
