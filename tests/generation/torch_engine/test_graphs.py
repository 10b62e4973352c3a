"""CUDA graphs of decoding steps, over a stand-in for torch's: their tokens, and when they are dropped."""

import logging

import numpy as np
import pytest

from nemorl.generation.torch_engine.graphs import padded_keys, padded_rows
from nemorl.generation.types import SamplingParams
from tests.generation.examples import (
    GREEDY,
    SHAPE,
    Prompts,
    finish,
    random_weights,
    request,
    serve,
    small_engine,
)
from tests.generation.torch_engine import cuda_graphs_stand_in
from tests.generation.torch_engine.cuda_graphs_stand_in import Graph
from tests.rehearsal import graph_capture
from tests.rehearsal.processes import alone

SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.7, top_k=12), GREEDY]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    cuda_graphs_stand_in.install(monkeypatch)


def ragged_requests(count=20):
    prompts = Prompts(0).several(count, 1, 60)
    return [
        request(prompt, f"{i}", SAMPLINGS[i % 3], 1 + (7 * i) % 23, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def eager_engine(**arguments):
    engine = small_engine(**arguments)
    engine.model.run_eagerly()
    return engine


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, completion in left.items():
        assert completion.tokens.tolist() == right[name].tokens.tolist(), name
        np.testing.assert_allclose(completion.logprobs, right[name].logprobs, atol=5e-5)


@pytest.mark.parametrize("max_batch_size", [1, 6, 16])
def test_steps_of_graphs_give_the_tokens_of_steps_without(max_batch_size):
    requests = ragged_requests()
    engine = small_engine(max_batch_size=max_batch_size)
    found = serve(engine, requests)
    assert sum(graph.replays for graph in Graph.made) > 15
    rows = {padded_rows(count) for count in range(1, max_batch_size + 1)}
    assert len(Graph.made) <= len(rows), "one for each number of rows; all rows have fewer than 512 keys"
    assert_same(found, serve(eager_engine(max_batch_size=max_batch_size), requests))


def test_the_cache_is_reserved_at_once_and_stays():
    engine = small_engine(max_batch_size=6)
    layouts = set()
    for one in ragged_requests():
        engine.add(one)
    while engine.num_running + engine.num_waiting:
        engine.step()
        layouts.add(engine.model.cache.layout)
    (layout,) = layouts
    assert layout[:1] == (8,), "with the rows that pad"
    assert layout[1] >= 200


def test_a_cache_that_moves_gets_new_graphs():
    prompts = Prompts(4)
    short, long = request(prompts.one(9), "short"), request(prompts.one(150), "long", max_new_tokens=20)
    arguments = {"max_batch_size": 2, "max_kv_tokens": 300}  # 2 rows of 200 do not fit
    engine, eager = small_engine(**arguments), eager_engine(**arguments)
    for one in (short, long):
        assert_same(serve(engine, [one]), serve(eager, [one]))
    assert [graph.replays for graph in Graph.made] == [7, 19], "both of one row"


def test_new_weights_get_new_graphs():
    def run(engine):
        for i, prompt in enumerate(Prompts(2).several(3, 5, 20)):
            engine.add(request(prompt, f"{i}", max_new_tokens=20, seed=i))
        for _ in range(8):
            engine.step()
        random_weights(engine.model, seed=1)
        engine.commit(1)
        return finish(engine)

    found = run(small_engine())
    before, after = Graph.made
    assert (before.replays, after.replays) == (8, 11)
    assert_same(found, run(eager_engine()))


def test_steps_with_drafts_run_without_a_graph_and_those_of_a_draft_model_with_one():
    requests = ragged_requests()
    section = {"method": "draft_model", "model_path": "draft"}
    engine = small_engine(max_batch_size=3, speculation=section, draft_shape=SHAPE)
    engine._draft_model._size = 0.01
    for name, staged in engine.draft_runner.staging_parameters().items():
        staged.copy_(engine.model.staging_parameters()[name])
    engine.draft_runner.commit()
    assert_same(serve(engine, requests), serve(eager_engine(), requests))
    stats = engine.take_stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_a_step_that_cannot_be_captured_runs_without_a_graph_and_the_reason_is_logged(monkeypatch, caplog):
    engine = small_engine()
    hidden = engine.model._hidden

    def reads_a_value(tokens, positions, cached):
        assert int(tokens[0]) >= 0
        return hidden(tokens, positions, cached)

    monkeypatch.setattr(engine.model, "_hidden", reads_a_value)
    requests = ragged_requests()
    with caplog.at_level(logging.WARNING):
        found = serve(engine, requests)
    (record,) = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "not permitted when stream is capturing: " in record.message
    assert sum(graph.replays for graph in Graph.made) == 0
    assert_same(found, serve(eager_engine(), requests))


def test_sizes_are_few():
    assert [padded_rows(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        16,
        24,
        64,
    ]
    assert [padded_keys(longest, 3000) for longest in (1, 512, 513, 1025, 2049)] == [
        512,
        512,
        1024,
        2048,
        3000,
    ]


def test_a_host_waits_for_nothing_in_a_capture_on_the_pretended_accelerator():
    captures, waits, replays = alone(graph_capture.captured_waits)
    assert (captures, waits, replays) == (1, 0, 6)
