"""What the parts of the GPU benchmark are given, and how they make policies."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_models import LARGE, SMALL, fill, write_config
from policies import start_policy

from nemorl.config.policy import PolicyConfig
from nemorl.megatron.device import DTYPES, DeviceKind, release_memory
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape

Row = dict[str, Any]  # of a part's table; the keys are its columns
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Setting:
    """Where a part runs, and whether it measures or only tries its code."""

    device: DeviceKind
    small: bool
    folder: Path  # for models and for what ranks exchange

    @property
    def precision(self) -> Precision:
        """Of speed: what a GPU is for."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def large(self) -> tuple[Path, ModelShape]:
        """A folder without weights of the shape whose speed is measured."""
        folder = write_config(SMALL if self.small else LARGE, self.folder / "large")
        return folder, load_shape(folder)


@contextmanager
def policy(
    setting: Setting,
    folder: Path,
    *,
    has_weights: bool = False,
    **fields: object,
) -> Iterator[PolicyWorker]:
    """A policy of one rank, with random weights if its folder has none."""
    given: Mapping[str, Any] = {"precision": setting.precision, **fields}
    config = PolicyConfig(model_path=folder, **given)
    worker = start_policy(config, setting.device, load=has_weights)
    try:
        if not has_weights:
            fill(worker.parameters())
            worker.optimizer.weights_changed()
        yield worker
    finally:
        worker.close()
        del worker  # the caller may still have it, until its function returns
        gc.collect()
        release_memory(setting.device)


def per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
