"""Flash-decoding in the embedded engine, with a stand-in for `flash_attn_with_kvcache` of flash-attn 2.8."""

import sys
import types

import numpy as np
import pytest
import torch

from nemorl.device import takes_flash_attention
from nemorl.generation.types import SamplingParams
from nemorl.models.kv_cache import decode_kernel
from tests.generation.examples import GREEDY, Prompts, request, serve, small_engine
from tests.generation.torch_engine import cuda_graphs_stand_in
from tests.generation.torch_engine.cuda_graphs_stand_in import Graph


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """By its documentation: q [B, S, H, D], caches [B, places, KV heads, D], int32 lengths [B]."""
    assert (k, v, block_table, num_splits) == (None, None, None, 0)
    assert (q.dim(), k_cache.dim(), cache_seqlens.dtype) == (4, 4, torch.int32)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert q.shape[0] == k_cache.shape[0] == len(cache_seqlens)
    groups = q.shape[2] // k_cache.shape[2]
    keys, values = (cache.repeat_interleave(groups, dim=2) for cache in (k_cache, v_cache))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bshd,bphd->bhsp", q, keys) * scale
    places = torch.arange(k_cache.shape[1])
    # Causal masks are aligned to the last place of a row.
    last = cache_seqlens[:, None] - q.shape[1] + torch.arange(q.shape[1])
    scores = scores.masked_fill(places > last[:, None, :, None], -torch.inf)
    return torch.einsum("bhsp,bphd->bshd", scores.softmax(-1), values)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    library = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", library)


def requests():
    samplings = [SamplingParams(), SamplingParams(temperature=0.7, top_k=12), GREEDY]
    return [
        request(prompt, f"{i}", samplings[i % 3], 3 + (7 * i) % 23, seed=i)
        for i, prompt in enumerate(Prompts(0).several(14, 1, 60))
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_it_computes_what_torchs_attention_does(monkeypatch, graphs):
    expected = serve(small_engine(max_batch_size=5), requests())
    if graphs:
        cuda_graphs_stand_in.install(monkeypatch)
    monkeypatch.setattr("nemorl.models.kv_cache.takes_flash_attention", lambda device, dtype: True)
    engine = small_engine(max_batch_size=5)
    assert engine.model.cache.kernel is not None
    found = serve(engine, requests())
    assert bool(Graph.made) is graphs
    for name, completion in found.items():
        assert completion.tokens.tolist() == expected[name].tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, expected[name].logprobs, atol=5e-5)


def test_it_is_for_half_precision_on_a_gpu_where_it_is_installed(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert takes_flash_attention(gpu, torch.bfloat16)
    assert decode_kernel(gpu, torch.bfloat16) is not None
    for device, dtype in ((gpu, torch.float32), (cpu, torch.bfloat16)):
        assert decode_kernel(device, dtype) is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert decode_kernel(gpu, torch.bfloat16) is None
