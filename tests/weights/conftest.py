"""What tests of the weight exchange share."""

import sys
from collections.abc import Iterator

import pytest

from tests.weights.ranks import NIXL_STAND_IN


@pytest.fixture
def nixl_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process imports the stand-in, also where NIXL is installed, and forgets it afterwards."""
    monkeypatch.syspath_prepend(NIXL_STAND_IN)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        del sys.modules[name]
