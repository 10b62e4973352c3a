"""A draft model in the embedded engine: what is sampled, accepted and read, and when it drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.generation.types import EngineOptions, SamplingParams
from nemorl.models.kv_cache import PAGE_TOKENS
from tests.generation.examples import (
    SHAPE,
    VOCABULARY,
    Clock,
    Prompts,
    assert_same,
    assert_sampled_by_probability,
    finish,
    mixed_requests,
    random_weights,
    request,
    serve,
    small_engine,
    take_time,
)

SMALL = replace(SHAPE, num_layers=1, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, head_dim=8)


def drafting_engine(draft="near", max_tokens=4, draft_step=(0.001, 0.0001), clock=None, **arguments):
    """An engine whose time is that of its steps: 0.01 s and 0.0001 s a row, of the draft model `draft_step`.

    It expects the draft model to take a tenth of the model's time, whatever its size.
    The draft model is the model itself ("same"), with some noise ("near"), or a smaller one ("other").
    """
    clock = clock or Clock()
    section = {"method": "draft_model", "model_path": "draft", "max_tokens": max_tokens}
    shape = SMALL if draft == "other" else SHAPE
    engine = small_engine(speculation=section, draft_shape=shape, clock=clock, **arguments)
    engine._draft_model._size = 0.1
    runner = engine.draft_runner
    if draft == "other":
        random_weights(runner, seed=5)
    else:
        generator = torch.Generator().manual_seed(3)
        for name, staged in runner.staging_parameters().items():
            noise = torch.randn(staged.shape, generator=generator) * (0.003 if draft == "near" else 0)
            staged.copy_(engine.model.staging_parameters()[name] + noise)
    runner.commit()
    runner.freeze()
    engine.draft_rows = []  # tokens that each step of the draft model reads
    for of, (first, each), counts in (
        (engine.model, (0.01, 0.0001), []),
        (runner, draft_step, engine.draft_rows),
    ):
        take_time(of, clock, first, each, counts)
    return engine


@pytest.mark.parametrize("draft", ["same", "near", "other"])
@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_a_draft_model_changes_nothing_that_is_sampled(draft, max_batch_size):
    requests = mixed_requests(30, stop_token_ids=frozenset({5, 6}))
    engine = drafting_engine(draft, max_batch_size=max_batch_size)
    assert_same(serve(engine, requests), serve(small_engine(), requests))
    stats = engine.take_stats()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    if draft == "same":
        assert stats.accepted_tokens > 0.9 * stats.drafted_tokens  # but for stop tokens inside of drafts


def test_stop_strings_end_a_turn_within_a_draft():
    def decode(tokens):
        return "".join(f"<{token}>" for token in tokens)

    prompt = Prompts().one(6)
    free = serve(small_engine(), [request(prompt, max_new_tokens=20)])["a"].tokens.tolist()
    ask = request(prompt, max_new_tokens=20, stop_strings=(f"{free[8]}><{free[9]}",))
    ended = serve(drafting_engine("same", max_tokens=8, decode=decode), [ask])["a"]
    assert ended.tokens.tolist() == free[:10]


def test_the_model_itself_is_always_right_whatever_was_rejected_or_moved_before():
    """Keys and values behind a rejected draft are overwritten, and rows follow their sequences."""
    requests = [r for r in mixed_requests(25) if r.max_new_tokens > 2]
    engine = drafting_engine("same", max_batch_size=5)
    serve(engine, requests)
    stats = engine.take_stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 100

    engine, rng = drafting_engine("same", max_batch_size=5), np.random.default_rng(0)
    draft, wrong = engine._draft_model.draft, []

    def draft_and_err(rows, cost):
        """Exchange one token of some drafts, which the draft model has read as it drew it."""
        drafts = draft(rows, cost)
        for tokens in drafts:
            if tokens and rng.random() < 0.3:
                place = rng.integers(len(tokens))
                tokens[place] = (tokens[place] + 1) % VOCABULARY
                wrong.append(len(tokens) - place)
        return drafts

    engine._draft_model.draft = draft_and_err
    serve(engine, requests)
    stats = engine.take_stats()
    assert len(wrong) > 10
    assert stats.drafted_tokens - stats.accepted_tokens == sum(wrong)


def test_the_distribution_of_continuations_is_that_without_drafts():
    """Chi-square of four tokens, over many seeds, against the model's own probabilities."""
    prompt, count = Prompts(3).one(9), 2000
    asked = [request(prompt, f"{i}", SamplingParams(top_k=3), 4, seed=i) for i in range(count)]
    engine = drafting_engine("near", max_batch_size=8)
    found = serve(engine, asked)
    stats = engine.take_stats()
    assert 500 < stats.accepted_tokens < stats.drafted_tokens
    assert_sampled_by_probability(found.values())


@pytest.mark.parametrize("restart", [False, True])
def test_new_weights_of_the_policy_reach_sequences_with_drafts(restart):
    def sampled(engine, name):
        return next(len(s.sampled) for _, s in engine._scheduler.running() if s.request.id == name)

    def change_weights(engine):
        random_weights(engine.model, seed=1)
        engine.commit(1, restart=restart)

    prompts = Prompts(8).several(4, 5, 20)
    requests = [request(prompt, f"{i}", max_new_tokens=40, seed=i) for i, prompt in enumerate(prompts)]
    engine = drafting_engine("near")
    for one in requests:
        engine.add(one)
    for _ in range(5):
        engine.step()
    counts = {one.id: sampled(engine, one.id) for one in requests}
    change_weights(engine)
    drafted = finish(engine)
    assert len(set(counts.values())) > 1
    # Without drafts, with the weights changed after as many tokens of the sequence.
    for one in requests:
        plain = small_engine()
        plain.add(one)
        plain.step()
        while sampled(plain, one.id) < counts[one.id]:
            plain.step()
        change_weights(plain)
        assert_same({one.id: drafted[one.id]}, finish(plain))
        assert drafted[one.id].versions.tolist() == [0] * counts[one.id] + [1] * (40 - counts[one.id])


def test_prompts_are_read_once_for_a_group_and_the_next_turn_begins_with_the_pages_of_the_last():
    engine = drafting_engine("same")
    reader = engine._draft_model._reader
    text = Prompts(3).one(30)
    serve(engine, [request(text, f"{i}", max_new_tokens=20, seed=i) for i in range(5)])
    assert (reader.tokens_read, reader.tokens_copied) == (30, 0)
    (turn,) = serve(engine, [request(text, "turn", max_new_tokens=21, seed=0)]).values()
    following = np.concatenate([text, turn.tokens, Prompts(4).one(5)])
    before = reader.tokens_copied
    serve(engine, [request(following, "next", max_new_tokens=9)])
    # The last tokens of a turn may not have been read by the draft model: those of its last draft.
    assert reader.tokens_copied - before >= (30 + 21 - 6) // PAGE_TOKENS * PAGE_TOKENS
    stats = engine.take_stats()
    assert stats.accepted_tokens == stats.drafted_tokens


def test_a_sequence_for_which_nothing_was_drafted_for_long_is_read_in_one_pass():
    engine = drafting_engine("same")
    model = engine._draft_model
    ask = request(Prompts(1).one(9), "a", max_new_tokens=60)
    engine.add(ask)
    lengths = model._lengths
    model._lengths = lambda rows, cost: [0] * len(rows)
    for _ in range(40):
        engine.step()
    model._lengths = lengths
    completions = finish(engine)
    assert completions["a"].tokens.tolist() == serve(small_engine(), [ask])["a"].tokens.tolist()
    assert max(engine.draft_rows) <= 3, "what lies further behind is no part of a step"
    stats = engine.take_stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 10


def test_steps_of_the_draft_model_that_take_longer_than_they_save_are_not_made():
    prompt = Prompts(2).one(12)
    asked = [request(prompt, f"{i}", max_new_tokens=60, seed=i) for i in range(3)]
    cheap, dear = drafting_engine("same", max_tokens=8), drafting_engine("same", draft_step=(0.02, 0.0001))
    serve(cheap, asked)
    serve(dear, asked)
    # The first steps cost what its size suggests; a step of 0.02 s for a token that a step of 0.01 s gives.
    assert cheap.take_stats().accepted_tokens > 0.7 * 180
    assert dear.take_stats().drafted_tokens < 30
    wrong = drafting_engine("other")
    serve(wrong, [request(prompt, f"{i}", max_new_tokens=150, seed=i) for i in range(3)])
    stats = wrong.take_stats()
    assert stats.accepted_tokens < 0.3 * stats.drafted_tokens
    assert stats.drafted_tokens < 0.4 * 450


def test_drafts_end_before_the_sequence_does():
    engine = drafting_engine("same", max_tokens=16, max_sequence_length=30)
    (done,) = serve(engine, [request(Prompts().one(20), max_new_tokens=50)]).values()
    assert len(done.tokens) == 10
    assert engine.take_stats().drafted_tokens <= 9


def test_the_engine_loads_a_draft_model_from_its_folder(hf_models):
    from nemorl.config.generation import TorchGenerationConfig
    from nemorl.generation.torch_engine.engine import create_engine

    target, draft = hf_models["llama-untied-scaled"].folder, hf_models["llama"].folder
    asked = [request(p, f"{i}", max_new_tokens=12, seed=i) for i, p in enumerate(Prompts().several(6, 3, 30))]
    section = {"method": "draft_model", "model_path": str(draft)}
    options = EngineOptions(target, target, 200)
    engine = create_engine(TorchGenerationConfig(speculation=section), options)
    assert not engine.draft_runner.staging_parameters()
    assert_same(serve(engine, asked), serve(create_engine(TorchGenerationConfig(), options), asked))
    assert engine.model._shape.vocab_size == VOCABULARY
