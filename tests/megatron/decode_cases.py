"""What the processes of the pool do to sample: a policy worker drives its own model, as in a run."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.config.generation import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.generation.megatron_engine import PolicySampler
from nemorl.generation.types import Completion, GenerationRequest, Progress, SamplingParams
from nemorl.megatron.decode import CachedModel, DecodingCopy, copy_leaders
from nemorl.megatron.packing import EMPTY_PLACES
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.kv_cache import KVCache, Prompt
from nemorl.trajectories import Int16Array
from tests.generation.examples import completions
from tests.megatron.cases import LOSS, partition, start_worker

KV_TOKENS = 4096
# Fewer than there are requests, so that some join later and rows are moved.
CONFIG = MegatronGenerationConfig(backend="megatron", max_batch_size=3, max_kv_tokens=KV_TOKENS)


@dataclass(frozen=True)
class Sampled:
    """What one rank saw."""

    completions: dict[str, Completion]  # of a leader
    gap: LogprobStats  # between the logprobs sampled and the worker's own
    kv_tokens: int  # held at the end of the stage
    leads: bool


def request(
    name: str, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int, **fields: object
) -> GenerationRequest:
    """Its seed follows from its name."""
    plain = GenerationRequest(
        id=name,
        prompt=np.array(prompt, np.int32),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=100 + int(name),
    )
    return replace(plain, **fields)


def sample(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, asked: Sequence[GenerationRequest]
) -> Sampled:
    """Every copy samples its share of the requests; then the worker computes the logprobs of all of them."""
    worker = start_worker(rank, world_size, rendezvous, config, asked[0].sampling.temperature or 1.0)
    copy = worker.decoding_copy(KV_TOKENS)
    number = copy_leaders(config.layout).index(copy.leader)
    mine = asked[number :: config.layout.data_parallel_size]
    with worker.sampling():
        completions = {c.id: c for c in _stage(copy, config, mine)}
    kv_tokens = copy.cache.num_tokens
    gap = _gap(worker, mine, completions, copy.leader)
    worker.close()
    return Sampled(completions, gap, kv_tokens, copy.leads)


def sample_and_train(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, asked: Sequence[GenerationRequest]
) -> tuple[dict[str, Completion], LogprobStats, TrainStats]:
    """As `sample`, and a step on what was sampled."""
    worker = start_worker(rank, world_size, rendezvous, config)
    copy = worker.decoding_copy(KV_TOKENS)
    number = copy_leaders(config.layout).index(copy.leader)
    mine = asked[number :: config.layout.data_parallel_size]
    completions = {c.id: c for c in _stage(copy, config, mine)}
    gap = _gap(worker, mine, completions, copy.leader, reference=True)
    stats = worker.train(partition(len(mine), 2), LOSS)
    worker.close()
    return completions, gap, stats


def two_stages(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, asked: GenerationRequest
) -> tuple[Completion, list[Progress]] | None:
    """What came of a request that is under way when the first stage ends; of a leader."""
    worker = start_worker(rank, world_size, rendezvous, config)
    copy = worker.decoding_copy(KV_TOKENS)
    if not copy.leads:
        copy.follow()
        copy.follow()
        worker.close()
        return None
    sampler = _sampler(copy, config)
    some, progress = threading.Event(), []

    async def call() -> Completion:
        async for reports in sampler.generate_batches([asked]):
            for report in reports:
                if isinstance(report, Completion):
                    return report
                progress.append(report)
                some.set()
        raise AssertionError("no completion")

    async def callers() -> Completion:
        answer = asyncio.create_task(call())
        await asyncio.to_thread(some.wait, 20)
        await sampler.stop()
        return await answer

    found: list[Completion] = []
    caller = threading.Thread(target=lambda: found.append(asyncio.run(callers())))
    caller.start()
    sampler.serve(version=3)
    assert copy.cache.num_tokens == 0, "the policy trains with the memory of keys and values"
    ended = threading.Thread(target=lambda: (caller.join(), asyncio.run(sampler.stop())))
    ended.start()
    sampler.serve(version=4)
    ended.join()
    worker.close()
    return found[0], progress


def _prompt(tokens: Sequence[int], row: int, start: int = 0) -> Prompt:
    return Prompt(np.array(tokens, np.int32), [row], start)


def logits_with_and_without_cache(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, tokens: Sequence[int], known: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [tokens - known + 1, vocabulary] after the first `known` tokens and each further one: token by
    token from the cache, with the further ones read at once as a draft, and of every beginning on its own.
    """
    worker = start_worker(rank, world_size, rendezvous, config)
    model = CachedModel(worker._modules[0], worker._maker, worker._shape.vocab_size, KV_TOKENS)
    model.cache.reserve(2, known)
    other = [1] * (known + 5)  # in the row before, longer and read in the same pass
    model.cache.reserve(2, len(other))
    both = model.prefill([_prompt(tokens[:known], 1), _prompt(other, 0)])
    assert both is not None
    cached = [both[0]]
    for place in range(known, len(tokens)):
        model.cache.reserve(2, len(other) + place)
        step = model.decode([2, tokens[place]], [len(other) + place - known, place], [1, 1])
        assert step is not None
        cached.append(step[1])
    drafted = len(tokens) - known
    places = [len(other) + drafted, *range(known, len(tokens))]
    model.cache.reserve(2, max(places) + 1)
    at_once = model.decode([2, *tokens[known:]], places, [1, drafted])
    assert at_once is not None
    rest = model.prefill([_prompt(tokens, 1, known)])
    assert rest is not None
    torch.testing.assert_close(rest[0], at_once[-1], rtol=0, atol=1e-4)
    model.cache.release()
    model.cache.reserve(1, len(tokens))
    alone = [model.prefill([_prompt(tokens[:n], 0)]) for n in range(known, len(tokens) + 1)]
    worker.close()
    each = torch.cat([a for a in alone if a is not None])
    return torch.stack(cached), torch.cat((cached[0][None], at_once[1:])), each


def _stage(copy: DecodingCopy, config: PolicyConfig, asked: Sequence[GenerationRequest]) -> list[Completion]:
    """One stage of sampling, as a run has it: callers in one thread, the model in another."""
    if not copy.leads:
        copy.follow()
        return []
    sampler = _sampler(copy, config)

    async def callers() -> list[Completion]:
        found = [completion async for completion in completions(sampler, asked)]
        await sampler.stop()
        return found

    found: list[list[Completion]] = []
    caller = threading.Thread(target=lambda: found.append(asyncio.run(callers())))
    caller.start()
    sampler.serve(version=7)
    caller.join()
    return found[0]


def _sampler(copy: DecodingCopy, config: PolicyConfig) -> PolicySampler:
    return PolicySampler(
        copy,
        config,
        CONFIG,
        name="the policy",
        tokenizer_path=Path(config.model_path),
        device=torch.device("cpu"),
    )


def _gap(
    worker: PolicyWorker,
    mine: Sequence[GenerationRequest],
    completions: dict[str, Completion],
    leader: int,
    *,
    reference: bool = False,
) -> LogprobStats:
    """All ranks of the copy are given what its leader sampled."""
    told: list[dict[str, Completion]] = [completions]
    dist.broadcast_object_list(told, leader, group=parallel_state.get_model_parallel_group())
    found = [told[0][request.id] for request in mine]
    lengths = [len(r.prompt) + len(c.tokens) for r, c in zip(mine, found, strict=True)]
    both = [np.concatenate((r.prompt, c.tokens)) for r, c in zip(mine, found, strict=True)]
    mask = torch.cat([torch.arange(n) >= len(r.prompt) for n, r in zip(lengths, mine, strict=True)])
    logprobs = torch.zeros(sum(lengths))
    logprobs[mask] = torch.from_numpy(np.concatenate([c.logprobs for c in found]))
    worker.load_batch(
        PackedBatch(
            tokens=torch.from_numpy(np.concatenate(both)).long(),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            position_ids=torch.cat([torch.arange(n) for n in lengths]),
            loss_mask=mask,
            weights=mask / mask.sum(),
            advantages=mask.float(),
            logprobs=logprobs,
            routed_experts=_experts([c.routed_experts for c in found], lengths),
        )
    )
    return worker.compute_logprobs(partition(len(mine), 2), old=True, reference=reference)


def _experts(rows: Sequence[Int16Array | None], lengths: Sequence[int]) -> Tensor | None:
    """[N, layers, experts of a token], -1 at the end of each sequence."""
    told = [torch.from_numpy(r) for r in rows if r is not None]
    if len(told) < len(rows):
        return None
    unknown = [torch.full((n - len(r), *r.shape[1:]), -1) for n, r in zip(lengths, told, strict=True)]
    return torch.cat([part for both in zip(told, unknown, strict=True) for part in both]).to(torch.int16)


def cache_that_grew(rows: int, length: int) -> tuple[Tensor, KVCache]:
    """A cache of one layer that was made for less, and the keys that its first row got then."""
    cache = KVCache(KV_TOKENS, EMPTY_PLACES)
    cache.reserve(1, 3)
    kept = torch.randn(3, 2, 4)
    cache.keep(0, cache.slots(torch.zeros(3, dtype=torch.int64), torch.arange(3)), kept, -kept)
    cache.reserve(rows, length)
    return kept, cache
