"""Packed attention against one sequence at a time; the rotary embedding against complex numbers."""

import cmath
import importlib
import inspect
import itertools
import sys
import types

import numpy as np
import pytest
import torch

from nemorl.data.prefixes import Segment, prefix_tree
from nemorl.megatron.attention import DenseKernel, JoinedAttention, PackedAttention, TreeKernel, rotate
from nemorl.megatron.device import KernelRows, packed_attention_kernel
from nemorl.megatron.packing import PackedLayout, Rows, packed_layout
from nemorl.models.rope import RotaryTable, inverse_frequencies
from nemorl.models.shape import Rope

HEADS, KV_HEADS, DIM = 4, 2, 6


def table(max_positions=64):
    return RotaryTable(
        DIM,
        Rope(100.0),
        max_positions=max_positions,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def one_by_one(q, k, v, lengths, scale=DIM**-0.5, window=None, sinks=None):
    """Masked softmax attention of each sequence, in float64; a window is counted token by token.

    Sinks [heads] are one more column of the softmax, that of a value of zero.
    """
    outputs, start = [], 0
    for length in lengths:
        cos_sin = table(length).at(torch.arange(length))
        rows = slice(start, start + length)
        turned = rotate(q[rows], *cos_sin), rotate(k[rows], *cos_sin), v[rows]
        qs, ks, vs = (x.double().transpose(0, 1) for x in turned)
        ks, vs = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (ks, vs))
        scores = qs @ ks.transpose(1, 2) * scale
        unseen = [
            [key > query or (window is not None and key <= query - window) for key in range(length)]
            for query in range(length)
        ]
        scores = scores.masked_fill(torch.tensor(unseen), float("-inf"))
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, length, 1)
            scores = torch.cat((scores, column), -1)
            vs = torch.cat((vs, vs.new_zeros(HEADS, 1, DIM)), 1)
        outputs.append((scores.softmax(-1) @ vs).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ([5, 5, 5], [(3, 5, False)]),  # equal lengths lie densely as they are
        ([1, 2, 7], [(3, 7, True)]),  # short ones always share
        ([32, 40, 41, 60], [(3, 41, True), (1, 60, False)]),  # 32 is too short for 60
        ([3, 50], [(1, 3, False), (1, 50, False)]),
    ],
)
def test_ragged_sequences_forward_and_backward(lengths, buckets):
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    q = torch.randn(num_tokens, HEADS, DIM, requires_grad=True)
    k = torch.randn(num_tokens, KV_HEADS, DIM, requires_grad=True)
    v = torch.randn(num_tokens, KV_HEADS, DIM, requires_grad=True)
    upstream = torch.randn(num_tokens, HEADS * DIM)
    positions = torch.cat([torch.arange(n) for n in lengths])
    layout = packed_layout(lengths, table().at(positions), kernel=None)
    rows = [bucket.keys for bucket in layout.buckets]
    assert [(r.count, r.length, r.index is not None) for r in rows] == buckets

    out = PackedAttention()(q, k, v, None, attn_mask_type=None, attention_bias=None, packed_seq_params=layout)
    grads = torch.autograd.grad(out, (q, k, v), upstream)

    expected = one_by_one(q, k, v, lengths)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    for mine, its in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 3, 128, 299])
def test_a_window_hides_what_is_far(window):
    """300 tokens are more than two blocks of queries, and 20 fewer than most of the windows."""
    torch.manual_seed(0)
    lengths = [20, 290, 300]
    q, k, v = (
        torch.randn(sum(lengths), heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn(sum(lengths), HEADS * DIM)
    layout = packed_layout(lengths, table(300).at(torch.cat([torch.arange(n) for n in lengths])), None)
    attention = PackedAttention(softmax_scale=0.9, window=window)
    out = attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    grads = torch.autograd.grad(out, (q, k, v), upstream)

    expected = one_by_one(q, k, v, lengths, 0.9, window)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    for mine, its in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


def test_masks_lie_where_the_queries_do(monkeypatch):
    """As on a GPU in float32, which has no kernel for packed sequences."""
    meta, devices = torch.device("meta"), []

    def attend(query, key, value, mask, **_):
        devices.append(mask.device)
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    angles = table().at(torch.cat([torch.arange(n) for n in (3, 8)]))
    layout = packed_layout([3, 8], tuple(angle.to(meta) for angle in angles), None)
    q, k, v = (torch.randn(11, heads, DIM, device=meta) for heads in (HEADS, KV_HEADS, KV_HEADS))
    PackedAttention(window=2)(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    assert devices == [meta]


# A prompt of 40 tokens with four answers, of which two have 20 more in common with a fifth sequence that ends
# there; the prompt alone; two that begin with the same 7; one that shares nothing.
BEGINNINGS = [(0, 3), (0, 9), (0, 30), (1, 5), (1, 12), (1, 0), (0, 0), (2, 0), (2, 4), (3, 11)]


def grown() -> tuple[list[np.ndarray], list[Segment]]:
    """Sequences that share beginnings, and their tree."""
    drawn = np.random.default_rng(0)
    prompt = drawn.integers(0, 50, 40)
    beginnings = [prompt, np.append(prompt, drawn.integers(0, 50, 20)), drawn.integers(50, 99, 7), prompt[:0]]
    tokens = [np.append(beginnings[which], drawn.integers(100, 999, n)) for which, n in BEGINNINGS]
    return tokens, prefix_tree(tokens)


def tree_layout(tree: list[Segment], dtype: torch.dtype, kernel=None) -> PackedLayout:
    positions = torch.cat([torch.arange(segment.start, segment.end) for segment in tree])
    angles = tuple(angle.to(dtype) for angle in table(100).at(positions))
    layout = packed_layout([segment.length for segment in tree], angles, kernel, tree=tree)
    layout.positions = positions
    return layout


def tokens_of(tree: list[Segment], number: int) -> torch.Tensor:
    """Places of a sequence's tokens in its packed segments."""
    starts = itertools.accumulate([segment.length for segment in tree], initial=0)
    of_segments = zip(starts, tree, strict=False)
    return torch.cat([torch.arange(s, s + t.length) for s, t in of_segments if number in t.sequences])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 33, 64])
def test_shared_beginnings_are_seen_by_all_that_follows(window, sinks):
    """Next to separate sequences, in float64; window 5 is shorter than the prompts, 64 than two sequences."""
    torch.manual_seed(0)
    tokens, tree = grown()
    num_tokens = sum(segment.length for segment in tree)
    assert num_tokens == len({tuple(t[:n]) for t in tokens for n in range(1, len(t) + 1)})
    q, k, v = (
        torch.randn(num_tokens, heads, DIM, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    layout = tree_layout(tree, torch.float64)
    attention = PackedAttention(softmax_scale=0.9, window=window, sinks=sinks, config=SINK_CONFIG)
    inputs = [q, k, v]
    if sinks:
        attention.softmax_offset.data = torch.tensor([-3.0, 0.0, 1.0, 4.0])
        inputs.append(attention.softmax_offset)
    out = attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    flat = torch.cat([tokens_of(tree, number) for number in range(len(tokens))])
    upstream = torch.randn(len(flat), HEADS * DIM, dtype=torch.float64)
    grads = torch.autograd.grad(out[flat], inputs, upstream)

    lengths = [len(t) for t in tokens]
    apart = one_by_one(q[flat], k[flat], v[flat], lengths, 0.9, window, attention.softmax_offset)
    expected = torch.autograd.grad(apart, inputs, upstream)
    # The angles of the reference are float32.
    torch.testing.assert_close(out[flat], apart, atol=1e-6, rtol=1e-6)
    for mine, its in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_over_shared_beginnings_by_finite_differences(window):
    torch.manual_seed(0)
    tree = prefix_tree([np.array(t) for t in ([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [9, 9])])
    layout = tree_layout(tree, torch.float64)
    attention = PackedAttention(window=window)
    inputs = [
        torch.randn(
            sum(segment.length for segment in tree), heads, DIM, dtype=torch.float64, requires_grad=True
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def attend(q, k, v):
        return attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)

    assert torch.autograd.gradcheck(attend, inputs)


def rows_with_keys(operators: list[str]) -> types.SimpleNamespace:
    """torch's variable-length operators of a GPU: causal rows whose last query sees the last key."""

    def rows(x, cu):
        return [x[a:b].transpose(0, 1).unsqueeze(0) for a, b in itertools.pairwise(cu.tolist())]

    def kernels(cu_q, cu_k, scale, window_size):
        for n, m in zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True):
            distance = torch.arange(m - n, m).unsqueeze(1) - torch.arange(m)
            sees = (distance >= 0) & ((distance <= window_size[0]) | torch.tensor(window_size[0] < 0))
            yield DenseKernel(scale, sees=sees)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window_size, **_):
        operators.append("forward")
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        of_rows = zip(
            kernels(cu_q, cu_k, scale, window_size), rows(q, cu_q), rows(k, cu_k), rows(v, cu_k), strict=True
        )
        parts = [kernel.forward(*x) for kernel, *x in of_rows]
        out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
        return out, torch.cat([lse[0] for _, lse in parts], 1), None

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, _, scale, window_size):
        operators.append("backward")
        of_lse = [x.unsqueeze(0) for x in lse.split(cu_q.diff().tolist(), 1)]
        of_rows = zip(
            kernels(cu_q, cu_k, scale, window_size),
            *(rows(grad, cu_q), rows(q, cu_q), rows(k, cu_k), rows(v, cu_k), rows(out, cu_q), of_lse),
            strict=True,
        )
        parts = [kernel.backward(*x) for kernel, *x in of_rows]
        return [torch.cat([part[0].transpose(0, 1) for part in of]) for of in zip(*parts, strict=True)]

    arguments = [types.SimpleNamespace(name="query")]
    forward.default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=arguments))
    return types.SimpleNamespace(_varlen_attn=forward, _varlen_attn_backward=backward)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_a_variable_length_kernel_have_the_keys_of_beginnings(monkeypatch, window):
    """As on a GPU, with its operators replaced, next to blocks."""
    operators: list[str] = []
    monkeypatch.setattr(torch.ops, "torch_attn", rows_with_keys(operators))
    torch.manual_seed(0)
    _, tree = grown()
    q, k, v = (
        torch.randn(sum(segment.length for segment in tree), heads, DIM, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn(len(q), HEADS * DIM)
    results = []
    for kernel in (lambda *_: pytest.fail("this one has rows of queries and keys alone"), None):
        layout = tree_layout(tree, torch.float32, kernel)
        out = PackedAttention(window=window)(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
        results.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
    assert operators == ["forward", "backward"]
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-4)


SINK_CONFIG = types.SimpleNamespace(
    num_attention_heads=HEADS,
    tensor_model_parallel_size=1,
    params_dtype=torch.float32,
    use_cpu_initialization=True,
)


@pytest.mark.parametrize("window", [None, 5, 150])
def test_a_sink_takes_its_share_of_every_query(window):
    torch.manual_seed(0)
    lengths = [5, 200, 220]
    q, k, v = (
        torch.randn(sum(lengths), heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn(sum(lengths), HEADS * DIM)
    layout = packed_layout(lengths, table(220).at(torch.cat([torch.arange(n) for n in lengths])), None)
    attention = PackedAttention(window=window, sinks=True, config=SINK_CONFIG)
    sinks = attention.softmax_offset
    sinks.data = torch.tensor([-3.0, 0.0, 1.0, 4.0])
    out = attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    grads = torch.autograd.grad(out, (q, k, v, sinks), upstream)

    expected = one_by_one(q, k, v, lengths, window=window, sinks=sinks)
    expected_grads = torch.autograd.grad(expected, (q, k, v, sinks), upstream.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    for mine, its in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_groups", [True, False], ids=["newer torch", "torch 2.11"])
def test_sinks_go_through_a_variable_length_kernel(monkeypatch, has_groups):
    """The kernel of a GPU replaced by dense attention of each sequence, with its order in lse."""
    lengths, options = [3, 8, 8], []

    def rows(x, cu):
        return [x[a:b].transpose(0, 1).unsqueeze(0) for a, b in itertools.pairwise(cu.tolist())]

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window_size, **groups):
        options.append((max_q, max_k, causal, window_size, groups))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        parts = [
            DenseKernel(scale, causal=True).forward(*x)
            for x in zip(rows(q, cu_q), rows(k, cu_k), rows(v, cu_k), strict=True)
        ]
        out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
        return out, torch.cat([lse[0] for _, lse in parts], 1), None

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, _, scale, window_size):
        assert lse.shape == (HEADS, sum(lengths))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        lse = [x.unsqueeze(0) for x in lse.split(lengths, 1)]
        parts = [
            DenseKernel(scale, causal=True).backward(*x)
            for x in zip(*(rows(x, cu_q) for x in (grad, q, k, v, out)), lse, strict=True)
        ]
        q, k, v = (torch.cat([part[0].transpose(0, 1) for part in of]) for of in zip(*parts, strict=True))
        return q, *(x.unflatten(1, (KV_HEADS, -1)).sum(2) for x in (k, v))

    arguments = [types.SimpleNamespace(name=name) for name in ("query", "enable_gqa")[: 1 + has_groups]]
    forward.default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=arguments))
    operators = types.SimpleNamespace(_varlen_attn=forward, _varlen_attn_backward=backward)
    monkeypatch.setattr(torch.ops, "torch_attn", operators)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn(sum(lengths), HEADS * DIM)
    angles = table().at(torch.cat([torch.arange(n) for n in lengths]))
    layout = packed_layout(lengths, angles, lambda *_: pytest.fail("this one knows no sinks"))
    attention = PackedAttention(sinks=True, config=SINK_CONFIG)
    sinks = attention.softmax_offset
    sinks.data = torch.tensor([-3.0, 0.0, 1.0, 4.0])
    out = attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    grads = torch.autograd.grad(out, (q, k, v, sinks), upstream)

    expected = one_by_one(q, k, v, lengths, sinks=sinks)
    expected_grads = torch.autograd.grad(expected, (q, k, v, sinks), upstream.double())
    assert options == [(8, 8, True, [-1, 0], {"enable_gqa": True} if has_groups else {})]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    for mine, its in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


def test_the_present_torch_has_the_arguments_of_the_variable_length_kernel():
    """By its signatures, since the kernel itself requires a GPU."""
    public = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    inspect.signature(public).bind(*"qkv", "cu", "cu", 1, 1, scale=None, window_size=(-1, 0))
    operators = torch.ops.torch_attn
    named = [argument.name for argument in operators._varlen_attn.default._schema.arguments]
    rows = ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert named[:10] == ["query", "key", "value", *rows, "is_causal", "scale", "window_size"]
    backward = [argument.name for argument in operators._varlen_attn_backward.default._schema.arguments]
    before = ["grad_out", "query", "key", "value", "out", "lse", *rows, "is_causal", "rng_state"]
    assert backward == [*before, "scale", "window_size"]


@pytest.mark.parametrize("has_groups", [True, False], ids=["newer torch", "torch 2.11"])
def test_the_variable_length_kernel_gets_the_argument_for_groups_where_it_has_it(monkeypatch, has_groups):
    given = []

    def newer(query, key, value, *rows, scale, window_size, enable_gqa=False):
        given.append({"enable_gqa": enable_gqa})

    def older(query, key, value, *rows, scale, window_size):
        given.append({})

    module = types.SimpleNamespace(varlen_attn=newer if has_groups else older)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    kernel = packed_attention_kernel("torch_varlen")
    q, k = torch.zeros(3, HEADS, DIM), torch.zeros(3, KV_HEADS, DIM)
    kernel(q, k, k, KernelRows(None, None, 3, 3), None, None)
    assert given == [{"enable_gqa": True} if has_groups else {}]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """In place of flash-attn's (version 2.8): its arguments, and attention of each row with a mask."""
    assert dropout_p == 0.0
    assert causal
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    outputs = []
    for (first, end), keys in zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        assert (first, end) == keys
        query, key, value = (x[first:end].transpose(0, 1) for x in (q, k, v))
        distance = torch.arange(end - first).unsqueeze(1) - torch.arange(end - first)
        seen = (distance >= 0) & ((distance <= window_size[0]) | torch.tensor(window_size[0] < 0))
        row = torch.nn.functional.scaled_dot_product_attention(
            *(query, key, value), attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(row.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 3])
def test_variable_length_kernels_compute_the_same(monkeypatch, window):
    """With flash-attn's arguments and in buckets."""
    monkeypatch.setitem(
        sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    )
    torch.manual_seed(0)
    lengths = [5, 1, 9]
    angles = table().at(torch.cat([torch.arange(n) for n in lengths]))
    q, k, v = (torch.randn(sum(lengths), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))

    outputs = [
        PackedAttention(softmax_scale=0.7, window=window)(
            q, k, v, None, attn_mask_type=None, packed_seq_params=packed_layout(lengths, angles, kernel)
        )
        for kernel in (packed_attention_kernel("flash_attn"), None)
    ]

    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_layers_with_a_window_may_have_angles_of_their_own():
    positions = torch.arange(4)
    usual = table().at(positions)
    local = RotaryTable(DIM, Rope(7.0), max_positions=4, dtype=torch.float32, device=torch.device("cpu"))
    layout = packed_layout([4], usual, None, local.at(positions))
    q, k, v = (torch.randn(4, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attention = PackedAttention(local_rope=True)
    out = attention(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    turned = [rotate(x, *local.at(positions)) for x in (q, k)]
    plain = PackedAttention(rotates=False)
    again = plain(*turned, v, None, attn_mask_type=None, packed_seq_params=layout)
    torch.testing.assert_close(out, again)


def test_values_may_be_narrower_than_keys():
    positions = torch.arange(5)
    layout = packed_layout([5], table().at(positions), None)
    q, k, v = (torch.randn(5, heads, dim) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, 4)))
    out = PackedAttention()(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
    assert out.shape == (5, HEADS * 4)
    torch.testing.assert_close(out.double(), one_by_one(q, k, v, [5]), atol=1e-5, rtol=1e-4)


def test_a_kernel_gets_the_packed_tensors_as_they_are():
    seen = {}

    def kernel(q, k, v, rows, scale, window):
        seen.update(queries=rows.cu_queries.tolist(), longest=rows.max_queries, k=tuple(k.shape))
        seen.update(keys=rows.cu_keys.tolist(), scale=scale, window=window, copied=v is not kv)
        return q

    layout = packed_layout([2, 3], table().at(torch.tensor([0, 1, 0, 1, 2])), kernel)
    q, kv = torch.randn(5, HEADS, DIM), torch.randn(5, KV_HEADS, DIM)
    out = PackedAttention(softmax_scale=0.5, window=2)(
        q, kv, kv, None, attn_mask_type=None, attention_bias=None, packed_seq_params=layout
    )
    assert out.shape == (5, HEADS * DIM)
    assert seen == {
        "queries": [0, 2, 5],
        "keys": [0, 2, 5],
        "longest": 3,
        "k": (5, KV_HEADS, DIM),
        "scale": 0.5,
        "window": 2,
        "copied": False,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_between_keys_give_the_bits_of_their_copy(dtype):
    """A layer's values are columns of one product with its keys; they are not copied."""
    lengths = [5, 40, 41]
    cos, sin = table().at(torch.cat([torch.arange(n) for n in lengths]))
    layout = packed_layout(lengths, (cos.to(dtype), sin.to(dtype)), None)
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, DIM, generator=generator).to(dtype)

    def result(copied):
        q, k, v = both.clone().requires_grad_().split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        v = v.clone() if copied else v
        out = PackedAttention()(q, k, v, None, attn_mask_type=None, packed_seq_params=layout)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    for mine, of_copy in zip(result(copied=False), result(copied=True), strict=True):
        assert torch.equal(mine, of_copy)


def test_rotary_turns_pairs_as_complex_numbers():
    x = torch.randn(1, 1, DIM)
    position, theta = 9, 100.0
    turned = rotate(x, *table().at(torch.tensor([position]))).flatten().tolist()
    values = x.flatten().tolist()
    for i in range(DIM // 2):
        angle = position * theta ** (-2 * i / DIM)
        expected = complex(values[i], values[i + DIM // 2]) * cmath.exp(1j * angle)
        assert turned[i] == pytest.approx(expected.real, abs=1e-5)
        assert turned[i + DIM // 2] == pytest.approx(expected.imag, abs=1e-5)


def test_rotary_has_the_gradient_of_a_rotation():
    cos, sin = (angles.double() for angles in table().at(torch.tensor([0, 3, 11])))
    x = torch.randn(3, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)


def test_frequencies_without_scaling():
    assert inverse_frequencies(4, Rope(100.0)).tolist() == pytest.approx([1.0, 0.1])


def test_tokens_of_rows_with_padding_get_their_own_gradients():
    """Two rows of three places with three and two tokens: as by a product with a matrix of zeros and ones."""
    rows = Rows(start=1, end=6, count=2, length=3, index=torch.tensor([0, 1, 2, 3, 4]))
    packed = torch.randn(7, 2, 4, requires_grad=True)
    grad = torch.randn(2, 2, 3, 4)
    places = torch.zeros(6, 7)
    places[torch.arange(5), torch.arange(1, 6)] = 1  # the last place is padding

    def by_matrix(x):
        return torch.einsum("pn,nhd->phd", places, x).reshape(2, 3, 2, 4).transpose(1, 2)

    dense = rows.dense(packed)
    assert torch.equal(dense, by_matrix(packed))
    assert torch.equal(rows.dense(packed[1:6]), dense)
    found, expected = (torch.autograd.grad(out, packed, grad)[0] for out in (dense, by_matrix(packed)))
    assert torch.equal(found, expected)

    back = torch.randn(5, 2, 4)
    dense = dense.detach().requires_grad_()
    assert torch.equal(rows.packed(dense), packed[1:6])
    (found,) = torch.autograd.grad(rows.packed(dense), dense, back)
    assert torch.equal(found, by_matrix(torch.cat((torch.zeros(1, 2, 4), back, torch.zeros(1, 2, 4)))))


@pytest.mark.parametrize("count", [1, 3])
def test_keys_of_single_queries_join_those_of_their_sequence(count):
    """By one softmax over all keys in float64, outputs and gradients; sequences in several buckets."""
    lengths = [2, 5, 7, 40, 44]
    generator = torch.Generator().manual_seed(7)

    def drawn(heads):
        return torch.randn(sum(lengths), heads, DIM, generator=generator).requires_grad_()

    query, given = drawn(HEADS), [drawn(KV_HEADS) for _ in range(2 + 2 * count)]
    layout = packed_layout(lengths, table().at(torch.zeros(sum(lengths), dtype=torch.int64)), None)
    assert len(layout.buckets) > 1
    found = JoinedAttention.apply(TreeKernel(layout, None, None), query, *given)

    of_query, *others = (x.double().transpose(0, 1) for x in (query, *given))
    others = [x.repeat_interleave(HEADS // KV_HEADS, 0) for x in others]
    (key, value), keys, values = others[:2], others[2 : 2 + count], others[2 + count :]
    scores = of_query @ key.transpose(1, 2)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = (sequence[:, None] == sequence) & torch.ones_like(scores[0]).tril().bool()
    own = torch.stack([(of_query * each).sum(-1) for each in keys], -1)
    shares = torch.cat((scores.masked_fill(~sees, -torch.inf), own), -1).mul(DIM**-0.5).softmax(-1)
    expected = shares[..., : sum(lengths)] @ value
    for number, each in enumerate(values):
        expected = expected + shares[..., sum(lengths) + number, None] * each
    expected = expected.transpose(0, 1)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)

    upstream = torch.randn(found.shape, generator=generator)
    mine = torch.autograd.grad(found, (query, *given), upstream)
    theirs = torch.autograd.grad(expected, (query, *given), upstream.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
