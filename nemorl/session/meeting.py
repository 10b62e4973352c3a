"""Where the ranks of models meet: a store of the driver's."""

from collections.abc import Iterator
from contextlib import contextmanager

from nemorl.weights.process_group import served_store


@contextmanager
def meeting_place(host: str) -> Iterator[str]:
    """host:port of a store that this process serves while the block runs, at an address of this machine."""
    _store, place = served_store(host)
    yield place
