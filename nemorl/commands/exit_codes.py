"""What the exit status of `nemorl` says."""

from enum import IntEnum


class ExitCode(IntEnum):
    """As shells and schedulers see it."""

    WELL = 0
    FAILED = 1  # a run or a command began and failed
    REFUSED = 2  # a configuration or an argument is wrong; nothing was started
    STOPPED = 75  # told to stop by a signal, and can go on with --resume; sysexits' EX_TEMPFAIL
    INTERRUPTED = 130  # Ctrl-C, as shells count it
