"""What was trained of sequences, in files: every array of each sequence, and their means."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemorl.data.packed import PackedBatch
from nemorl.data.trained import read_trained, trained_of, write_trained

ARRAYS = {
    "advantages": "advantages",
    "reference_logprobs": "reference_logprobs",
    "values": "values",
    "returns": "returns",
    "old_logprobs": "logprobs",
    "old_entropies": "entropies",
}


def batch_of(
    lengths: list[int], masks: list[list[bool]], weightless: set[int], fields: set[str]
) -> PackedBatch:
    """Sequences with several turns where their mask has gaps; those of `weightless` do not train."""
    count, generator = sum(lengths), torch.Generator().manual_seed(3)
    mask = torch.tensor([bit for each in masks for bit in each])
    weights = (
        torch.cat([torch.full((n,), float(at not in weightless)) for at, n in enumerate(lengths)]) * mask
    )
    return PackedBatch(
        tokens=torch.arange(count),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=mask,
        weights=weights,
        logprobs=torch.randn(count, generator=generator),
        **{name: torch.randn(count, generator=generator) for name in sorted(fields)},
    )


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    weightless = draw(st.sets(st.sampled_from(range(len(lengths)))))
    return batch_of(lengths, masks, weightless, draw(st.sets(st.sampled_from(sorted(ARRAYS)))))


@given(batches(), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_arrays_of_the_chosen_sequences_are_read_as_they_were_trained(tmp_path, batch, data):
    chosen = data.draw(st.sets(st.sampled_from(range(batch.num_sequences)), min_size=1))
    write_trained(tmp_path, 4, 1, batch, {at: f"group/{at}" for at in chosen})
    for at in range(batch.num_sequences):
        found = read_trained(tmp_path, 4, f"group/{at}")
        if at not in chosen:
            assert found == {}
            continue
        span = slice(int(batch.cu_seqlens[at]), int(batch.cu_seqlens[at + 1]))
        expected = {stored: getattr(batch, name) for name, stored in ARRAYS.items()}
        expected = {name: values[span].numpy() for name, values in expected.items() if values is not None}
        expected["mask"] = (batch.loss_mask & (batch.weights > 0))[span].numpy()
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


@given(batches())
def test_means_are_over_the_tokens_that_train(batch):
    for at, trained in enumerate(trained_of(batch)):
        span = slice(int(batch.cu_seqlens[at]), int(batch.cu_seqlens[at + 1]))
        places = [i for i in range(span.start, span.stop) if batch.loss_mask[i] and batch.weights[i] > 0]
        assert trained.num_tokens == len(places)
        pairs = [(batch.advantages, trained.advantage)]
        if batch.old_logprobs is not None and batch.logprobs is not None:
            pairs.append(((batch.old_logprobs - batch.logprobs).abs(), trained.logprob_gap))
        else:
            assert math.isnan(trained.logprob_gap)
        for values, mean in pairs:
            if values is None or not places:
                assert math.isnan(mean)
            else:
                assert mean == pytest.approx(sum(values[i].item() for i in places) / len(places), abs=1e-6)


def test_two_turns_keep_what_lies_between_them_out_of_the_mask(tmp_path: Path) -> None:
    mask = [False, True, True, False, False, True]
    batch = batch_of([6], [mask], set(), {"advantages", "values", "returns"})
    write_trained(tmp_path, 1, 0, batch, {0: "7/0"})
    found = read_trained(tmp_path, 1, "7/0")
    assert found["mask"].tolist() == mask
    assert found["values"].tolist() == batch.values.tolist()
    assert found["returns"].tolist() == batch.returns.tolist()
