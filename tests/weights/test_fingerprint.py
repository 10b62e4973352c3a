"""The checksum is the same however a tensor is cut up, and changes with any bit and any exchange."""

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nemorl.weights import messages
from nemorl.weights.messages import combine, fingerprint, queue_fingerprint, read_fingerprints

MASK = 2**64 - 1
DTYPES = [torch.float32, torch.bfloat16]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(values: torch.Tensor) -> int:
    return fingerprint(values, (0,) * values.ndim, tuple(values.shape))


def weight(axis: int, index: int) -> int:
    """The weight of one position of one axis, in Python's own integers: both halves."""
    state = ((index + 1) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03 * (axis + 1)) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return (state ^ (state >> 31)) | 1


def written_out(values: torch.Tensor) -> int:
    """The sums of the formula, word by word from the bytes of each row."""
    odd = mixed = 0
    *leading, _ = values.shape
    for row in itertools.product(*map(range, leading)):
        content = values[row].view(torch.uint8).numpy().tobytes()
        for place in range(0, len(content), 4):
            word = int.from_bytes(content[place : place + 4], "little")
            last = weight(values.dim() - 1, place // 4)
            before = math.prod(weight(axis, position) for axis, position in enumerate(row))
            odd += word * before * last
            mixed += word * before * (last >> 32)
    return odd % 2**32 + 2**32 * (mixed % 2**32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_it_is_the_written_out_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = tensor(shape, dtype)
    assert whole(values) == written_out(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_without_integer_products_computes_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators that a GPU takes, on a CPU."""
    values = tensor((3, 6, 5), dtype)
    expected = whole(values)
    monkeypatch.setattr(messages, "_has_integer_products", lambda device: False)
    assert whole(values) == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_boxes_add_up_to_the_tensor(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple))
    values = tensor(shape, dtype)
    cuts = [data.draw(st.integers(1, extent - 1)) for extent in shape]
    found = []
    for corner in itertools.product((0, 1), repeat=len(shape)):
        start = tuple(cut if c else 0 for c, cut in zip(corner, cuts, strict=True))
        ends = (extent if c else cut for c, cut, extent in zip(corner, cuts, shape, strict=True))
        box = values[tuple(slice(s, e) for s, e in zip(start, ends, strict=True))]
        found.append(fingerprint(box, start, shape))
    assert combine(found) == whole(values)


def test_it_does_not_depend_on_chunks_or_strides() -> None:
    values = tensor((700, 300))  # more than one chunk
    rows = [fingerprint(values[i : i + 1], (i, 0), (700, 300)) for i in range(700)]
    assert combine(rows) == whole(values) == whole(values.t().contiguous().t())


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("words", [1, 7, 1 << 10, 1 << 24])
def test_the_words_of_a_pass_do_not_change_it(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tensor((70, 30), torch.bfloat16)
    expected = whole(values)
    monkeypatch.setattr(messages, "_has_integer_products", lambda device: False)
    monkeypatch.setattr(messages, "_WORDS_PER_PASS", words)
    assert whole(values) == expected


@pytest.mark.parametrize(("products", "counts"), [(False, (3 + 1, 0, 0)), (True, (0, 1, 1))])
def test_few_kernels_are_launched_and_the_host_reads_none(
    products: bool, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix of Qwen2.5-7B, on a device without memory: 3 passes without products of integers."""
    monkeypatch.setattr(messages, "_has_integer_products", lambda device: products)
    shape = (18944, 3584)
    with Operators() as operators:
        queue_fingerprint(torch.empty(shape, dtype=torch.bfloat16, device="meta"), (0, 0), shape)
    assert operators.counts["_local_scalar_dense"] == 0
    assert tuple(operators.counts[name] for name in ("sum", "mm", "mv")) == counts


def test_the_fingerprints_of_many_tensors_are_read_at_once() -> None:
    values = [tensor((4, 3), seed=seed) for seed in range(5)]
    queued = [queue_fingerprint(each, (0, 0), (4, 3)) for each in values]
    with Operators() as operators:
        found = read_fingerprints(queued)
    assert found == [whole(each) for each in values]
    assert operators.counts["_local_scalar_dense"] == 0
    assert operators.counts["stack"] == 1
    assert read_fingerprints([]) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_bit_shows(dtype: torch.dtype) -> None:
    values = tensor((6, 5), dtype)
    clean = whole(values)
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    bits = values.view(integer)
    for row, column, bit in itertools.product(range(6), range(5), range(8 * dtype.itemsize)):
        kept = bits[row, column].item()
        bits[row, column] ^= torch.tensor(1).bitwise_left_shift(torch.tensor(bit)).to(integer)
        assert whole(values) != clean
        bits[row, column] = kept
    assert whole(values) == clean


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_exchanged_elements_rows_and_columns_show(data: st.DataObject) -> None:
    values = tensor((8, 8))
    clean = whole(values)
    i, j = data.draw(
        st.tuples(st.integers(0, 63), st.integers(0, 63)).filter(lambda pair: pair[0] != pair[1])
    )
    flat = values.clone().view(-1)
    flat[[i, j]] = flat[[j, i]]
    assert whole(flat.view(8, 8)) != clean
    if i % 8 != j % 8:
        order = list(range(8))
        order[i % 8], order[j % 8] = order[j % 8], order[i % 8]
        assert whole(values[order]) != clean
        assert whole(values[:, order]) != clean


def test_changed_signs_show_in_one_of_a_few_tensors() -> None:
    """Highest bits of two words cancel in the odd sum; each tensor shows them with probability 1/2."""
    draw = random.Random(0)
    found = 0
    for seed in range(200):
        values = tensor((8, 8), seed=seed)
        clean = whole(values)
        places = draw.sample(range(64), 2)
        values.view(-1)[places] *= -1
        found += whole(values) != clean
    assert 70 <= found <= 130  # 4 standard deviations of 200 fair coins


def test_minus_zero_is_not_zero() -> None:
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


def test_a_shifted_tensor_shows() -> None:
    values = tensor((4, 4))
    assert fingerprint(values, (0, 0), (8, 4)) != fingerprint(values, (4, 0), (8, 4))
