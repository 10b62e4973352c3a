"""Runs over the nodes of a Slurm job: submission, the launcher on each node, and status."""

from nemorl.errors import RunError, UsageError


class SlurmError(RunError):
    """Slurm refuses a command or does not answer, or the nodes of a job do not come together."""


class OptionError(SlurmError, UsageError):
    """An option or a variable of `submit` is invalid; nothing was queued."""
