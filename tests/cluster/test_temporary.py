"""Ray's folders of drivers that are gone are removed, and no others."""

import subprocess
import sys
from pathlib import Path

from nemorl.cluster.runtime import LOCK, hold, remove_abandoned

HOLD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from nemorl.cluster.runtime import hold
lock = hold(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def make(parent: Path, name: str) -> Path:
    folder = parent / f"nemorl-ray-{name}"
    (folder / "session" / "logs").mkdir(parents=True)
    (folder / "session" / "logs" / "raylet.out").touch()
    return folder


def test_only_folders_whose_driver_is_gone_are_removed(tmp_path: Path) -> None:
    killed, failed, held, unborn = (make(tmp_path, name) for name in ("killed", "failed", "held", "unborn"))
    subprocess.run([sys.executable, "-c", HOLD_AND_DIE, str(killed)], check=False)
    hold(failed).close()
    lock = hold(held)
    assert (killed / LOCK).exists()

    remove_abandoned(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["nemorl-ray-held", "nemorl-ray-unborn"]
    assert unborn.exists()
    lock.close()


def test_a_driver_holds_its_own_folder_once(tmp_path: Path) -> None:
    folder = make(tmp_path, "own")
    with hold(folder):
        remove_abandoned(tmp_path)
        remove_abandoned(tmp_path)
        assert folder.exists()
    remove_abandoned(tmp_path)
    assert not folder.exists()
