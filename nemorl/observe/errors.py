"""What can go wrong while a run is recorded. Each message is a sentence for the person who started it."""


class ObserveError(RuntimeError):
    """The base: the run cannot be recorded as asked."""


class RunFolderError(ObserveError):
    """The run folder is in use, holds another run, or one of its files is damaged."""


class WriteError(ObserveError):
    """A file of the run could not be written; what it held before is still whole."""


class TrackerMissing(ObserveError):
    """A tracker is asked for whose package is not installed."""
