"""A policy's adapters (LoRA) in a vLLM worker, which computes them beside weights that stay as they are.

The engine has one adapter from its beginning to its end, and every request names it: new values take effect
for sequences in flight too. Each rank holds it whole; vLLM cuts it for the rank when it is taken into use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.config.policy import LoraConfig

ADAPTER, ADAPTER_ID = "policy", 1  # vLLM's name and number for it

Shapes = Mapping[str, tuple[int, ...]]


def compute_one_adapter() -> None:
    """Have vLLM compute it on a CPU as two matrix products, since all tokens have the same.

    vLLM 0.32 copies the matrices of its adapter for every token there.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    of_many = PunicaWrapperCPU.add_lora_linear

    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **options: Any,
    ) -> None:
        if self.no_lora or not bool((self.token_lora_indices == 0).all()):  # when vLLM tries itself out
            of_many(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **options)
            return
        rows, start = x.flatten(0, -2).float(), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = (rows @ a[0, 0].float().t() * scale).to(y.dtype)
            y.view(-1, y.shape[-1])[:, start : start + width] += low @ b[0, 0].to(y.dtype).t()
            start += width

    PunicaWrapperCPU.add_lora_linear = add_lora_linear


class Unadaptable(ValueError):
    """A model in which vLLM has no place for some adapter."""


@dataclass
class WorkerAdapters:
    """Held by a worker whose engine was started with `enable_lora`; at first they add nothing.

    `tensors` (in PEFT's names) is what an exchange writes; `commit` makes it the adapter in use.
    """

    model: nn.Module
    lora: LoraConfig
    shapes: Shapes
    dtype: torch.dtype
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Mapping[str, Tensor]:
        """The same memory every time, none of it in use: on the host, from where vLLM takes copies."""
        if not self._tensors:
            self._tensors = {
                name: torch.zeros(size, dtype=self.dtype, device="cpu") for name, size in self.shapes.items()
            }
        return self._tensors

    def commit(self) -> None:
        """Take into use what was written: no step of the engine runs meanwhile. Raises Unadaptable."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        model: Any = self.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in self.tensors().items()},  # it is scaled in place
            PEFTHelper(r=self.lora.rank, lora_alpha=self.lora.alpha, target_modules=[]),
            device="cpu",
            dtype=self.dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager = model.lora_manager
        self._check_places(adapter.loras, manager)
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def _check_places(self, adapters: Mapping[str, object], manager: Any) -> None:
        """vLLM would leave out without a word what it does not find."""
        from vllm.model_executor.models.utils import is_pp_missing_parameter

        places = set()
        for name in manager.modules:
            parent, _, own = name.rpartition(".")
            places |= {f"{parent}.{part}" for part in manager.packed_modules_mapping.get(own, [own])}
        lost = [n for n in adapters if n not in places and not is_pp_missing_parameter(n, self.model)]
        if lost:
            raise Unadaptable(
                f"vLLM's {type(self.model).__name__} has no place for {len(lost)} adapters, first that of "
                f"{lost[0]}. Set generation.adapters to merged"
            )
