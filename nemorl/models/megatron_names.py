"""Megatron's two schemes of parameter names, brought into one.

Families name parameters as Megatron's local layer spec does. Its Transformer Engine spec has the same tensors
under other names: a norm before one matrix belongs to that matrix' module, and the experts of a
layer are one module. Each of its names has exactly one place among the local ones, so this direction needs to
know nothing of the model. The other would: whether `input_layernorm` moves depends on the attention, whether
`pre_mlp_layernorm` does on the layer's MLP.

In megatron-core 0.16.1 (`models/gpt/gpt_layer_specs.py` unless a file is named):

| local spec | Transformer Engine spec | made by |
|---|---|---|
| `input_layernorm` | `self_attention.linear_qkv.layer_norm_` | `get_gpt_layer_with_…_spec`, without MLA |
| `pre_mlp_layernorm` | `mlp.linear_fc1.layer_norm_` | `get_mlp_module_spec_for_backend`, without experts |
| `self_attention.q_layernorm` | `self_attention.linear_q_up_proj.layer_norm_` | the first, with MLA |
| `self_attention.kv_layernorm` | `self_attention.linear_kv_up_proj.layer_norm_` | the first, with MLA |
| `mlp.experts.local_experts.{i}.linear_fc1.` | `mlp.experts.linear_fc1.` … `{i}` | `grouped_mlp_modules` |

The last is in `extensions/transformer_engine_spec_provider.py`; `linear_fc2` follows the same rule. The names
after the dots are Transformer Engine's: `layer_norm_weight` of its `LayerNormLinear`, `weight0`, `bias0` and
so on of its `GroupedLinear`. All else has the same name in both: MLA's `input_layernorm` and the
`pre_mlp_layernorm` before experts, which are separate modules, the norms of queries and keys without MLA, the
router, shared experts, attention sinks and everything outside of layers.
"""

import re

_RULES = (
    (r"\.self_attention\.linear_qkv\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.linear_q_up_proj\.layer_norm_weight$", ".q_layernorm.weight"),
    (r"\.linear_kv_up_proj\.layer_norm_weight$", ".kv_layernorm.weight"),
    (r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".experts.local_experts.\3.\1.\2"),
)


def local_name(name: str) -> str:
    """The local spec's name of a parameter of either spec."""
    for pattern, local in _RULES:
        name = re.sub(pattern, local, name)
    return name
