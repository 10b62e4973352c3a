from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.megatron.examples import random_model
from tests.megatron.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """A family's random model and its folder, made once."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def of(family: str) -> tuple[PreTrainedModel, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = random_model(family), folder
            made[family][0].save_pretrained(folder)
        return made[family]

    return of
