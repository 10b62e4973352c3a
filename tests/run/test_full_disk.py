"""A write that fails is a sentence, and costs nothing that was finished before."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemorl.observe.files import WriteError
from nemorl.run.checkpoints import full_disk_named
from tests.full_disk import files_end_at


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
