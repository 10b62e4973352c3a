"""Services that plot the metrics in addition to our files."""

import importlib.util
from contextlib import suppress
from pathlib import Path

from nemorl.config.run import LoggerConfig

from .files import TrackerMissing, write_failed
from .metrics import StepMetrics
from .run_folder import RunFolder


class TensorBoardTracker:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path, *, resumed_step: int | None) -> None:
        """Hide earlier steps after `resumed_step`, since they come again. Raises `WriteError`."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        purge_step = None if resumed_step is None else resumed_step + 1
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise write_failed(folder, error) from error

    def log(self, metrics: StepMetrics) -> None:
        """Write one scalar for each metric. Raises `WriteError`."""
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
    """Raise `TrackerMissing` when a configured tracker is not installed. No import is made."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrackerMissing(
            "logger.tensorboard is true, but the package tensorboard is not installed: "
            "pip install 'nemorl[trackers]', or set logger.tensorboard=false."
        )


def open_trackers(config: LoggerConfig, folder: RunFolder) -> list[TensorBoardTracker]:
    """Return the configured trackers. Raises `TrackerMissing`."""
    check_trackers(config)
    if not config.tensorboard:
        return []
    return [TensorBoardTracker(folder.paths.tensorboard, resumed_step=folder.resumed_step)]
