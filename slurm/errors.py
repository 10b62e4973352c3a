"""What can go wrong between Slurm and a run."""

from nemorl.errors import RunError


class SlurmError(RunError):
    """Slurm refuses or does not answer, or the nodes of a job do not come together."""
