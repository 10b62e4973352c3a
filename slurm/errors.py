"""What can go wrong between Slurm and a run."""

from nemorl.errors import RunError, UsageError


class SlurmError(RunError):
    """Slurm refuses or does not answer, or the nodes of a job do not come together."""


class OptionError(SlurmError, UsageError):
    """An option or a variable of `submit` is refused, before anything is queued."""
