"""Ranges of the inputs of linear layers, for formats that store scales of activations.

The largest magnitudes over all tokens of the first sequences that the policy computes, without rounding, as
modelopt calibrates. Where samples depend on them, prompts are measured before the first sample, and what is
measured later is used from the next samples on, so that a step rounds as its samples did. Layers that engines
fuse have one input; so do, for their scales, the experts of a layer, some of which may see none of them.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from nemorl.config.quantization import QuantizationConfig
from nemorl.models.layout import PolicyRank, chunk_of
from nemorl.models.quantized import input_keys, input_scale, input_scale_names
from nemorl.models.quantized_parts import quantized_params
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice

FILE = "inputs.safetensors"  # in a checkpoint
_COUNT = "num_sequences"


class InputRanges:
    """The ranges of all layers of the model, of which a rank measures those that it computes."""

    def __init__(
        self,
        shape: ModelShape,
        config: QuantizationConfig,
        rank: PolicyRank,
        device: torch.device,
        *,
        waits: bool = False,
    ) -> None:
        """With `waits` ranges that were widened are used after `adopt`, else at once."""
        assert config.calibration is not None, "only a calibrated format has ranges"
        keys = input_keys(shape, config.format, config.ignore)
        self._format = config.format
        self._places = {key: place for place, key in enumerate(dict.fromkeys(keys.values()))}
        names = input_scale_names(shape, config.format, config.ignore)
        self._scales = {name: self._places[keys[weight]] for weight, name in names.items()}
        self._params = {param.name: keys[param.group[0]] for param in quantized_params(shape, config, rank)}
        self._amax = self._used = torch.zeros(len(self._places), device=device)
        self._waits = waits
        self._num_sequences, self._required = 0, config.calibration.prompts
        self._measures = False

    @property
    def are_complete(self) -> bool:
        return self._num_sequences >= self._required

    def attach(self, model: Any, chunk: int) -> None:
        """Have the layers of a stage's `chunk`-th run measure their inputs inside `measuring`."""
        owner = weakref.ref(self)  # or a worker that is gone would stay: see `FakeQuantization.attach`

        def measure(key: str, linear: Any, inputs: tuple[Any, ...]) -> None:
            if (ranges := owner()) is not None:
                ranges._measure(key, inputs[0])

        for param, key in self._params.items():
            number, name = chunk_of(param)
            if number == chunk:
                linear = model.get_submodule(name.removesuffix(".weight"))
                linear.register_forward_pre_hook(partial(measure, key))

    @contextmanager
    def measuring(self, num_sequences: int) -> Iterator[None]:
        """Inside, forward passes widen the ranges; after it they are those of all ranks.

        `num_sequences` are those of all data-parallel ranks.
        """
        self._amax, self._measures = self._amax.clone(), True
        try:
            yield
        finally:
            self._measures = False
        dist.all_reduce(self._amax, dist.ReduceOp.MAX)
        self._num_sequences += num_sequences
        if not self._waits:
            self.adopt()

    def adopt(self) -> None:
        """Use what is measured so far."""
        self._used = self._amax

    def of(self, param: str) -> Tensor:
        """[] the largest magnitude of the inputs of a parameter."""
        return self._used[self._places[self._params[param]]]

    def slices(self) -> list[TensorSlice]:
        """Of `scales`, all of which every rank has."""
        return [TensorSlice.whole(name, (1,)) for name in self._scales]

    def scales(self) -> dict[str, Tensor]:
        """[1] by the names of an export: the `input_scale` of each quantized weight, as measured so far."""
        scales = input_scale(self._format, self._amax)
        return {name: scales[place : place + 1] for name, place in self._scales.items()}

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; `input_amax_of` and `load` read it."""
        found = {key: self._amax[place].cpu().clone() for key, place in self._places.items()}
        return found | {_COUNT: torch.tensor(float(self._num_sequences))}

    def load(self, folder: Path) -> None:
        """Take the ranges of a checkpoint, if it has any; a run without calibration wrote none."""
        if (folder / FILE).exists():
            state = load_file(folder / FILE)
            self._num_sequences = int(state.pop(_COUNT))
            amax = [state[key] for key in self._places]
            self._amax = torch.stack(amax).to(self._amax.device)
            self.adopt()

    def _measure(self, key: str, inputs: Tensor) -> None:
        if self._measures and inputs.numel():  # an expert may get no tokens
            place = self._places[key]
            self._amax[place] = torch.maximum(self._amax[place], inputs.detach().abs().amax().float())


def input_amax_of(
    folder: Path, shape: ModelShape, quantization: QuantizationConfig
) -> Mapping[str, Tensor] | None:
    """The ranges of a checkpoint by the names of weights; None if it has none of them."""
    if not (folder / FILE).exists():
        return None
    state = load_file(folder / FILE)
    keys = input_keys(shape, quantization.format, quantization.ignore)
    found = {name: state[key] for name, key in keys.items() if key in state}
    return found if len(found) == len(keys) else None
