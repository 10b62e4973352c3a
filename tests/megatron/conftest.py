import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemorl.config.policy import LayoutConfig, NoRecompute, PolicyConfig, RecomputeConfig
from nemorl.megatron.worker import PolicyWorker
from tests.megatron.cases import Life, imported, live, start_worker
from tests.megatron.examples import policy_config, ragged_batch, random_model
from tests.megatron.pool import Pool

Model = Callable[[str], tuple[PreTrainedModel, Path]]
pytest.register_assert_rewrite("tests.megatron.course")  # so that a failure shows the numbers
STEPS = 5
NO_RECOMPUTE = NoRecompute()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    pool.run(4, imported)  # which takes them differently long, while ranks wait for each other by a deadline
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A family's random model and its folder, made once."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def of(family: str) -> tuple[PreTrainedModel, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = random_model(family), folder
            made[family][0].save_pretrained(folder)
        return made[family]

    return of


@pytest.fixture(scope="session")
def run(pool: Pool, model: Model) -> Callable[..., list[Life]]:
    """Five optimizer steps of a family under a layout, by rank; the same ones are run once."""

    @cache
    def run(
        family: str, where: LayoutConfig, per_micro_batch: int, recompute: RecomputeConfig = NO_RECOMPUTE
    ) -> list[Life]:
        config = policy_config(model(family)[1], layout=where, recompute=recompute)
        batches = [ragged_batch(seed=seed) for seed in range(STEPS)]
        return pool.run(where.world_size, live, config, batches, per_micro_batch)

    return run


@pytest.fixture
def start_here(tmp_path: Path) -> Iterator[Callable[..., PolicyWorker]]:
    """Start a worker in this process, after a former one was closed."""
    started: list[PolicyWorker] = []

    def start(config: PolicyConfig, temperature: float = 1.0, **options: Any) -> PolicyWorker:
        rendezvous = f"file://{tmp_path}/{len(started)}"
        started.append(start_worker(0, 1, rendezvous, config, temperature, **options))
        return started[-1]

    yield start
    started[-1].close()
    started.clear()
    # What is left of a worker hangs in reference cycles, and with it some fifty threads of gloo, which wake
    # a hundred times a second until the process ends.
    gc.collect()
