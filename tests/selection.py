"""Which parameters of a test only `make test-all` runs."""

from typing import Any

import pytest


def in_all(*cases: Any) -> list[Any]:
    """Parameters of a test that are left to `make test-all`: another one reaches the same code."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
