"""Differences between the releases 0.16 to 0.19 of megatron-core; `device` has those of a device."""

from typing import Any

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec


def expert_parts(num_experts: int | None, router: type, *, grouped: bool) -> MoESubmodules:
    """Megatron's experts, grouped by Transformer Engine or in sequence, with a router.

    The function that describes them returns a spec, and in newer releases a partial call.
    """
    spec: Any = get_moe_module_spec(use_te=grouped, num_experts=num_experts, moe_grouped_gemm=grouped)
    parts = spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
    return MoESubmodules(parts.experts, parts.shared_experts, router)
