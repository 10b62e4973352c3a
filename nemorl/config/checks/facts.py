"""What several checks ask about an experiment."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.data import DataConfig, DatasetConfig


def generates(algorithm: AlgorithmConfig) -> bool:
    """Whether the run samples at all; what learns from data does so for validation only."""
    return algorithm.generates


def datasets(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Each dataset that a loss may be computed of, with the path of its section."""
    yield "data.train", data.train
    if data.validation is not None:
        yield "data.validation", data.validation


def held_out(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Each dataset that is only measured, with the path of its section."""
    if data.validation is not None:
        yield "data.validation", data.validation
    yield from ((f"data.validation_sets.{name}", dataset) for name, dataset in data.validation_sets.items())


def acted_on(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """The datasets whose tasks go through the environment: SFT learns its training tasks without it."""
    if algorithm.online:
        yield "data.train", data.train
    yield from held_out(data)


def is_address(url: str) -> bool:
    """Whether requests can go to paths below it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", url)
    except ValueError:
        return False
