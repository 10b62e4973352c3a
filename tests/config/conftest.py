from pathlib import Path

import pytest

from tests.config.experiments import write


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """The file of a sound experiment."""
    return write(tmp_path)
