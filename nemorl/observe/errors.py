"""What can go wrong while a run is recorded."""

from nemorl.errors import RunError


class RunFolderError(RunError):
    """The run folder is in use, holds another run, or one of its files is damaged."""


class WriteError(RunError):
    """A file of the run could not be written; what it held before is still whole."""


class TrackerMissing(RunError):
    """A tracker is asked for whose package is not installed."""
