"""Services that plot the metrics in addition to our files."""

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nemorl.config.run import LoggerConfig

from .files import TrackerMissing, write_failed
from .metrics import StepMetrics
from .run_folder import RunFolder


class Tracker(Protocol):
    """Receives the metrics of every step."""

    def log(self, metrics: StepMetrics) -> None:
        """Record one step. Raises `WriteError`."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class TensorBoardTracker:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path, *, resumed_step: int | None) -> None:
        """Steps after `resumed_step` that are already there are hidden, since they come again.

        Raises `WriteError`.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        purge_step = None if resumed_step is None else resumed_step + 1
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise write_failed(folder, error) from error

    def log(self, metrics: StepMetrics) -> None:
        """One scalar for each metric."""
        try:
            for key, value in metrics.values.items():
                self._writer.add_scalar(key, value, metrics.step)
            self._writer.flush()
        except OSError as error:
            raise write_failed(self._folder, error) from error

    def close(self) -> None:
        """Close the event file. Each step is flushed, so an error of writing was reported before."""
        with suppress(OSError):
            self._writer.close()


def check_trackers(config: LoggerConfig) -> None:
    """Raise `TrackerMissing` when the config asks for a tracker that is not installed. No import is made."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrackerMissing(
            "logger.tensorboard is true, but the package tensorboard is not installed: "
            "pip install 'nemorl[trackers]', or set logger.tensorboard=false."
        )


def open_trackers(config: LoggerConfig, folder: RunFolder) -> list[Tracker]:
    """The trackers that the config asks for. Raises `TrackerMissing`."""
    check_trackers(config)
    if not config.tensorboard:
        return []
    return [TensorBoardTracker(folder.paths.tensorboard, resumed_step=folder.resumed_step)]
