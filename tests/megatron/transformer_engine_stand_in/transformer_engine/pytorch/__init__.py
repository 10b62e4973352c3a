"""The modules with parameters."""

import torch
import torch.nn.functional as F
from torch import nn

from . import distributed as distributed
from . import fp8 as fp8
from . import ops as ops


def _parameter(*shape, dtype, device):
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


def _mark_sharded(tensor, dim):
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, dim, 1


class _Linears(nn.Module):
    """One or several matrices of the same shape; `names` are what follows `weight` and `bias`."""

    def __init__(
        self,
        names,
        in_features,
        out_features,
        *,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_name=None,
    ):
        super().__init__()
        tp_size = tp_group.size() if tp_group is not None else tp_size
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.in_features = in_features
        kind = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        for name in names:
            setattr(self, "weight" + name, _parameter(out_features, in_features, **kind))
            _mark_sharded(getattr(self, "weight" + name), 1 if parallel_mode == "row" else 0)
            setattr(self, "bias" + name, _parameter(out_features, **kind) if bias else torch.empty(0, **kind))
            if bias and parallel_mode == "row":
                getattr(self, "bias" + name).sequence_parallel = self.sequence_parallel
            elif bias and parallel_mode == "column":
                _mark_sharded(getattr(self, "bias" + name), 0)

    def multiply(self, x, name=""):
        adds = self.use_bias and not self.return_bias
        return F.linear(x, getattr(self, "weight" + name), getattr(self, "bias" + name) if adds else None)


class Linear(_Linears):
    def __init__(self, in_features, out_features, *, rng_tracker_name=None, **options):
        super().__init__([""], in_features, out_features, **options)

    def forward(self, inp, is_first_microbatch=None):
        y = self.multiply(inp)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(_Linears):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        *,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        **options,
    ):
        super().__init__([""], in_features, out_features, **options)
        assert normalization == "RMSNorm", "the stand-in knows no other"
        assert not return_layernorm_output, "Megatron asks for it with LayerNorm only"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = _parameter(in_features, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp, is_first_microbatch=None):
        scale = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        y = self.multiply(F.rms_norm(inp, scale.shape, scale, self.eps))
        return (y, self.bias) if self.return_bias else y


class GroupedLinear(_Linears):
    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        rng_tracker_name=None,
        single_grouped_weight=False,
        single_grouped_bias=False,
        **options,
    ):
        assert not any((single_grouped_weight, single_grouped_bias)), "the experts' weights are apart"
        super().__init__(list(map(str, range(num_gemms))), in_features, out_features, **options)
        self.num_gemms = num_gemms

    def forward(self, inp, m_splits, is_first_microbatch=None):
        parts = [self.multiply(rows, str(i)) for i, rows in enumerate(inp.split(m_splits))]
        y = torch.cat(parts)
        return (y, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]) if self.return_bias else y


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size  # the older name
        device = kwargs.pop("device", "cuda")
        assert not kwargs, f"the stand-in has no {sorted(kwargs)}"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _parameter(size, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        scale = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.rms_norm(x, scale.shape, scale, self.eps)


class LayerNorm(nn.Module):
    """No model of ours has it."""


class DotProductAttention(nn.Module):
    """Ours takes its place."""
