"""A write that fails is a sentence, and costs nothing that was finished before."""

import errno
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemorl.observe.files import WriteError
from nemorl.run.checkpoints import full_disk_named
from tests.full_disk import files_end_at
from tests.run.runs import finish, start, tiny_model, write_experiment


def test_safetensors_own_error_is_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=rf"The model could not be written to {tmp_path}: .*File too large"),
        full_disk_named("The model", tmp_path, "Make room."),
        files_end_at(1000),
    ):
        save_file({"weight": torch.zeros(1000)}, tmp_path / "weights.safetensors")


def test_the_file_that_an_error_names_is_shown_also_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=r"denied \(there/x\); [0-9.]+ MB are free on its disk\. Make room\."),
        full_disk_named("The model", tmp_path / "not" / "there", "Make room."),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "there/x")


def test_a_folder_that_exists_is_another_matter(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), full_disk_named("The model", tmp_path, "Make room."):
        tmp_path.mkdir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB for the checkpoints of the run `run`."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.ci
def test_a_run_continues_when_the_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    algorithm, run = {"num_steps": 1000, "validation": {"period": None}}, tmp_path / "run"
    changes = {"algorithm": algorithm, "checkpointing": {"period": 2, "max_failures": 100}}
    driver = start("train", write_experiment(tmp_path, tiny_model(tmp_path / "model"), "run", **changes))

    def steps() -> list[int]:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
        return [int(path.name[5:]) for path in small_disk.glob("step_*")]

    while not steps():
        pass
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):  # until the disk is full
            pass
    warning = "(1 in a row, checkpointing.max_failures is 100); older ones are kept"
    while warning not in (run / "logs" / "driver.log").read_text(encoding="utf-8"):
        steps()
    kept = max(steps())
    ballast.unlink()
    while max(steps()) <= kept:
        pass
    driver.send_signal(signal.SIGTERM)
    status, output = finish(driver, seconds=60)
    assert status == 75, output
    assert "No space left on device" in output
    assert list(small_disk.glob(".step_*")) == []
