"""The checkpoints of a run, and the export of their weights, with a file of their `Origin`."""

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from nemorl.cluster.errors import ClusterError, WorkerFailed
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.load import load_experiment
from nemorl.config.policy import PolicyConfig
from nemorl.config.quantization import QuantizationConfig, QuantizationFormat
from nemorl.errors import ConfigError, NemorlError, UsageError
from nemorl.megatron.checkpoint_store import (
    CheckpointStore,
    FileRecord,
    UnwritableCheckpoint,
    verify,
    writing,
)
from nemorl.megatron.export import export_adapter, export_draft, export_hf
from nemorl.models.hf_writer import SHARD_BYTES
from nemorl.observe.files import WriteError, room_left
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.order import Feedback
from nemorl.rollout.schedule import DataPlace
from nemorl.rollout.versions import Epoch, Lineage
from nemorl.session.handles import Folder, TrainedModels, folder_of

from .card import CARD_FILE, Facts, is_edited, write_card
from .memory import PROGRESS_FILE, MemoryCheckpoints

ORIGIN_FILE = "nemorl.json"
Save = Callable[[Path], Awaitable[Sequence[FileRecord]]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    run: str  # the run folder, as it was named at the export
    step: int
    model: str = "policy"  # of those that learned in it

    @classmethod
    def read(cls, model: Path) -> "Origin | None":
        """Read it from a model folder; None if the folder is not an export."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((model / ORIGIN_FILE).read_text(encoding="utf-8"))
            return cls(str(content["run"]), int(content["step"]), str(content.get("model", "policy")))
        return None

    def write(self, model: Path) -> None:
        (model / ORIGIN_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return f"step {self.step} of {self.run}"


@contextmanager
def full_disk_named(what: str, folder: Path, fix: str) -> Iterator[None]:
    """Turn a write into `folder` that fails in the block into a `WriteError`, but for a FileExistsError."""
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        problem = f"{what} could not be written to {folder}: {reason}; {room_left(folder)}. {fix}"
        raise WriteError(problem) from error


@dataclass(frozen=True)
class Progress:
    """What the driver adds to a checkpoint. Everything random is a pure function of these and the seed."""

    step: int = 0  # steps that are done
    position: int = 0  # of `DataPlace`
    skipped_updates: int = 0  # optimizer steps of the policy that guards skipped
    entropy_coefficient: float | None = None  # see `EntropyWeight`; None before the first step
    entropy: float | None = None  # mean per token during the last step's updates
    best_value: float | None = None  # see `EarlyStop`
    waited: int = 0  # measurements since then
    beyond: Sequence[int] = ()  # of `DataPlace`
    extra_versions: int = 0  # by which the version of the weights is larger than `step`: of discarded steps
    skipping_steps: int = 0  # newest steps at whose end the latest update of a model was a skipped one
    rollbacks: int = 0  # returns to an earlier checkpoint so far
    feedback: Mapping[str, Any] | None = None  # of `DataPlace`, as JSON has it

    @property
    def place(self) -> DataPlace:
        feedback = None if self.feedback is None else Feedback.parse(**self.feedback)
        return DataPlace(self.position, tuple(self.beyond), feedback)

    def at(self, place: DataPlace) -> "Progress":
        feedback = None if place.feedback is None else asdict(place.feedback)
        return replace(self, position=place.position, beyond=place.beyond, feedback=feedback)

    @property
    def lineage(self) -> Lineage:
        """Of a run that begins here. Later versions of an ended run may come again: no sample has them."""
        return Lineage((Epoch(self.step + self.extra_versions, self.step),))

    @classmethod
    def parse(cls, text: str) -> "Progress":
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        return cls.parse((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))

    def write(self, checkpoint: Path) -> None:
        with writing(checkpoint / PROGRESS_FILE):
            (checkpoint / PROGRESS_FILE).write_text(self.text, encoding="utf-8")


@dataclass(frozen=True)
class SavedState:
    """A complete checkpoint of this run, in memory or on disk."""

    progress: Progress
    folder: Folder  # for `TrainedModels.restore`


class Checkpoints:
    """Saves one at a time. Leaving its `with` waits for the one that is still being written.

    With `checkpointing.asynchronous` a step waits only for the copy of the state and, if it is not done yet,
    for the checkpoint before. Where the disk refuses a write, as a full one does, the next `save`, `check` or
    `settle` warns, and raises after more than `checkpointing.max_failures` in a row; other errors are raised
    there. One in `memory` is written from the same copy; it never fails a run and never lets a step wait for
    the one before. With `checkpointing.stop_seconds` the state of all other steps is copied for `save_copy`.
    """

    def __init__(
        self,
        experiment: Experiment,
        models: TrainedModels,
        store: CheckpointStore,
        memory: MemoryCheckpoints | None = None,
    ) -> None:
        self._experiment, self._config = experiment, experiment.checkpointing
        self._models, self._store, self._memory = models, store, memory
        self._step = 0  # of the one that is being written
        self._committed = 0  # the newest step on disk, of those that were written here
        self._copied: tuple[Progress, Awaitable[StepMetrics]] | None = None  # and not written to the disk
        self._failures = 0  # of writes to the disk, in a row
        self._writing: asyncio.Task[None] | None = None

    async def save(self, progress: Progress, metrics: Awaitable[StepMetrics]) -> None:
        """Begin the checkpoint of a step, and end it unless `checkpointing.asynchronous`.

        It is committed when its step's line is written, which gives `metrics`.
        """
        await self.settle()
        if progress.step == self._committed:  # by `save_copy`
            return
        if self._config.asynchronous:
            await self._begin(progress, metrics, to_disk=True)
            return
        self._step = progress.step
        self._writing = asyncio.create_task(self._write(progress, metrics, self._models.save))
        await self.settle()

    def due_copy(self, step: int, *, has_line: bool) -> bool:
        """True if `copy` is to be called after a step that is not saved.

        A stop may drop the validation of this step, and so its line: until it has one, the copy of the step
        before is kept.
        """
        busy = self._writing is not None and not self._writing.done()
        in_memory = self._memory is not None and self._memory.due(step)
        return not busy and (in_memory or (has_line and self._config.stop_seconds is not None))

    async def copy(self, progress: Progress, metrics: Awaitable[StepMetrics]) -> None:
        """Copy the state of a step, for `save_copy`, and begin a checkpoint in memory if one is due."""
        await self.settle()
        await self._begin(progress, metrics, to_disk=False)

    def save_copy(self) -> None:
        """Begin the checkpoint of the newest copy on disk, while a step continues."""
        if self._copied is not None:
            (progress, metrics), self._copied = self._copied, None
            self._writing = asyncio.create_task(self._write_after(self._writing, progress, metrics))

    async def newest_state(self, before: float = math.inf) -> SavedState | None:
        """The newest complete checkpoint of a step `before`: in memory, else on disk. Ranks may have died.

        What these ranks were writing is given up. In memory the files are brought to the nodes on which the
        session's models are placed now.
        """
        try:
            await self.settle()
        except ClusterError as error:
            self._writing = None
            if isinstance(error, WorkerFailed):  # the disk is full: not a matter of the ranks
                raise
            logger.warning("the checkpoint of step %d was not completed: %s", self._step, error)
        self._copied, self._committed = None, 0  # later steps come again
        held = await self._memory.newest(before) if self._memory is not None else None
        steps = (step for step in self._store.steps() if step < before)
        if held is not None and held.step >= max(steps, default=0):
            return SavedState(Progress.parse(held.progress), held.folder)
        found = self._store.latest_valid(before)
        if held is not None and (found is None or held.step > found.step):
            return SavedState(Progress.parse(held.progress), held.folder)
        return SavedState(Progress.read(found.path), found.path) if found else None

    def on_disk(self, step: int) -> bool:
        return step in self._store.steps()

    async def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which would otherwise be the newest ones."""
        await asyncio.to_thread(self._store.remove_after, step)
        if self._memory is not None:
            await self._memory.remove_after(step)

    def check(self) -> None:
        """Take the result of the checkpoint that was being written, if it has ended."""
        if self._writing is not None and self._writing.done():
            self._take_result(self._writing)

    async def settle(self, *, last: bool = False) -> None:
        """Wait until the one that is being written has ended; any failure of the `last` one is raised."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._take_result(self._writing, last=last)

    def _take_result(self, writing: "asyncio.Task[None]", *, last: bool = False) -> None:
        error, bound = writing.exception(), self._config.max_failures
        if error is not None:
            if last or not is_write_failure(error) or self._failures >= bound:
                raise error
            self._failures += 1
            counts = f"{self._failures} in a row, checkpointing.max_failures is {bound}"
            kept = "older ones are kept and training continues"
            logger.warning(
                "the checkpoint of step %d is not written (%s); %s: %s", self._step, counts, kept, error
            )
        self._writing = None

    async def __aenter__(self) -> "Checkpoints":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.settle(last=True)
        except NemorlError as failure:
            if error is None:
                raise
            if failure is error:  # `check` has raised it, and it is on its way
                return
            logger.warning("the checkpoint of step %d was not completed: %s", self._step, failure)

    async def _begin(self, progress: Progress, metrics: Awaitable[StepMetrics], *, to_disk: bool) -> None:
        self._copied = None
        await self._models.copy_for_checkpoint()
        self._step = progress.step
        self._copied = None if to_disk else (progress, metrics)
        self._writing = asyncio.create_task(self._write_copy(progress, metrics, to_disk))

    async def _write_copy(self, progress: Progress, metrics: Awaitable[StepMetrics], to_disk: bool) -> None:
        if self._memory is not None and self._memory.due(progress.step):
            write, values = self._models.write_copy, (await metrics).values
            await self._memory.save(progress.step, progress.text, values, write)
        if to_disk:
            await self._write(progress, metrics, self._models.write_copy)

    async def _write_after(
        self, before: "asyncio.Task[None] | None", progress: Progress, metrics: Awaitable[StepMetrics]
    ) -> None:
        if before is not None:
            await asyncio.wait({before})  # of the same copy, in memory
        await self._write(progress, metrics, self._models.write_copy)

    async def _write(self, progress: Progress, metrics: Awaitable[StepMetrics], save: Save) -> None:
        """Write and commit a checkpoint; a failed one leaves nothing on the disk."""
        config, store, began = self._config, self._store, time.monotonic()
        folder = store.begin(progress.step)
        try:
            progress.write(folder)
            records = await save(folder)
            if config.export_hf:
                fix = "Make room, or set checkpointing.export_hf to false, and continue with --resume."
                with full_disk_named("The Hugging Face folder of checkpointing.export_hf", folder, fix):
                    shard_bytes = config.shard_bytes
                    await asyncio.to_thread(
                        export_hf,
                        folder,
                        folder / "hf",
                        self._experiment.policy,
                        shard_bytes=shard_bytes,
                    )
                    Origin(str(self._experiment.run_dir.absolute()), progress.step).write(folder / "hf")
            waits = time.monotonic()
            values = (await metrics).values
            began += time.monotonic() - waits
            await asyncio.to_thread(store.commit, progress.step, values, records)
            self._failures, self._committed = 0, progress.step
            self._check_seconds(time.monotonic() - began)
            await asyncio.to_thread(store.prune, config.keep, config.metric, config.higher_is_better)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # not there once it has its name

    def _check_seconds(self, seconds: float) -> None:
        bound = self._config.stop_seconds
        if bound is not None and seconds > bound / 2:
            problem = f"{seconds:.0f} s for a checkpoint are more than half of checkpointing.stop_seconds"
            logger.warning("%s (%g): raise it, or a stop may end without one", problem, bound)


def is_write_failure(error: BaseException) -> bool:
    """True if a file system refused a write, of the driver or of a rank; the processes can continue."""
    unwritable = f"{UnwritableCheckpoint.__module__}.{UnwritableCheckpoint.__qualname__}"
    if isinstance(error, WorkerFailed):
        return error.kind == unwritable
    return isinstance(error, UnwritableCheckpoint | WriteError)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    form: Literal["hf", "adapter", "draft", "megatron"] = "hf",
    model: str = "policy",
    *,
    quantize: QuantizationFormat | None = None,
    ignore: Sequence[str] | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Write the weights of a checkpoint of a run folder as a Hugging Face folder, its adapters as PEFT keeps
    them, its head for drafts, or a checkpoint of megatron-core. Of several models that learn, `model` is one.

    A Hugging Face folder may be quantized, without layers that match a pattern of `ignore`; without any, of
    the model's own `quantization.ignore`. Raises UsageError for a wrong argument, and other NemorlErrors.
    """
    _require_checkpoint(checkpoint)
    run_dir = checkpoint.absolute().parents[1]
    config = RunPaths(run_dir).config
    if not config.exists():
        raise UsageError(
            f"{checkpoint} is not in the `checkpoints` of a run folder: {config}, which has the "
            "model, does not exist. Name a folder such as RUN_DIR/checkpoints/step_00000010."
        )
    step = verify(checkpoint).step
    try:  # an older version may have written it
        models = {spec.name: spec.config for spec in models_of(load_experiment(config)) if spec.trains}
    except ConfigError as error:
        raise UsageError(
            f"{error}\nIt says which model the checkpoint is of, in the fields of the version that wrote it. "
            "Keep a copy of it, correct these fields in it (remove those that are no more) and export again."
        ) from error
    if model not in models:
        raise UsageError(f"no {model} learns in the run of {config}: take --model {' or '.join(models)}")
    sharded = partial(export_hf, shard_bytes=shard_bytes or SHARD_BYTES)
    export: Callable[[Path, Path, PolicyConfig], None] = sharded
    if form == "adapter":
        export = export_adapter
    if form == "draft":
        export = export_draft
    if quantize is not None:
        own = models[model].quantization
        patterns = tuple(ignore or (own.ignore if own is not None else ()))
        quantization = QuantizationConfig(format=quantize, ignore=patterns)
        export = partial(sharded, quantization=quantization)
    if form == "megatron":
        from nemorl.megatron.checkpoint import export_megatron  # imports Megatron, which takes seconds

        export = export_megatron
    with full_disk_named(f"The weights of {checkpoint}", out.parent, "Make room, or name another folder."):
        export(folder_of(checkpoint, model), out, models[model])
        Origin(str(run_dir), step, model).write(out)
        if form in ("hf", "adapter"):
            write_card(Facts.read(out, run_dir, step, model))


def _require_checkpoint(folder: Path) -> None:
    def newest_in(place: Path) -> str | None:
        store = CheckpointStore(place)
        return f"the newest is {store.path(steps[-1])}" if (steps := store.steps()) else None

    if not folder.exists():
        fix = newest_in(folder.parent) or "name one such as RUN_DIR/checkpoints/step_00000010"
        raise UsageError(f"there is no checkpoint {folder}: {fix}")
    if newest := newest_in(folder / "checkpoints") or newest_in(folder):
        raise UsageError(f"{folder} holds checkpoints: name one of them; {newest}")
    if RunPaths(folder).holds_run:
        raise UsageError(f"{folder} is a run without a checkpoint yet: there are no weights to export")


def replace_hf(checkpoint: Path, step: int, hf_dir: Path, experiment: Experiment) -> None:
    """Replace `hf_dir`, but for a model card that was edited; it stays until the new one is complete."""
    fix = f"All checkpoints are complete: make room, then `nemorl models export {checkpoint} {hf_dir}`."
    fresh = hf_dir.with_name(".hf.new")
    with full_disk_named("The Hugging Face folder of checkpointing.save_hf", hf_dir.parent, fix):
        shutil.rmtree(fresh, ignore_errors=True)
        export_hf(checkpoint, fresh, experiment.policy, shard_bytes=experiment.checkpointing.shard_bytes)
        Origin(str(experiment.run_dir.absolute()), step).write(fresh)
        if is_edited(hf_dir):
            shutil.copyfile(hf_dir / CARD_FILE, fresh / CARD_FILE)
        write_card(Facts.read(fresh, experiment.run_dir, step))
        shutil.rmtree(hf_dir, ignore_errors=True)
        fresh.rename(hf_dir)
