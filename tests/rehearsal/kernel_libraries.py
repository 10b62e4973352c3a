"""Rehearse with kernel libraries that require CUDA, by stand-ins, for a process of its own."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.config.experiment import Experiment

if TYPE_CHECKING:
    from nemorl.rehearsal.worker import RankReport

_MEGATRON = Path(__file__).parents[1] / "megatron"
APEX = _MEGATRON / "apex_stand_in"
TRANSFORMER_ENGINE = _MEGATRON / "transformer_engine_stand_in"


def rehearse_with(stand_in: Path, experiment: Experiment, rank: int) -> "RankReport":
    """Rehearse a rank where the library of a stand-in is installed, and flash-attn."""
    install(stand_in)
    from nemorl.rehearsal.worker import rehearse

    return rehearse(experiment, rank)


def install(stand_in: Path) -> None:
    """Megatron looks for libraries at its import, so nothing may have imported it before."""
    assert "megatron.core" not in sys.modules
    sys.path.insert(0, str(stand_in))
    flash_attn: Any = types.ModuleType("flash_attn")
    flash_attn.__spec__ = ModuleSpec("flash_attn", None)
    flash_attn.__version__, flash_attn.flash_attn_varlen_func = "2.8.3", _flash_attn_varlen_func
    sys.modules["flash_attn"] = flash_attn


def _flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """torch's operator of the same algorithm, which keeps the same for the backward pass."""
    from nemorl.megatron.device import KernelRows, packed_attention_kernel

    assert causal
    assert not dropout_p
    varlen_attn = packed_attention_kernel("torch_varlen")
    assert varlen_attn is not None
    rows = KernelRows(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    return varlen_attn(q, k, v, rows, softmax_scale, window)
