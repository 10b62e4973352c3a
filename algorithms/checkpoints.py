"""The checkpoints of a run: begun at a step, written beside the next ones, committed when they are whole."""

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError
from nemorl.megatron.checkpoint_store import CheckpointStore, FileRecord, writing
from nemorl.megatron.export import export_hf
from nemorl.observe.metrics import StepMetrics
from nemorl.session.models import Keeper

from .full_disk import full_disk_named
from .origin import Origin

logger = logging.getLogger(__name__)

PROGRESS_FILE = "driver.json"


@dataclass(frozen=True)
class Progress:
    """What the driver adds to a checkpoint. Everything random is a pure function of these and the seed."""

    step: int = 0  # steps that are done
    position: int = 0  # place in the data
    skipped_updates: int = 0  # optimizer steps left out for non-finite gradients
    entropy_coefficient: float | None = None  # see `EntropyWeight`; None before the first step
    entropy: float | None = None  # mean per token during the last step's updates
    best_value: float | None = None  # see `EarlyStop`
    waited: int = 0  # measurements since then

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        """The progress that a checkpoint holds."""
        return cls(**json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8")))

    def write(self, checkpoint: Path) -> None:
        """Add it to a checkpoint that is being written."""
        with writing(checkpoint / PROGRESS_FILE):
            (checkpoint / PROGRESS_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


class Checkpoints:
    """Saves one at a time. Leaving its `with` waits for the one that is still being written.

    With `checkpointing.asynchronous` a step waits only for the copy of the state and, if it is not done yet,
    for the checkpoint before. What is not committed does not count; a failure is raised at the next `save`,
    `check` or `settle`.
    """

    def __init__(self, experiment: Experiment, models: Keeper, store: CheckpointStore) -> None:
        self._experiment = experiment
        self._config = experiment.checkpointing
        self._models = models
        self._store = store
        self._step = 0  # of the one that is being written
        self._writing: asyncio.Task[None] | None = None

    async def save(self, progress: Progress, metrics: StepMetrics) -> None:
        """Begin the checkpoint of a step, and end it unless `checkpointing.asynchronous`."""
        await self.settle()
        if not self._config.asynchronous:
            await self._write(progress, metrics, self._models.save)
            return
        await self._models.copy_for_checkpoint()
        self._step = progress.step
        self._writing = asyncio.create_task(self._write(progress, metrics, self._models.write_copy))

    def check(self) -> None:
        """Raise what went wrong with the one that is being written, if it is known already."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def settle(self) -> None:
        """Wait until the one that is being written is committed."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def __aenter__(self) -> "Checkpoints":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that ends early keeps the checkpoint that it has begun, if its ranks still can."""
        try:
            await self.settle()
        except NemorlError as failure:
            if error is None:
                raise
            if failure is error:  # `check` has raised it, and it is on its way
                return
            logger.warning("the checkpoint of step %d was not completed: %s", self._step, failure)

    async def _write(
        self,
        progress: Progress,
        metrics: StepMetrics,
        save: Callable[[Path], Awaitable[Sequence[FileRecord]]],
    ) -> None:
        """A checkpoint from its empty folder to its name; one that fails leaves nothing on the disk."""
        folder = self._store.begin(progress.step)
        try:
            progress.write(folder)
            await self._commit(await save(folder), metrics)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # not there once it has its name

    async def _commit(self, records: Sequence[FileRecord], metrics: StepMetrics) -> None:
        if self._config.export_hf:
            await asyncio.to_thread(self._export, self._store.temporary(metrics.step), metrics.step)
        await asyncio.to_thread(self._store.commit, metrics.step, metrics.values, records)
        config = self._config
        await asyncio.to_thread(self._store.prune, config.keep, config.metric, config.higher_is_better)

    def _export(self, folder: Path, step: int) -> None:
        mend = "Make room, or set checkpointing.export_hf to false, and go on with --resume."
        with full_disk_named("The Hugging Face folder of checkpointing.export_hf", folder, mend):
            export_hf(folder, folder / "hf", self._experiment.policy)
            Origin(str(self._experiment.run_dir.absolute()), step).write(folder / "hf")
