"""Refits of a TensorRT-LLM replica in both ways of delivery, and what failures leave behind."""

import asyncio
import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from nemorl.generation import request_driver
from nemorl.generation.types import EngineFailed
from nemorl.trajectories import StopReason
from nemorl.weights.exchange import TransportOptions
from nemorl.weights.messages import RefitDeadline, RefitFailed, RefitSession
from tests.generation.examples import completions
from tests.generation.trtllm_engine.setup import group
from tests.generation.trtllm_engine.test_requests import greedy

SMALL_BATCH = 0.02  # MiB: a model takes about ten of them


@pytest.fixture
def network_of(hf_models):
    """transformers' model with given weights, as a fresh engine would have them."""

    def load(tensors):
        network = copy.deepcopy(hf_models["llama"].network)
        missing, unexpected = network.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        network.tie_weights()
        return network

    return load


def parameters(replica):
    """The weights in use of every worker."""
    return replica.loop.run(replica.host._engine.call("standin_parameters"))


def assert_samples_with(replica, network, version, name):
    requests = group(name)
    answers = replica.serve(requests)
    for one in requests:
        tokens, logprobs = greedy(network, one.prompt.tolist(), 8)
        assert answers[one.id].tokens.tolist() == tokens
        np.testing.assert_allclose(answers[one.id].logprobs, logprobs, atol=1e-4)
        assert set(answers[one.id].versions) == {version}


def test_tokens_after_a_refit_are_a_fresh_engines(delivery, network_of):
    delivery.configure(bucket_megabytes=SMALL_BATCH)
    for seed in (1, 2):
        tensors = delivery.weights(seed)
        version = delivery.refit(tensors)
        assert delivery.host.version == version
        assert_samples_with(delivery, network_of(tensors), version, f"{version}-")
        for worker in parameters(delivery):
            for name, tensor in tensors.items():
                assert torch.equal(worker[name], tensor), name


def test_receivers_get_each_tensor_once(delivery):
    layouts = delivery.loop.run(delivery.host.describe_weights())
    assert len(layouts) == (1 if delivery.host._config.weight_delivery == "handles" else 2)
    tensors = delivery.weights(3)
    for rank in delivery.policy:
        rank.take(tensors)
    stats = asyncio.run(delivery.exchange.refit(delivery.version + 1))
    delivery.version += 1
    assert stats.num_bytes == len(layouts) * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("transport", ["gloo", "files"])
def test_workers_receive_by_every_transport(replica, network_of, transport, tmp_path):
    replica.configure(weight_delivery="workers", on_update="finish")
    replica.rewire(TransportOptions(transport, str(tmp_path)))
    tensors = replica.weights(20)
    version = replica.refit(tensors)
    assert_samples_with(replica, network_of(tensors), version, f"{transport}-")
    for worker in parameters(replica):
        assert all(torch.equal(worker[name], tensor) for name, tensor in tensors.items())


def test_what_is_in_flight_ends_before_an_update(delivery):
    delivery.refit(delivery.weights(4))
    old = delivery.version
    (long,) = group("long", count=1, max_new_tokens=150)

    async def begin():
        return asyncio.ensure_future(anext(completions(delivery.host, [long])))

    under_way = delivery.loop.run(begin())
    delivery.refit(delivery.weights(5))
    assert under_way.done()
    assert len(under_way.result().tokens) == 150
    assert set(under_way.result().versions) == {old}


def test_an_update_in_flight_lets_every_token_carry_its_version(delivery, network_of):
    delivery.configure(weight_delivery=delivery.host._config.weight_delivery, on_update="restart")
    refit_in_flight(delivery, network_of)


def test_what_does_not_end_in_time_continues_with_the_new_weights(delivery, network_of, monkeypatch):
    monkeypatch.setattr(request_driver, "DRAIN_SHARE", 1e-3)  # of 20 seconds
    refit_in_flight(delivery, network_of)


def refit_in_flight(delivery, network_of):
    """Sample over an update, and compare logprobs with those of the weights of their versions."""
    before, after = delivery.weights(6), delivery.weights(7)
    old = delivery.refit(before)
    requests = [replace(one, progress_tokens=5) for one in group("flying", count=3, max_new_tokens=200)]

    async def begin():
        """Return when each request has some tokens."""
        stream = delivery.host.generate_batches(requests)
        seen = set()
        while len(seen) < len(requests):
            seen |= {report.id for report in await anext(stream)}

        async def rest():
            return {report.id: report async for batch in stream for report in batch}

        return asyncio.ensure_future(rest())

    rest = delivery.loop.run(begin())
    new = delivery.refit(after)

    async def end():
        return await rest

    answers = delivery.loop.run(end())
    networks = {old: network_of(before), new: network_of(after)}
    for one in requests:
        answer = answers[one.id]
        assert answer.stop is StopReason.LENGTH
        changes = np.flatnonzero(np.diff(answer.versions))
        assert [answer.versions[0], answer.versions[-1], len(changes)] == [old, new, 1]
        whole = torch.tensor([[*one.prompt, *answer.tokens]])
        with torch.no_grad():
            rows = {version: net(whole).logits[0].log_softmax(-1) for version, net in networks.items()}
        for place, (token, version) in enumerate(zip(answer.tokens, answer.versions, strict=True)):
            row = rows[int(version)][len(one.prompt) - 1 + place]
            assert answer.logprobs[place] == pytest.approx(float(row[int(token)]), abs=1e-3)
            assert float(row.max() - row[int(token)]) < 1e-3  # greedy under the weights it is said to be of


def break_sender(replica, monkeypatch):
    """The second policy rank fails when it is to send."""

    def send(session: RefitSession):
        raise RefitFailed("the policy's disk is full")

    monkeypatch.setattr(replica.policy[1].exchange, "send", send)


def test_a_transfer_that_fails_leaves_the_old_version(replica, network_of, monkeypatch):
    replica.configure(weight_delivery="handles", on_update="finish")
    tensors = replica.weights(8)
    replica.refit(tensors)
    with monkeypatch.context() as patch:
        break_sender(replica, patch)
        with pytest.raises(RefitFailed, match="disk is full"):
            replica.refit(replica.weights(9))
    assert_samples_with(replica, network_of(tensors), replica.version, "kept")
    assert not replica.host.health().paused
    replica.refit(replica.weights(9))  # and the next one works


def test_handles_that_a_worker_cannot_take_leave_an_engine_that_answers_nothing(
    replica, network_of, monkeypatch
):
    replica.configure(weight_delivery="handles", bucket_megabytes=SMALL_BATCH)
    handles_of, made = trtllm_host()._handles, []

    def without_a_gpu(copies):
        made.append(len(copies))
        handles = handles_of(copies)
        if len(made) == 3:  # two batches have been loaded
            del handles["GPU-standin-1"]
        return handles

    with monkeypatch.context() as patch:
        patch.setattr(trtllm_host(), "_handles", without_a_gpu)
        with pytest.raises(RefitFailed, match="Device UUID GPU-standin-1 not found in ipc_handles"):
            replica.refit(replica.weights(21))
    with pytest.raises(EngineFailed, match="two versions until a complete refit"):
        replica.serve(group("torn-handles"))
    tensors = replica.weights(22)
    replica.refit(tensors)
    assert_samples_with(replica, network_of(tensors), replica.version, "mended-handles")


def trtllm_host():
    """Imported once the stand-in is on the path."""
    from nemorl.generation.trtllm_engine import host as module

    return module


def test_workers_that_were_written_to_answer_nothing_until_a_whole_refit(replica, network_of):
    replica.configure(weight_delivery="workers", bucket_megabytes=SMALL_BATCH)
    replica.refit(replica.weights(10))

    def lose_one_rank(version, sent, received):
        raise RefitFailed("a tensor did not arrive as it was sent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemorl.weights.exchange._compare", lose_one_rank)
        with pytest.raises(RefitFailed, match="did not arrive"):
            replica.refit(replica.weights(11))
    reason = "generation rank . was being brought to version .* two versions until a (whole|complete) refit"
    assert re.match(reason, replica.host.health().corruption)
    waiting = replica.submit(group("torn"))
    tensors = replica.weights(12)
    assert not waiting.done()
    replica.refit(tensors)
    assert replica.host.health().corruption is None
    for answer in waiting.result(60).values():
        assert set(answer.versions.tolist()) == {replica.version}
    assert_samples_with(replica, network_of(tensors), replica.version, "mended")


def test_workers_that_took_the_weights_and_failed_then_answer_nothing(replica, network_of, monkeypatch):
    """They would say the version before."""
    replica.configure(weight_delivery="workers")
    engine = replica.host._engine
    call = engine.call

    async def fail_late(method, *args):
        answers = await call(method, *args)
        if method == "nemorl_commit":
            raise RuntimeError("the cache could not be read anew")
        return answers

    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", fail_late)
        with pytest.raises(RefitFailed, match="the cache could not be read anew"):
            replica.refit(replica.weights(23))
    with pytest.raises(EngineFailed, match="did not complete the update to version"):
        replica.serve(group("late"))
    tensors = replica.weights(24)
    replica.refit(tensors)
    assert_samples_with(replica, network_of(tensors), replica.version, "after-late")


def test_workers_that_were_not_written_to_stay_on_the_old_version(replica, network_of, monkeypatch):
    replica.configure(weight_delivery="workers")  # batches larger than what comes before the failure
    tensors = replica.weights(13)
    replica.refit(tensors)
    with monkeypatch.context() as patch:
        break_sender(replica, patch)
        with pytest.raises(RefitFailed, match="disk is full"):
            replica.refit(replica.weights(14))
    assert_samples_with(replica, network_of(tensors), replica.version, "kept-too")


@pytest.mark.parametrize("way", ["handles", "workers"])
def test_a_missing_final_none_is_noticed(replica, network_of, monkeypatch, way):
    replica.configure(weight_delivery=way)
    engine = replica.host._engine
    call = engine.call

    async def without_the_end(method, *args):
        if method in ("nemorl_finish", "nemorl_commit"):
            return [None, None]
        if method == "nemorl_give_up":  # nor does anybody report that there was no end
            return [None, None]
        return await call(method, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", without_the_end)
        with pytest.raises(EngineFailed, match="the final None did not follow"):
            replica.refit(replica.weights(15))
    with pytest.raises(EngineFailed):
        replica.host.health()
    tensors = replica.weights(16)
    replica.refit(tensors)
    assert_samples_with(replica, network_of(tensors), replica.version, f"after-{way}")


def test_an_engine_that_does_not_pause_is_named(replica, monkeypatch):
    replica.configure(weight_delivery="handles", on_update="finish")
    monkeypatch.setattr(request_driver, "DRAIN_SHARE", 1e3)  # it waits for ever
    (long,) = group("endless", count=1, max_new_tokens=200)
    replica.host._commit_seconds = 0.05

    async def begin():
        return asyncio.ensure_future(anext(completions(replica.host, [long])))

    under_way = replica.loop.run(begin())
    try:
        with pytest.raises(RefitDeadline, match=r"TensorRT-LLM engine 0 did not pause within 0\.05 s"):
            replica.refit(replica.weights(17))
    finally:
        replica.host._commit_seconds = 20.0

    async def end():
        return await under_way

    assert set(replica.loop.run(end()).versions) == {replica.version}
    replica.refit(replica.weights(17))


def test_a_dead_worker_is_named_and_ends_what_waits(replica):
    """Last in the module: the engine is gone after it."""
    (long,) = group("bereaved", count=1, max_new_tokens=200)

    async def die():
        waiting = asyncio.ensure_future(anext(completions(replica.host, [long])))
        await asyncio.sleep(0.05)
        ray.kill(replica.host._engine.llm.workers[1])
        return await waiting

    with pytest.raises(EngineFailed, match="worker of rank 1 of 2 died"):
        replica.loop.run(die())
    with pytest.raises(EngineFailed, match="worker of rank 1 of 2 died"):
        replica.host.health()
