"""Fields on their way between groups that lay the same sequences out differently."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.data.packed import PackedBatch
from nemorl.data.shards import BatchPlan, rows_of, with_rows

LENGTHS = (2, 3, 1, 4)


def batch_of(sequences: list[int]) -> PackedBatch:
    lengths = [LENGTHS[s] for s in sequences]
    size = sum(lengths)
    return PackedBatch(
        tokens=torch.zeros(size, dtype=torch.long),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        position_ids=torch.zeros(size, dtype=torch.long),
        loss_mask=torch.zeros(size, dtype=torch.bool),
        weights=torch.zeros(size),
        values=torch.cat([torch.full((LENGTHS[s],), float(s)) for s in sequences]),
    )


def test_every_rank_gets_the_rows_of_its_sequences_from_the_stores_that_hold_them() -> None:
    ours, theirs = BatchPlan([[2, 0], [1, 3]], []), BatchPlan([[3], [0, 1, 2]], [])
    rows = {f"store {rank}": rows_of(batch_of(held), "values") for rank, held in enumerate(ours.ranks)}
    shards = theirs.column_shards(ours.column(list(rows)))
    assert [shard.stores for shard in shards] == [("store 1",), ("store 0", "store 1")]
    for shard, held in zip(shards, theirs.ranks, strict=True):
        found = [rows[shard.stores[store]][row] for store, row in shard.places]
        batch = with_rows(batch_of(held), "returns", found)
        assert batch.returns is not None
        assert batch.returns.tolist() == [float(s) for s in held for _ in range(LENGTHS[s])]


def test_rows_of_other_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"values are of sequences of \[2\] tokens, .* batch have \[3\]"):
        with_rows(batch_of([1]), "values", [np.zeros(2, dtype=np.float32)])


def test_aligned_sequences_have_a_row_for_each_chunk() -> None:
    """Rows are at the last tokens of chunks, whatever the number of their tokens is here and there."""
    chunks = torch.tensor([-1, 0, -1, 0, 0, -1, -1, 0, 1, 1])
    ours = replace(batch_of([0, 1, 2, 3]), chunks=chunks, values=torch.arange(10.0))
    rows = rows_of(ours, "values")
    assert [row.tolist() for row in rows] == [[1], [4], [], [7, 9]]
    theirs = replace(batch_of([3, 1]), chunks=torch.tensor([-1, 0, 0, 1, -1, 0, -1]))
    found = with_rows(theirs, "returns", [rows[3], rows[1]]).returns
    assert found is not None
    assert found.tolist() == [0, 0, 7, 9, 0, 4, 0]
    with pytest.raises(
        ValueError, match=r"values are of sequences of \[1, 2\] chunks, .* batch have \[2, 1\]"
    ):
        with_rows(theirs, "values", [rows[1], rows[3]])


def test_what_was_not_computed_cannot_be_shared() -> None:
    with pytest.raises(RuntimeError, match="the batch has no returns"):
        rows_of(batch_of([1]), "returns")
