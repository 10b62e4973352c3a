"""All models of a run that learn, kept together: one checkpoint holds all of them or does not exist."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from nemorl.errors import RunError
from nemorl.megatron.checkpoint_store import FileRecord


class Keeper(Protocol):
    """A model as checkpoints see it; `ModelGroup` is one."""

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write all that training needs to go on; records have paths relative to the folder."""
        ...

    async def copy_for_checkpoint(self) -> None:
        """Copy all that aside."""
        ...

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write the copy while training goes on."""
        ...

    async def restore(self, folder: Path) -> None:
        """Take what was written."""
        ...


class TrainedModels:
    """The policy's files lie in the checkpoint's folder itself, those of others in folders of their names."""

    def __init__(self, models: Mapping[str, Keeper]) -> None:
        self._models = models

    async def save(self, folder: Path) -> list[FileRecord]:
        """Write all of them, one after the other: they may share devices."""
        return [
            record
            for name, model in self._models.items()
            for record in _placed(name, await model.save(folder_of(folder, name)))
        ]

    async def copy_for_checkpoint(self) -> None:
        """Copy all of them aside, one after the other."""
        for model in self._models.values():
            await model.copy_for_checkpoint()

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        """Write the copies at the same time, while the models go on."""
        written = await asyncio.gather(
            *(model.write_copy(folder_of(folder, name)) for name, model in self._models.items())
        )
        placed = map(_placed, self._models, written)
        return [record for records in placed for record in records]

    async def restore(self, folder: Path) -> None:
        """Take all of them from a checkpoint. Raises RunError where one is not in it."""
        missing = [name for name in self._models if not folder_of(folder, name).is_dir()]
        if missing:
            raise RunError(
                f"{folder} holds no {' and no '.join(missing)}, as a run of another algorithm wrote it: go "
                "on with the algorithm it began with, or begin a new run from an export of its weights"
            )
        for name, model in self._models.items():
            await model.restore(folder_of(folder, name))


def folder_of(checkpoint: Path, name: str) -> Path:
    """Where the files of a model lie in a checkpoint."""
    return checkpoint if name == "policy" else checkpoint / name


def _placed(name: str, records: Sequence[FileRecord]) -> list[FileRecord]:
    """Records of files as the checkpoint names them."""
    if name == "policy":
        return list(records)
    return [replace(record, path=f"{name}/{record.path}") for record in records]
