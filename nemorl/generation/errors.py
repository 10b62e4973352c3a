"""What an engine refuses and how it fails."""

from collections.abc import Mapping

from nemorl.errors import RunError


class RequestRefused(ValueError):
    """A request that can never be served; the sentence says which limit it breaks."""


class EngineFailed(RuntimeError):
    """The engine died of an error, which is the cause; nothing it was asked for will arrive."""


class ReplicaLost(RuntimeError):
    """A replica answers nothing any more; the message is the cause."""


class NoReplicaLeft(RunError):
    """Every replica of a pool is lost."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        """`causes` of the losses by replica."""
        super().__init__(dict(causes))
        self.causes = dict(causes)

    def __str__(self) -> str:
        told = "".join(f"\n  | {name}: {cause}" for name, cause in self.causes.items())
        return f"all {len(self.causes)} generation replicas are lost, so nothing can be sampled.{told}"
