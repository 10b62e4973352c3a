"""Observer of a run: writes its files and timeline, shows it on the console, feeds trackers.

with Observer(folder, experiment.logger, total_steps=200) as observer:
    observer.header({"model": "..."})
    with observer.stage("start", outside_step=True): ...
    with observer.stage("generation", total=64, unit="trajectories") as stage: stage.advance(tokens=31)
    observer.step(1, version=1, values={"reward/mean": 0.4, "tokens/trained": 5120})
    observer.summary([Change("validation/reward", 0.31, 0.62)])
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from nemorl.config.run import LoggerConfig

from .console import open_console
from .files import WriteError
from .metrics import Change, MetricsWriter, Sample, SampleWriter, StepMetrics
from .run_folder import RunFolder
from .timeline import Stage, Stages, Timeline
from .trackers import open_trackers

logger = logging.getLogger(__name__)


class Observer:
    """Records and shows one start of a run. Leaving its `with` closes all files, whatever happened."""

    def __init__(
        self, folder: RunFolder, config: LoggerConfig, *, total_steps: int, stream: TextIO | None = None
    ) -> None:
        """Raises `TrackerMissing` or `WriteError` before anything else has started."""
        self.folder = folder
        paths = folder.paths
        self._trackers = open_trackers(config, folder)
        self._metrics = MetricsWriter(paths.metrics)
        self._samples = SampleWriter(paths.samples)
        self._timeline = Timeline(paths.timeline, title=paths.root.name)
        self._console = open_console(
            config, total_steps=total_steps, first_step=folder.resumed_step or 0, stream=stream
        )
        self._stages = Stages([self._console, self._timeline])
        self._logging = _LogHandlers(self._console.logging_handler(), paths.logs / "driver.log")

    def header(self, facts: Mapping[str, str]) -> None:
        """Show what runs, and add it to header.json."""
        self.folder.add_facts(facts)
        self._console.header(facts)

    def stage(
        self, name: str, *, total: int | None = None, unit: str = "", outside_step: bool = False
    ) -> AbstractContextManager[Stage]:
        """Time a stage for the metrics, the timeline and the console; see `Stages.stage`."""
        return self._stages.stage(name, total=total, unit=unit, outside_step=outside_step)

    def step(self, step: int, *, version: int, values: Mapping[str, float]) -> StepMetrics:
        """Record a step that is done, with the seconds of its stages and its throughput.

        `throughput/tokens_per_second` is `tokens/trained` over the seconds of the whole step, and
        `throughput/generated_tokens_per_second` is `tokens/generated` over those of the stage `generation`.
        Call it before the step's checkpoint becomes visible, because a resume at this step needs its line;
        the seconds of the checkpoint then count in the line after. Raises `WriteError`.
        """
        seconds = self._stages.finish_step(step)
        metrics = StepMetrics(step, version, {**values, **_throughput(values, seconds), **seconds})
        self._metrics.write(metrics)
        for tracker in self._trackers:
            tracker.log(metrics)
        self._console.step(metrics)
        return metrics

    def samples(self, samples: Sequence[Sample]) -> None:
        """Keep some conversations. Raises `WriteError`."""
        self._samples.write(samples)

    def summary(self, changes: Sequence[Change]) -> Path | None:
        """Write the report, show what changed and where the report is.

        A report that cannot be written is a warning and None: everything it is made of is whole.
        """
        from .report import write_report

        root = self.folder.paths.root
        report = None
        try:
            report = write_report(root)
        except WriteError as error:
            logger.warning("%s Everything else is there; `nemorl report %s` tries again.", error, root)
        self._console.summary(changes, report)
        return report

    def close(self) -> None:
        """Close everything; the folder is free for another process."""
        self._console.close()
        self._logging.remove()
        self._timeline.close()
        self._samples.close()
        self._metrics.close()
        for tracker in self._trackers:
            tracker.close()
        self.folder.close()

    def __enter__(self) -> "Observer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LogFile(logging.FileHandler):
    """A log that says nothing about itself: what cannot be written is left out, as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Else logging prints a traceback for every line."""

    def close(self) -> None:
        """Close the file; what did not fit hides no error that says so."""
        with suppress(OSError):
            super().close()


class _LogHandlers:
    """Sends warnings to the console, and those and our own notes to a file, during a run."""

    def __init__(self, console: logging.Handler, file: Path) -> None:
        console.setLevel(logging.WARNING)
        to_file = _LogFile(file, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handlers = (console, to_file)
        self._ours = logging.getLogger("nemorl")
        self._level = self._ours.level
        self._ours.setLevel(logging.INFO)
        root = logging.getLogger()
        # What the command line prints with until a run has a console; else warnings come twice.
        self._replaced = [other for other in root.handlers if type(other) is logging.StreamHandler]
        for other in self._replaced:
            root.removeHandler(other)
        for handler in self._handlers:
            root.addHandler(handler)

    def remove(self) -> None:
        """Leave logging as it was."""
        self._ours.setLevel(self._level)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        for other in self._replaced:
            logging.getLogger().addHandler(other)


def _throughput(values: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    found = {}
    if "tokens/trained" in values and seconds["time/step"] > 0:
        found["throughput/tokens_per_second"] = values["tokens/trained"] / seconds["time/step"]
    if "tokens/generated" in values and seconds.get("time/generation", 0) > 0:
        found["throughput/generated_tokens_per_second"] = (
            values["tokens/generated"] / seconds["time/generation"]
        )
    return found
