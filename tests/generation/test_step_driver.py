"""The worker: many callers, one engine, weights that change under way, and what happens when it dies."""

import asyncio
import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine.engine import TorchEngine, TorchHost
from nemorl.generation.types import EngineFailed, EngineOptions, RequestRefused, SamplingParams
from nemorl.models.create import create_tiny_model
from nemorl.models.hf_folder import HfFolder
from nemorl.trajectories import StopReason
from tests.generation.examples import GREEDY, Prompts, completions, request

# The engine's thread ends with its error, so that the traceback is in the worker's log.
dying = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def make_worker(hf_models):
    workers = []

    def make(**config):
        folder = hf_models["llama"].folder
        worker = TorchHost(
            TorchGenerationConfig(**config),
            EngineOptions(folder, folder, 250, rank=3, threads=1, commit_seconds=60),
        )
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.close()


async def collect(worker, requests):
    return {c.id: c async for c in completions(worker, requests)}


async def commit(worker, version):
    """Have the engine take its staged weights between two steps."""
    await worker.call(lambda: worker.engine.commit(version))


def group(prefix, count, max_new_tokens=10, sampling=GREEDY):
    prompts = Prompts(11).several(count, 3, 20)
    return [request(p, f"{prefix}{i}", sampling, max_new_tokens, seed=i) for i, p in enumerate(prompts)]


class Gate:
    """Holds an engine just before one of its steps, so that a test can act in the middle of a generation."""

    def __init__(self, monkeypatch, before_step):
        self._before_step = before_step
        self._count = 0
        self._reached, self._go = threading.Event(), threading.Event()
        self._step = TorchEngine.step
        monkeypatch.setattr(TorchEngine, "step", lambda engine, admit=True: self._gated(engine, admit))

    def _gated(self, engine, admit):
        self._count += 1
        if self._count == self._before_step:
            self._reached.set()
            assert self._go.wait(20)
        return self._step(engine, admit)

    async def during(self, action, is_posted=lambda: True):
        """Post what `action` starts while the engine is held, let it continue, and return the result."""
        assert await asyncio.to_thread(self._reached.wait, 20)
        posted = asyncio.ensure_future(action)
        await asyncio.sleep(0)
        while not is_posted():
            await asyncio.sleep(0.001)
        self._go.set()
        return await posted


def test_callers_get_their_own_completions_as_they_finish(make_worker, hf_models):
    worker = make_worker()

    async def main():
        requests = [
            request(Prompts(i).one(5), f"{i}", GREEDY, max_new_tokens=length)
            for i, length in enumerate((40, 3, 20))
        ]
        order = [c.id async for c in completions(worker, requests)]
        several = await asyncio.gather(*(collect(worker, group(f"{k}/", 7)) for k in range(5)))
        return order, several

    order, several = asyncio.run(main())
    assert order == ["1", "2", "0"]
    for k, answers in enumerate(several):
        assert sorted(answers) == [f"{k}/{i}" for i in range(7)]
        for name, completion in answers.items():
            assert completion.tokens.tolist() == several[0][f"0/{name[2:]}"].tokens.tolist()
    prompt = group("", 1)[0].prompt.tolist()
    text = [*prompt, *several[0]["0/0"].tokens.tolist()]
    assert (hf_models["llama"].logprobs(text)[len(prompt) - 1 : -1].argmax(-1).tolist()) == text[
        len(prompt) :
    ]


def test_weights_are_swapped_whole_while_sequences_run(make_worker, monkeypatch):
    worker = make_worker()
    requests = group("", 6, max_new_tokens=30)
    undisturbed = asyncio.run(collect(worker, requests))
    for parameter in worker.engine.model.staging_parameters().values():
        parameter.mul_(0.7)  # must not be seen before the commit
    gate = Gate(monkeypatch, before_step=10)

    async def main():
        running = asyncio.create_task(collect(worker, requests))
        await gate.during(commit(worker, 5))
        return await running

    changed = asyncio.run(main())
    assert worker.health().version == 5
    for name, completion in changed.items():
        assert completion.versions.tolist() == [0] * 11 + [5] * 19  # the first step samples two tokens
        assert completion.tokens[:11].tolist() == undisturbed[name].tokens[:11].tolist()
    assert any(c.tokens.tolist() != undisturbed[name].tokens.tolist() for name, c in changed.items())


def logprobs_by_hand(model, prompt, completion):
    """By transformers: of version 0, of 0.7 times its weights, and of these with the old keys and values."""
    tokens = completion.tokens.tolist()
    text = torch.tensor([[*prompt.tolist(), *tokens]])
    old = completion.versions.tolist().count(0)
    scaled = copy.deepcopy(model.network)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(0.7)
        first = model.network(text).logits[0]
        again = scaled(text).logits[0]
        # The last token of the old weights was not read by them.
        read = len(prompt) + max(0, old - 1)
        cache = model.network(text[:, :read], use_cache=True).past_key_values
        kept = torch.cat([first[:read], scaled(text[:, read:], past_key_values=cache).logits[0]])
    picked = torch.tensor(tokens).unsqueeze(1)
    rows = slice(len(prompt) - 1, -1)
    return [logits[rows].log_softmax(-1).gather(1, picked)[:, 0].numpy() for logits in (first, again, kept)]


@pytest.mark.parametrize("mode", ["continue", "finish", "restart"])
def test_an_update_by_mode(make_worker, monkeypatch, hf_models, mode):
    """Two sequences run and one waits; each logprob is that of the weights whose version its token has."""
    worker = make_worker(on_update=mode, max_batch_size=2)
    requests = group("", 3, 30, SamplingParams())
    for parameter in worker.engine.model.staging_parameters().values():
        parameter.mul_(0.7)
    gate = Gate(monkeypatch, before_step=10)

    async def main():
        running = asyncio.create_task(collect(worker, requests))
        update = asyncio.to_thread(worker._commit, 5)
        await gate.during(update, lambda: not worker._commands.empty())
        return await running

    completions = asyncio.run(main())
    for number, one in enumerate(requests):
        got = completions[one.id]
        parted = [0] * 30 if mode == "finish" else [0] * 11 + [5] * 19
        assert got.versions.tolist() == (parted if number < 2 else [5] * 30)
        old, new, kept = logprobs_by_hand(hf_models["llama"], one.prompt, got)
        of_old = got.versions == 0
        np.testing.assert_allclose(got.logprobs[of_old], old[of_old], atol=1e-4)
        after = kept if mode == "continue" and number < 2 else new
        np.testing.assert_allclose(got.logprobs[~of_old], after[~of_old], atol=1e-4)
        if mode == "continue" and number < 2:
            assert np.abs(got.logprobs - new)[~of_old].max() > 1e-2, "old keys and values make no difference"


def test_what_does_not_end_in_time_is_restarted_and_deadlines_hold(make_worker, monkeypatch, hf_models):
    worker = make_worker(max_batch_size=1)
    running, late, waiting = group("", 3, 150)
    late = replace(late, deadline_seconds=0.001)
    for parameter in worker.engine.model.staging_parameters().values():
        parameter.mul_(0.7)
    gate = Gate(monkeypatch, before_step=10)

    async def main():
        async def update():
            swap = worker.post(lambda: worker.engine.commit(5, restart=True), drain_seconds=0.01)
            await asyncio.wrap_future(swap)

        sampling = asyncio.create_task(collect(worker, [running, late, waiting]))
        await gate.during(update())
        return await sampling

    completions = asyncio.run(main())
    assert (completions["1"].stop, len(completions["1"].tokens)) == (StopReason.ABORT, 0)
    assert completions["2"].versions.tolist() == [5] * 150
    got = completions["0"]
    assert got.versions.tolist() == sorted(got.versions)
    assert set(got.versions.tolist()) == {0, 5}
    old, new, _ = logprobs_by_hand(hf_models["llama"], running.prompt, got)
    np.testing.assert_allclose(got.logprobs, np.where(got.versions == 0, old, new), atol=1e-4)


def test_staged_weights_are_those_an_exchange_describes(make_worker, hf_models):
    worker = make_worker()
    model = worker.engine.model
    with torch.no_grad():
        HfFolder(hf_models["llama"].folder).load_into(model.staging_parameters(), model.slices())
    asyncio.run(commit(worker, 2))
    first, again = model.staging_parameters(), model.staging_parameters()
    assert all(again[name] is parameter for name, parameter in first.items())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pausing(make_worker, monkeypatch, mode):
    worker = make_worker(max_batch_size=2)
    requests = group("", 3, max_new_tokens=30)
    gate = Gate(monkeypatch, before_step=10)

    async def main():
        task = asyncio.create_task(collect(worker, requests))
        await gate.during(worker.pause(mode))
        frozen = worker.health()
        tokens = (await worker.stats()).tokens_generated
        await asyncio.sleep(0.05)
        assert (await worker.stats()).tokens_generated == 0, "nothing is sampled while paused"
        late = asyncio.create_task(collect(worker, [request(Prompts().one(4), "late", max_new_tokens=3)]))
        await asyncio.sleep(0.05)
        assert not late.done()
        await worker.resume()
        return frozen, tokens, await task, await late

    frozen, tokens, completions, late = asyncio.run(main())
    assert frozen.paused
    assert len(late["late"].tokens) == 3
    lengths = [len(completions[f"{i}"].tokens) for i in range(3)]
    stops = [completions[f"{i}"].stop for i in range(3)]
    if mode == "keep":
        assert (frozen.running, frozen.waiting, tokens) == (2, 1, 2 * 11)
        assert lengths == [30] * 3
    elif mode == "wait":
        assert (frozen.running, frozen.waiting, tokens) == (0, 1, 2 * 30)
        assert lengths == [30] * 3
    else:
        assert (frozen.running, frozen.waiting, tokens) == (0, 0, 2 * 11)
        assert stops == [StopReason.ABORT] * 3
        assert lengths == [11, 11, 0]


@pytest.mark.parametrize(("second", "running"), [("wait", 0), ("keep", 2), ("abort", 0)])
def test_who_waits_for_a_pause_learns_of_it_no_matter_who_else_pauses(
    make_worker, monkeypatch, second, running
):
    worker = make_worker()
    gate = Gate(monkeypatch, before_step=10)

    async def pause_twice():
        await asyncio.gather(worker.pause("wait"), worker.pause(second))

    async def main():
        task = asyncio.create_task(collect(worker, group("", 2, max_new_tokens=30)))
        await asyncio.wait_for(gate.during(pause_twice()), 20)
        assert worker.health().running == running
        await worker.resume()
        await task

    asyncio.run(main())


def test_a_deadline_holds_while_paused(make_worker):
    worker = make_worker()

    async def main():
        await worker.pause("keep")
        return await asyncio.wait_for(
            collect(worker, [request(Prompts().one(4), "a", deadline_seconds=0.1)]), timeout=10
        )

    completion = asyncio.run(main())["a"]
    assert (completion.stop, len(completion.tokens)) == (StopReason.ABORT, 0)


def test_one_refused_request_lets_none_of_its_call_begin(make_worker):
    worker = make_worker()

    async def main():
        bad = request(np.zeros(250, np.int32), "bad")
        with pytest.raises(RequestRefused, match="'bad' has a prompt of 250 tokens"):
            await collect(worker, [*group("", 3), bad])
        twins = [request(Prompts().one(4), "twin"), request(Prompts().one(4), "twin")]
        with pytest.raises(RequestRefused, match="'twin' is in flight already"):
            await collect(worker, twins)
        assert worker.health().running + worker.health().waiting == 0
        return await collect(worker, group("", 3))

    assert len(asyncio.run(main())) == 3


def test_a_request_can_be_aborted(make_worker, monkeypatch):
    worker = make_worker()
    gate = Gate(monkeypatch, before_step=4)

    async def main():
        task = asyncio.create_task(collect(worker, group("", 2, max_new_tokens=20)))
        await gate.during(worker.abort(["1", "unknown"]))
        return await task

    completions = asyncio.run(main())
    assert (completions["1"].stop, len(completions["1"].tokens)) == (StopReason.ABORT, 5)
    assert (completions["0"].stop, len(completions["0"].tokens)) == (StopReason.LENGTH, 20)


def test_a_caller_that_stops_reading_ends_its_requests(make_worker, monkeypatch):
    worker = make_worker()
    gate = Gate(monkeypatch, before_step=4)

    async def cancel(task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main():
        task = asyncio.create_task(collect(worker, group("", 4, max_new_tokens=200)))
        await gate.during(cancel(task))
        await worker.stats()  # answered after the engine has taken notice
        assert worker.health().running == 0
        return await collect(worker, group("", 4))

    assert len(asyncio.run(main())) == 4


@dying
def test_an_error_in_the_engine_reaches_everyone_and_no_one_hangs(make_worker, monkeypatch):
    worker = make_worker()
    steps = iter(range(5))
    step = TorchEngine.step

    def failing_step(engine, admit=True):
        if next(steps, None) is None:
            raise MemoryError("no room for the cache")
        return step(engine, admit)

    monkeypatch.setattr(TorchEngine, "step", failing_step)

    async def main():
        callers = [collect(worker, group(f"{k}/", 3, max_new_tokens=100)) for k in range(3)]
        waiting = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), timeout=20)
        with pytest.raises(EngineFailed):
            await collect(worker, group("", 1))
        with pytest.raises(EngineFailed):
            await commit(worker, 1)
        return waiting

    for failure in asyncio.run(main()):
        assert isinstance(failure, EngineFailed)
        assert str(failure) == "generation engine 3 has ended: MemoryError: no room for the cache"
        assert isinstance(failure.__cause__, MemoryError)
    with pytest.raises(EngineFailed, match="no room for the cache"):
        worker.health()


@dying
def test_a_failing_commit_is_an_engine_failure(make_worker, monkeypatch):
    def out_of_memory(engine, version):
        raise MemoryError("no room for a second copy")

    worker = make_worker()
    monkeypatch.setattr(TorchEngine, "commit", out_of_memory)
    with pytest.raises(EngineFailed, match="MemoryError: no room for a second copy"):
        asyncio.run(commit(worker, 1))


def test_closing_ends_who_waits(make_worker, monkeypatch):
    worker = make_worker()
    gate = Gate(monkeypatch, before_step=4)

    async def main():
        task = asyncio.create_task(collect(worker, group("", 2, max_new_tokens=200)))
        await gate.during(worker.pause("keep"))
        worker.close()
        with pytest.raises(EngineFailed, match="generation engine 3 has ended: it was closed"):
            await task

    asyncio.run(main())
    assert "generation engine 3" not in {thread.name for thread in threading.enumerate()}
    worker.close()  # who is closed has nothing to wait for


def test_stop_strings_are_found_with_the_folders_tokenizer(tmp_path):
    folder = tmp_path / "model"
    create_tiny_model(folder, hidden=32, layers=1, heads=2, kv_heads=2, seed=3)
    worker = TorchHost(
        TorchGenerationConfig(),
        EngineOptions(folder, folder, 100, threads=1, commit_seconds=60),
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = np.array(tokenizer.encode("12+34=").ids, dtype=np.int32)

    async def main():
        free = await collect(worker, [request(prompt, "free", max_new_tokens=40, seed=1)])
        text = tokenizer.decode(free["free"].tokens.tolist(), skip_special_tokens=False)
        stop = text[10:13]
        ended = await collect(
            worker, [request(prompt, "ended", max_new_tokens=40, seed=1, stop_strings=(stop,))]
        )
        return text, stop, tokenizer.decode(ended["ended"].tokens.tolist(), skip_special_tokens=False)

    text, stop, ended = asyncio.run(main())
    worker.close()
    assert ended == text[: text.index(stop) + 3]
    assert len(ended) < len(text)
