"""The protocol of all engines, over vLLM, and refits of an engine that continues sampling."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from nemorl.config.generation import SamplingConfig
from nemorl.generation import request_driver
from nemorl.generation.types import (
    Completion,
    EngineOptions,
    GenerationRequest,
    Progress,
    RequestRefused,
    SamplingParams,
)
from nemorl.megatron.head import VocabularyShard, token_logprobs
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.trajectories import StopReason
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import RefitFailed, RefitSession, SendReport
from tests.generation.examples import GREEDY, Prompts, completions, request
from tests.generation.vllm_engine.exchange import Receivers, Sender, exchange_of, of_network

PLAIN = SamplingParams()


async def collect(host: Any, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    return {c.id: c async for c in completions(host, requests)}


def group(prefix: str, count: int, length: int = 10, sampling: SamplingParams = GREEDY) -> list[Any]:
    prompts = Prompts(11).several(count, 3, 20)
    return [request(p, f"{prefix}{i}", sampling, length, seed=i) for i, p in enumerate(prompts)]


def gaps(network: Any, prompt: Any, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Difference of each token's logprob from that of transformers."""
    tokens = [*prompt.tolist(), *completion.tokens.tolist()]
    with torch.no_grad():
        logits = network(torch.tensor([tokens])).logits[0].float()
    rows = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    theirs = rows.gather(1, torch.tensor(completion.tokens.tolist()).unsqueeze(1)).squeeze(1)
    return (theirs - torch.tensor(completion.logprobs)).abs()


@pytest.fixture(scope="module")
def pristine(dense: Any) -> dict[str, torch.Tensor]:
    """The weights of the folder."""
    return {name: tensor.clone() for name, tensor in dense[1].state_dict().items()}


@pytest.fixture(autouse=True)
def _weights_of_the_folder(one: Any, dense: Any, pristine: dict[str, torch.Tensor]) -> Iterator[None]:
    """Whatever a test makes of the weights, the next one begins with the folder's."""
    version = one.host.version
    yield
    if one.host.version != version:
        dense[1].load_state_dict(pristine)
        asyncio.run(exchange_of(one, dense[0], of_network(*dense)).refit(one.host.version + 1))


def test_a_worker_without_others_is_in_the_process_of_its_engine(one: Any) -> None:
    assert list(one.processes) == ["EngineCore"]


def test_completions_say_what_was_sampled(one: Any, dense: Any) -> None:
    requests = group("", 5, 12, PLAIN) + group("hot", 3, 12, SamplingParams(temperature=1.7))
    completions = one.run(collect(one.host, requests))
    assert sorted(completions) == sorted(r.id for r in requests)
    for asked in requests:
        got = completions[asked.id]
        assert (got.stop, len(got.tokens)) == (StopReason.LENGTH, 12)
        assert got.versions.tolist() == [one.host.version] * 12
        assert gaps(dense[1], asked.prompt, got, asked.sampling.temperature).max() < 1e-3


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}], ids=str
)
def test_filtered_logprobs_are_the_trainers(one: Any, dense: Any, filters: dict[str, Any]) -> None:
    network = dense[1]
    shard = VocabularyShard(0, network.lm_head.weight.shape[0], None)
    requests = group(str(filters), 4, 12, SamplingParams(temperature=0.9, **filters))
    completions = one.run(collect(one.host, requests))
    for asked in requests:
        got = completions[asked.id]
        tokens = torch.tensor([*asked.prompt.tolist(), *got.tokens.tolist()])
        with torch.no_grad():
            hidden = network.model(tokens.unsqueeze(0)).last_hidden_state[0, len(asked.prompt) - 1 : -1]
        theirs, *_ = token_logprobs(
            *(hidden, network.lm_head.weight.detach(), tokens[len(asked.prompt) :, None], shard),
            temperature=0.9,
            chunk_tokens=64,
            entropy=False,
            filters=SamplingConfig(**filters),
        )
        assert (theirs.squeeze(1) - torch.tensor(got.logprobs)).abs().max() < 1e-3


def test_prompts_that_do_not_fit_into_a_step_wait(one: Any, dense: Any) -> None:
    prompts = Prompts(12).several(6, 120, 150)
    requests = [request(p, f"{i}", PLAIN, 8, seed=i) for i, p in enumerate(prompts)]
    for name, got in one.run(collect(one.host, requests)).items():
        assert gaps(dense[1], prompts[int(name)], got).max() < 1e-3


def test_greedy_is_what_transformers_chooses(one: Any, dense: Any) -> None:
    asked = request(Prompts(3).one(9), "greedy", GREEDY, 16)
    tokens = one.run(collect(one.host, [asked]))["greedy"].tokens.tolist()
    text = [*asked.prompt.tolist(), *tokens]
    with torch.no_grad():
        logits = dense[1](torch.tensor([text])).logits[0]
    assert logits.argmax(-1).tolist()[8:-1] == tokens


def test_the_seed_alone_decides(one: Any) -> None:
    prompt = Prompts(4).one(6)
    alone = one.run(collect(one.host, [request(prompt, "a", PLAIN, 10, seed=5)]))["a"]
    others = [request(prompt, "b", PLAIN, 10, seed=5), request(prompt, "c", PLAIN, 10, seed=6)]
    among = one.run(collect(one.host, [*others, *group("x", 5, 10, PLAIN)]))
    assert among["b"].tokens.tolist() == alone.tokens.tolist()
    assert among["c"].tokens.tolist() != alone.tokens.tolist()


def test_filters_and_stop_tokens_are_those_of_the_torch_engine(one: Any, dense: Any) -> None:
    from nemorl.config.generation import TorchGenerationConfig
    from nemorl.generation.torch_engine.engine import create_engine

    torch_engine = create_engine(TorchGenerationConfig(), EngineOptions(dense[0], dense[0], 200))
    # One token is left by each filter, whatever is drawn.
    filters = [SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)]
    prompt = Prompts(5).one(7)
    free = [request(prompt, f"{i}", sampling, 20, seed=i) for i, sampling in enumerate(filters)]
    for asked in free:
        torch_engine.add(asked)
    theirs: dict[str, Completion] = {}
    while len(theirs) < len(free):
        theirs |= {c.id: c for c in torch_engine.step()}
    ours = one.run(collect(one.host, free))
    for asked in free:
        assert ours[asked.id].tokens.tolist() == theirs[asked.id].tokens.tolist()
        assert ours[asked.id].logprobs == pytest.approx(theirs[asked.id].logprobs, abs=1e-4)
    token = int(ours["0"].tokens[6])
    stopping = request(prompt, "stop", GREEDY, 20, stop_token_ids=frozenset({token}))
    stopped = one.run(collect(one.host, [stopping]))["stop"]
    first = ours["0"].tokens.tolist().index(token)
    assert stopped.stop is StopReason.STOP
    assert stopped.tokens.tolist() == ours["0"].tokens.tolist()[: first + 1]


def test_stop_strings_end_a_turn_also_over_a_change_of_replicas(one: Any, dense: Any) -> None:
    tokenizer = Tokenizer.from_file(str(dense[0] / "tokenizer.json"))
    prompt = Prompts(8).one(6)
    free = one.run(collect(one.host, [request(prompt, "free", GREEDY, 20)]))["free"].tokens.tolist()
    stop = tokenizer.decode(free[7:10], skip_special_tokens=False)
    length = tokenizer.decode(free, skip_special_tokens=False).index(stop) + len(stop)
    later = np.array([*prompt, *free[: length - 1]], np.int32)
    requests = [
        request(prompt, "whole", GREEDY, 20, stop_strings=("no such text", stop)),
        request(later, "moved", GREEDY, 20, stop_strings=(stop,), sampled_before=length - 1),
    ]
    ended = one.run(collect(one.host, requests))
    assert ended["whole"].tokens.tolist() == free[:length]
    assert ended["moved"].tokens.tolist() == free[length - 1 : length]
    assert {completion.stop for completion in ended.values()} == {StopReason.STOP}
    assert all(len(c.tokens) == len(c.logprobs) == len(c.versions) for c in ended.values())


def test_refused_requests_begin_nothing(one: Any) -> None:
    bad = request(np.zeros(200, np.int32), "bad")
    with pytest.raises(RequestRefused, match="'bad' has a prompt of 200 tokens"):
        one.run(collect(one.host, [*group("", 2), bad]))
    health = one.host.health()
    assert (health.running, health.waiting) == (0, 0)


def test_progress_comes_before_the_completion(one: Any) -> None:
    async def main() -> list[Any]:
        asked = request(Prompts(6).one(5), "p", GREEDY, 20, progress_tokens=8)
        return [report async for batch in one.host.generate_batches([asked]) for report in batch]

    *progress, completion = one.run(main())
    assert all(isinstance(report, Progress) for report in progress)
    told = [token for report in progress for token in report.tokens.tolist()]
    assert told == completion.tokens.tolist()[: len(told)]
    assert 12 <= len(told) < 20  # about every 8: an engine reports several tokens at a time


def test_a_deadline_keeps_what_was_sampled(one: Any) -> None:
    async def main() -> Completion:
        await one.host.pause("keep")
        late = await collect(one.host, [request(Prompts().one(4), "late", deadline_seconds=0.1)])
        await one.host.resume()
        return late["late"]

    completion = one.run(main())
    assert (completion.stop, len(completion.tokens)) == (StopReason.ABORT, 0)


async def until_sampled(host: Any, tokens: int) -> int:
    """Return once that number of tokens were sampled."""
    sampled = 0
    while sampled < tokens:
        await asyncio.sleep(0.01)
        sampled += (await host.stats()).tokens_generated
    return sampled


def test_aborting_keeps_what_was_sampled(one: Any) -> None:
    async def main() -> dict[str, Completion]:
        await one.host.stats()
        task = asyncio.create_task(collect(one.host, group("", 2, 150)))
        await until_sampled(one.host, 10)
        await one.host.abort(["1", "unknown"])
        return await task

    completions = one.run(main())
    assert completions["1"].stop is StopReason.ABORT
    assert 0 < len(completions["1"].tokens) < 150
    assert (completions["0"].stop, len(completions["0"].tokens)) == (StopReason.LENGTH, 150)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pausing(one: Any, mode: str) -> None:
    async def main() -> tuple[Any, int, dict[str, Completion], dict[str, Completion]]:
        await one.host.stats()
        task = asyncio.create_task(collect(one.host, group("", 3, 60)))
        await until_sampled(one.host, 6)
        await one.host.pause(mode)
        frozen = one.host.health()
        await one.host.stats()
        late = asyncio.create_task(collect(one.host, [request(Prompts().one(4), "late", max_new_tokens=3)]))
        await asyncio.sleep(0.2)
        assert not late.done()
        while_paused = (await one.host.stats()).tokens_generated
        await one.host.resume()
        return frozen, while_paused, await task, await late

    frozen, while_paused, completions, late = one.run(main())
    assert frozen.paused
    assert while_paused == 0
    assert len(late["late"].tokens) == 3
    lengths = [len(completions[f"{i}"].tokens) for i in range(3)]
    if mode == "keep":
        assert frozen.running == 3
        assert lengths == [60] * 3
    elif mode == "wait":
        assert (frozen.running, lengths) == (0, [60] * 3)
    else:
        assert {c.stop for c in completions.values()} == {StopReason.ABORT}
        assert all(0 < length < 60 for length in lengths)


def test_sleeping_lets_no_one_sample_until_it_wakes(one: Any) -> None:
    async def main() -> dict[str, Completion]:
        await one.host.sleep(1)
        waiting = asyncio.create_task(collect(one.host, group("", 2, 4)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await one.host.wake(("weights",))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await one.host.wake(("kv_cache",))
        return await waiting

    assert len(one.run(main())) == 2


def test_every_parameter_of_a_dense_model_comes_as_its_shard(one: Any, dense: Any) -> None:
    (layout,) = one.host.describe_weights()
    elements = sum(part.num_elements for part in layout.slices)
    assert elements == sum(np.prod(s) for s in hf_tensors(load_shape(dense[0])).values())
    assert set(layout.dtypes) == {"float32"}


def logprobs_over_an_update(old: Any, new: Any, prompt: Any, completion: Completion, *, kept: bool) -> Any:
    """Of each token by transformers under the weights of its version; `kept` the old keys and values."""
    tokens = completion.tokens.tolist()
    text = torch.tensor([[*prompt.tolist(), *tokens]])
    num_old = completion.versions.tolist().count(completion.versions[0])
    read = len(prompt) + num_old - 1  # the last token of the old weights was not read by them
    with torch.no_grad():
        first = old(text).logits[0]
        after = new(text).logits[0][read:]
        if kept:
            cache = old(text[:, :read], use_cache=True).past_key_values
            after = new(text[:, read:], past_key_values=cache).logits[0]
    rows = torch.cat([first[:read], after])[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0].numpy()


@pytest.fixture
def on_update(one: Any) -> Iterator[Any]:
    """Sets `generation.on_update` of the engine for one test."""
    host = one.host

    def choose(mode: str) -> None:
        host._on_update, host._vllm._recompute = mode, mode != "continue"

    yield choose
    choose("restart")


@pytest.mark.parametrize("mode", ["continue", "finish", "late", "restart"])
def test_an_update_by_mode(
    one: Any, dense: Any, on_update: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Each logprob is that of the weights whose version its token has."""
    on_update("finish" if mode == "late" else mode)
    if mode == "late":
        monkeypatch.setattr(request_driver, "DRAIN_SHARE", 1e-4)  # of a minute
    folder, network = dense
    exchange = exchange_of(one, folder, of_network(folder, network))
    before = one.host.version
    requests = group("", 3, 120, PLAIN)
    one.run(one.host.stats())
    running = one.submit(collect(one.host, requests))
    one.run(until_sampled(one.host, 30))
    old = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    stats = asyncio.run(exchange.refit(before + 1))
    completions = running.result(120)
    assert stats.num_bytes == sum(4 * np.prod(s) for s in hf_tensors(load_shape(folder)).values())
    for asked in requests:
        got = completions[asked.id]
        assert (got.stop, len(got.tokens)) == (StopReason.LENGTH, 120)
        versions = got.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {before} if mode == "finish" else {before, before + 1}
        kept = mode == "continue"
        expected = logprobs_over_an_update(old, network, asked.prompt, got, kept=kept)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-3)
        others = logprobs_over_an_update(old, network, asked.prompt, got, kept=not kept)
        if mode != "finish":
            assert np.abs(got.logprobs - others).max() > 1e-2, "the keys and values make no difference"
    after = one.run(collect(one.host, [request(requests[0].prompt, "after", PLAIN, 8)]))["after"]
    assert after.versions.tolist() == [before + 1] * 8
    assert gaps(network, requests[0].prompt, after).max() < 1e-3


def test_new_weights_read_a_cached_prompt_again(one: Any, dense: Any) -> None:
    folder, network = dense
    prompt = Prompts(13).one(180)  # longer than a block of the cache
    asked = [request(prompt, "a", PLAIN, 8, seed=1)]
    one.run(collect(one.host, asked))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.8)
    asyncio.run(exchange_of(one, folder, of_network(folder, network)).refit(one.host.version + 1))
    assert gaps(network, prompt, one.run(collect(one.host, asked))["a"]).max() < 1e-3


def test_an_update_that_fails_leaves_the_old_version(one: Any, dense: Any) -> None:
    folder, network = dense
    sender = Sender(folder, of_network(folder, network))
    exchange = WeightExchange(sender, Receivers(one), 2**14, 20.0)
    version = one.host.version
    asked = group("", 2, 12)
    undisturbed = one.run(collect(one.host, asked))
    asyncio.run(exchange.refit(version + 1))
    good = sender.send

    async def dying(session: RefitSession) -> Sequence[SendReport]:
        with torch.no_grad():
            sender.parameters["model.norm.weight"].mul_(1.5)
        good_parameters = dict(sender.parameters)
        sender.parameters.pop("model.norm.weight")
        try:
            return await good(session)
        finally:
            sender.parameters.update(good_parameters)

    sender.send = dying  # type: ignore[method-assign]
    with pytest.raises((RefitFailed, ValueError)):
        asyncio.run(exchange.refit(version + 2))
    assert one.host.version == version + 1
    after = one.run(collect(one.host, asked))
    for name, completion in after.items():
        assert completion.tokens.tolist() == undisturbed[name].tokens.tolist()
    with torch.no_grad():
        sender.parameters["model.norm.weight"].div_(1.5)
