"""Runs of `nemorl train` in processes of their own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nemorl.config.run import CheckpointingConfig

_POLL_SECONDS = 0.2


def without_checkpoints() -> list[str]:
    """Overrides: no checkpoint, and none of the settings of one, which would have no effect."""
    fields = CheckpointingConfig.model_fields.items()
    given = [
        f"checkpointing.{name}={json.dumps(field.get_default(call_default_factory=True), default=str)}"
        for name, field in fields
        if name != "enabled"
    ]
    return [*given, "checkpointing.enabled=false"]


def train(
    config: Path, folder: Path, overrides: Sequence[str], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Run an experiment in `folder`, which it replaces, with its output next to it, in FOLDER.log.

    Calls `meanwhile` all the time. Raises RuntimeError for a run that fails.
    """
    log = folder.with_suffix(".log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "nemorl.cli", "train", str(config), *overrides, f"run_dir={folder}"]
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as run,
    ):
        while run.poll() is None:
            meanwhile()
            with suppress(subprocess.TimeoutExpired):
                run.wait(_POLL_SECONDS)
    if run.returncode:
        raise RuntimeError(f"{folder.name} ended with status {run.returncode}; its output is in {log}")
