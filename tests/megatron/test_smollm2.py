"""A real model beside transformers. Slow, and only where `nemorl models fetch smollm2 models/smollm2` was run."""

from pathlib import Path

import pytest
import torch

from nemorl.config.generation import TorchGenerationConfig
from nemorl.models.shape import ModelShape

FOLDER = Path("models/smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} was not fetched: `nemorl models fetch smollm2`"),
]
