"""What an engine refuses and how it fails."""


class RequestRefused(ValueError):
    """A request that can never be served; the sentence says which limit it breaks."""


class EngineFailed(RuntimeError):
    """The engine died of an error, which is the cause; nothing it was asked for will arrive."""
