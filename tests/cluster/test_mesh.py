"""The mesh against Megatron's order written out by hand."""

import pytest

from nemorl.cluster.group import Mesh
from nemorl.config.policy import LayoutConfig


def test_ranks_of_tp2_pp2_dp2_written_out():
    mesh = Mesh.of(LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2))
    # rank:                                         0  1  2  3  4  5  6  7
    assert [mesh.dp_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.output_ranks == (4, 6)
    assert mesh.spread(["a", "b"]) == ["a", "a", "b", "b", "a", "a", "b", "b"]


def test_context_parallel_ranks_are_given_the_same_shard():
    mesh = Mesh.of(LayoutConfig(tensor_parallel_size=2, context_parallel_size=2, data_parallel_size=2))
    # rank:                                         0  1  2  3  4  5  6  7
    assert [mesh.dp_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.output_ranks == (0, 4)
    assert mesh.spread(["a", "b"]) == ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 1, 1), (3, 1, 1), (1, 3, 2), (2, 2, 3)])
def test_shares_and_outputs_against_the_order_of_coordinates(tensor: int, pipeline: int, data: int):
    mesh = Mesh(tensor, data, pipeline)
    ranks = [(p, d, t) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    assert mesh.world_size == len(ranks)
    assert [mesh.dp_rank(rank) for rank in range(mesh.world_size)] == [d for _, d, _ in ranks]
    assert [ranks[rank] for rank in mesh.output_ranks] == [(pipeline - 1, d, 0) for d in range(data)]


def test_shards_must_match_the_data_parallel_size():
    with pytest.raises(ValueError, match="3 shards for a data-parallel size of 2"):
        Mesh(data=2).spread([1, 2, 3])
