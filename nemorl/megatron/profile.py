"""Traces of single steps of a rank, for Perfetto, and the memory behind them."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nemorl.config.policy import ProfileConfig

_MOST_ALLOCATIONS = 1_000_000  # that a snapshot of a GPU's memory remembers

logger = logging.getLogger(__name__)


class StepProfile:
    """Records what a rank does between `start` and `end`, which the same thread calls."""

    def __init__(self, config: ProfileConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin, or begin again if the step before did not come to its end."""
        self._stop()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            if self._config.memory:
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._profile = profile(
            activities=activities, record_shapes=self._config.shapes, profile_memory=self._config.memory
        )
        self._profile.start()

    def end(self, path: Path) -> None:
        """Write `path`.json.gz, and on GPUs with `memory` also `path`.pickle, for pytorch.org/memory_viz."""
        done = self._stop()
        if done is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(f"{path}.json.gz")
            if self._config.memory and torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(f"{path}.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:  # of a full disk: a trace is not worth a run
            logger.warning("the trace %s.json.gz was not written: %s", path, error)

    def _stop(self) -> profile | None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
        return running
