"""A write that fails, said as one sentence: what was being written, where, why it failed, and the mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nemorl.observe.files import WriteError, room_left


@contextmanager
def full_disk_named(what: str, folder: Path, mend: str) -> Iterator[None]:
    """Turn a write into `folder` that fails in the block into a `WriteError`.

    `mend` says what is whole and what to do. A FileExistsError passes as it is.
    """
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise WriteError(
            f"{what} could not be written to {folder}: {_reason(error)}; {room_left(folder)}. {mend}"
        ) from error


def _reason(error: OSError | SafetensorError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    named = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{named}"
