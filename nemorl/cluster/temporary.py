"""Folders of a local Ray: held by a lock as long as their driver lives, and removed when it is gone.

A driver that fails keeps its folder, whose logs may tell why; one that is killed cannot remove it. The kernel
gives a lock back however a process ends, so the next start can tell which folders nobody uses.
"""

import fcntl
import logging
import shutil
from pathlib import Path
from typing import IO

FOLDERS = "nemorl-ray-"  # how their names begin
LOCK = "driver.lock"

logger = logging.getLogger(__name__)


def hold(folder: Path) -> IO[bytes]:
    """Hold a folder until the file that is returned is closed, or this process ends."""
    lock = (folder / LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_abandoned(parent: Path) -> None:
    """Remove the folders that nobody holds. One without a lock may be about to get it, and stays."""
    for path in parent.glob(f"{FOLDERS}*/{LOCK}"):
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # it is in use, another user's, or just removed by another start
            continue
        logger.info("removed %s, which a run that has ended left behind", path.parent)
