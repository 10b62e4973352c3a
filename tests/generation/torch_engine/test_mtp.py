"""Drafts by a layer for a further token in the embedded engine, against plain modules."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemorl.config.generation import TorchGenerationConfig
from nemorl.device import upload
from nemorl.generation.torch_engine.engine import ModelRunner, TorchHost, create_engine, decoder_parameters
from nemorl.generation.types import EngineOptions
from nemorl.models.hf_folder import HfFolder
from nemorl.models.kv_cache import PAGE_TOKENS, Prompt, StepTokens, padded_slots
from nemorl.models.registry import load_shape
from nemorl.models.shape import MtpShape
from tests.generation.conftest import COMMON
from tests.generation.examples import (
    SHAPE,
    Clock,
    HfModel,
    Prompts,
    assert_same,
    finish,
    mixed_requests,
    random_weights,
    request,
    serve,
    small_engine,
    take_time,
)
from tests.generation.torch_engine import cuda_graphs_stand_in
from tests.generation.torch_engine.cuda_graphs_stand_in import Graph
from tests.models.mtp_models import MiMoConfig, further_hidden, model_of, mtp_layers

MTP_SHAPE = replace(
    SHAPE, family="mimo", qkv_bias=True, mtp=MtpShape(1, hidden_first=True, before_final_norm=True)
)


def mimo(folder, seed=7, **fields):
    torch.manual_seed(seed)
    network = model_of(MiMoConfig(**COMMON, num_nextn_predict_layers=1, **fields)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    network.save_pretrained(folder)
    return HfModel(folder, network)


@pytest.fixture(scope="module", params=["untied", "tied"])
def model(request, tmp_path_factory):
    return mimo(tmp_path_factory.mktemp("mimo"), tie_word_embeddings=request.param == "tied")


def draft_logits(network, tokens, drafted=()):
    """After `tokens` and each token `drafted` after them, by plain modules: [1 + drafted, vocabulary].

    The layer reads hidden states and the tokens after them; those of drafted tokens are its own outputs.
    """
    with torch.no_grad():
        states = []
        with network.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])):
            network(torch.tensor([list(tokens)]))
        hidden, (layer,) = states[0][:-1], mtp_layers(network)
        outputs = []
        for count in range(len(drafted) + 1):
            following = torch.tensor([[*tokens, *drafted[:count]][1:]])
            size = following.shape[1]
            embedded = network.model.embed_tokens(following)
            mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
            angles = network.model.rotary_emb(embedded, torch.arange(size)[None])
            outputs.append(layer.further(hidden[None], embedded, angles, mask)[0, -1])
            hidden = torch.cat([hidden, outputs[-1][None]])
        return network.lm_head(torch.stack(outputs))


def runner_of(folder):
    runner = ModelRunner(
        load_shape(folder, with_mtp=True), max_kv_tokens=4096, max_positions=256,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    runner.load(folder)
    return runner


def step_of(texts, first):
    """The tokens of each text from the position `first` on, as what its row reads."""
    counts = [len(text) - first for text in texts]
    tokens = [int(token) for text in texts for token in text[first:]]
    positions = [position for text in texts for position in range(first, len(text))]
    uploaded = upload(torch.device("cpu"), tokens, positions, padded_slots(counts))
    return StepTokens(tokens, positions, counts, uploaded)


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 70])
def test_what_follows_a_draft_is_that_of_plain_modules(model, num_prompt_tokens):
    """After several tokens that the model has read, and after two that it has not."""
    texts = [Prompts(seed).one(num_prompt_tokens + 5) for seed in range(3)]
    runner = runner_of(model.folder)
    runner.cache.reserve(len(texts), num_prompt_tokens + 8)
    runner.prefill([Prompt(text[:num_prompt_tokens], [row]) for row, text in enumerate(texts)])
    runner.decode(step_of([text[:-1] for text in texts], num_prompt_tokens))
    got = [runner.further.decode(step_of(texts, num_prompt_tokens)).unflatten(0, (3, -1))]
    drafted = [Prompts(9 + seed).one(2) for seed in range(3)]
    for count in (1, 2):
        texts_so_far = [np.append(t, d[:count]) for t, d in zip(texts, drafted, strict=True)]
        step = step_of(texts_so_far, num_prompt_tokens + 4 + count)
        got.append(runner.further.decode(step).unsqueeze(1))
    for text, draft, rows in zip(texts, drafted, torch.cat(got, dim=1), strict=True):
        read = [int(token) for token in text]
        with torch.no_grad():
            (hidden,) = further_hidden(model.network, torch.tensor(read), depth=1)
            whole = model.network.lm_head(hidden[num_prompt_tokens - 1 :])
        assert whole.std() > 0.5, "logits this flat would hide a mistake"
        torch.testing.assert_close(rows[:5], whole, atol=1e-4, rtol=0)
        want = draft_logits(model.network, read, [int(token) for token in draft])
        torch.testing.assert_close(rows[4:], want, atol=1e-4, rtol=0)


def drafting(engine, max_step=0.01):
    """An engine whose time is that of its steps, so that it drafts."""
    engine._draft_model._size = 0.1
    for of, first in ((engine.model, max_step), (engine.model.further, 0.001)):
        take_time(of, engine._clock, first, 0.0001, [])
    return engine


def engine_of(folder, **arguments):
    config = TorchGenerationConfig(speculation={"method": "mtp", "max_tokens": 3}, **arguments)
    engine = create_engine(config, EngineOptions(folder, folder, 200))
    engine._clock = engine._draft_model._clock = Clock()
    return drafting(engine)


def check_drafts(engine, network):
    """Compare the first draft of each sequence with plain modules, and say how many were compared."""
    draft, decode, seen, compared = engine._draft_model.draft, engine.model.further.decode, [], []

    def decode_and_keep(step):
        logits = decode(step)
        seen.append((step, logits))
        return logits

    def draft_and_compare(rows, cost):
        seen.clear()
        drafts = draft(rows, cost)
        if seen:
            step, logits = seen[0]
            ends = np.cumsum(step.counts) - 1
            for row, end, count in zip(rows, ends, step.counts, strict=True):
                if count:
                    (want,) = draft_logits(network, row.tokens(0).tolist())
                    torch.testing.assert_close(logits[end], want, atol=1e-4, rtol=0)
                    compared.append(count)
        return drafts

    engine.model.further.decode = decode_and_keep
    engine._draft_model.draft = draft_and_compare
    return compared


def test_drafts_are_those_of_plain_modules_whatever_was_rejected_moved_or_cached(model):
    """Sequences join, end and move, and conversations continue from pages; most drafts are wrong."""
    engine = engine_of(model.folder, max_batch_size=4)
    compared = check_drafts(engine, model.network)
    first = serve(engine, [r for r in mixed_requests(16) if r.max_new_tokens > 2])
    assert len(compared) > 50
    name, answer = max(first.items(), key=lambda one: len(one[1].tokens))
    (asked,) = [r for r in mixed_requests(16) if r.id == name]
    engine.take_stats()
    compared.clear()
    following = np.concatenate([asked.prompt, answer.tokens, Prompts(4).one(3)])
    serve(engine, [request(following, f"{i}", max_new_tokens=12, seed=i) for i in range(3)])
    stats = engine.take_stats()
    assert stats.cached_tokens >= (len(asked.prompt) + len(answer.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert compared


@pytest.mark.parametrize("graphs", [False, True])
def test_a_sequence_for_which_nothing_was_drafted_for_long_is_read_again(model, graphs, monkeypatch):
    """Steps without drafts keep hidden states, those of CUDA graphs too."""
    if graphs:
        cuda_graphs_stand_in.install(monkeypatch)
    engine = engine_of(model.folder)
    drafter = engine._draft_model
    lengths = drafter._lengths
    drafter._lengths = lambda rows, cost: [0] * len(rows)
    engine.add(request(Prompts(1).one(9), max_new_tokens=60))
    for _ in range(40):
        engine.step()
    drafter._lengths = lambda rows, cost: [1] * len(rows)
    compared = check_drafts(engine, model.network)
    engine.step()
    drafter._lengths = lengths
    finish(engine)
    assert compared[0] == 1, "what lies further behind is no part of a step"
    assert (sum(graph.replays for graph in Graph.made) > 30) == graphs


def test_new_weights_bring_the_layer(model, tmp_path):
    """Those of another folder; running sequences are read again by them."""
    other = mimo(tmp_path, seed=8, tie_word_embeddings=model.network.config.tie_word_embeddings)
    engine = engine_of(model.folder)
    for one in mixed_requests(6):
        engine.add(one)
    engine.step()
    runner = engine.model
    HfFolder(other.folder).load_into(runner.staging_parameters(), runner.slices())
    engine.commit(1, restart=True)
    compared = check_drafts(engine, other.network)
    finished = finish(engine)
    assert compared
    assert {int(version) for one in finished.values() for version in one.versions} == {0, 1}


def right_engine(noise=0.0, clock=None, **arguments):
    """A model that looks at its last token only, and whose layer says the same, but for `noise`."""
    section = {"method": "mtp", "max_tokens": 4}
    clock = clock or Clock()
    engine = small_engine(shape=MTP_SHAPE, speculation=section, clock=clock, **arguments)
    generator = torch.Generator().manual_seed(3)
    staged = engine.model.staging_parameters()
    for name, parameter in staged.items():
        if name.endswith(("attention_output.weight", "down.weight")):
            parameter.zero_()
    hidden = MTP_SHAPE.hidden_size
    staged["mtp.eh_proj.weight"].copy_(torch.eye(hidden, 2 * hidden).roll(hidden, 1))
    staged["mtp.eh_proj.weight"].add_(noise * torch.randn(hidden, 2 * hidden, generator=generator))
    staged["mtp.enorm.weight"].fill_(1)
    staged["mtp.final_layernorm.weight"].copy_(staged["norm.weight"])
    engine.commit(0)
    return drafting(engine)


def without_drafts(engine):
    """The same model in an engine that does not draft."""
    plain = small_engine(shape=replace(MTP_SHAPE, mtp=None))
    for name, staged in plain.model.staging_parameters().items():
        staged.copy_(engine.model.staging_parameters()[name])
    plain.commit(0)
    return plain


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_drafts_change_nothing_that_is_sampled_and_those_of_a_right_layer_are_right(max_batch_size, noise):
    requests = mixed_requests(30, stop_token_ids=frozenset({5, 6}))
    engine = right_engine(noise, max_batch_size=max_batch_size)
    assert_same(serve(engine, requests), serve(without_drafts(engine), requests))
    stats = engine.take_stats()
    share = stats.accepted_tokens / stats.drafted_tokens
    assert stats.drafted_tokens > 50
    if noise:
        assert 0.1 < share < 0.95
    else:
        assert share > 0.9  # but for stop tokens inside of drafts


@pytest.mark.parametrize("restart", [False, True])
def test_tokens_after_new_weights_are_those_without_drafts(restart):
    def change_weights(engine):
        random_weights(engine.model, seed=1)
        engine.commit(1, restart=restart)

    def sampled(engine):
        return next(len(sequence.sampled) for _, sequence in engine._scheduler.running())

    asked = request(Prompts(8).one(9), max_new_tokens=40)
    engine = right_engine()
    plain = without_drafts(engine)
    for each in (engine, plain):
        each.add(asked)
        each.step()
    engine.step()
    engine.step()
    while sampled(plain) < (count := sampled(engine)):
        plain.step()
    assert count > 4, "drafts were accepted"
    change_weights(engine)
    random_weights(plain.model, seed=1)
    for name, staged in plain.model.staging_parameters().items():
        staged.copy_(engine.model.staging_parameters()[name])
    plain.commit(1, restart=restart)
    drafted = finish(engine)
    assert_same(drafted, finish(plain))
    assert drafted["a"].versions.tolist() == [0] * count + [1] * (40 - count)


def test_every_tensor_of_the_folder_has_a_place(model):
    shape = load_shape(model.folder, with_mtp=True)
    slices = [part for parameter in decoder_parameters(shape) for part in parameter.slices()]
    assert sorted(part.name for part in slices) == sorted(HfFolder(model.folder).names())


@pytest.mark.parametrize("trained", [False, True])
def test_updates_bring_the_layer_if_it_is_trained(model, trained):
    config = TorchGenerationConfig(speculation={"method": "mtp"})
    host = TorchHost(config, EngineOptions(model.folder, model.folder, 64), trained_drafts=trained)
    try:
        (layout,) = host.describe_weights()
    finally:
        host.close()
    names = {part.name for part in layout.slices}
    further = {name for name in HfFolder(model.folder).names() if "mtp_layers" in name}
    assert further
    assert names & further == (further if trained else set())
