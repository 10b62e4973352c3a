"""Micro-batches through the pipeline, by Megatron's schedules, and their results on all ranks.

Losses are plain sums (`PackedBatch.weights` carries the division by global counts), so gradients are sums
over micro-batches and data-parallel ranks: `calculate_per_token_loss` and `model.finalize_sums` keep Megatron
from dividing.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from nemorl.config.algorithm.aligned import TeacherScore
from nemorl.config.generation import SamplingConfig
from nemorl.data.losses import (
    CandidateLoss,
    LogprobStats,
    Loss,
    LossOutput,
    UnfilteredLoss,
    ValueStats,
)
from nemorl.data.packed import PackedBatch, chunk_means

from .head import Scores
from .model import PolicyModel, PolicyParallel, Prediction
from .packing import MicroBatch

# From hidden states to what is asked of a micro-batch, on ranks of the last stage.
Compute = Callable[[PolicyModel, Tensor, MicroBatch], Any]
Observer = Callable[[Tensor, MicroBatch], None]  # of hidden states
# Sums and maxima over micro-batches, data-parallel ranks and stages, equal on all ranks.
Metrics = tuple[dict[str, float], dict[str, float]]
# Of a sampled token that the filters drop with the trainer's logits; it has no gradient (NeMo-RL's value).
DROPPED_LOGPROB = 0.0


@dataclass(frozen=True)
class MtpLoss:
    """What layers for further tokens add to the loss of an algorithm, over an optimizer step's micro-batches.

    That of a depth is the mean cross entropy over the trained tokens that it predicts, at temperature 1; that
    of the layers is the mean over depths.
    """

    weight: float
    detach: bool
    counts: tuple[float, ...]  # of each depth: tokens of the global batch that it predicts, and that train

    def added_to(self, output: LossOutput, predicted: Sequence[Prediction]) -> LossOutput:
        losses = [
            -logprobs.sum() / max(n, 1) for (logprobs, _), n in zip(predicted, self.counts, strict=True)
        ]
        hits = [right.sum() / max(n, 1) for (_, right), n in zip(predicted, self.counts, strict=True)]
        mean = torch.stack(losses).mean()
        sums = {"mtp/loss": mean, "mtp/accepted": torch.stack(hits).mean()}
        if len(losses) > 1:
            sums |= {f"mtp/loss_{depth}": loss for depth, loss in enumerate(losses, 1)}
            sums |= {f"mtp/accepted_{depth}": share for depth, share in enumerate(hits, 1)}
        detached = {name: value.detach() for name, value in sums.items()}
        return replace(output, loss=output.loss + self.weight * mean, sums={**output.sums, **detached})


def predicted_tokens(made: Sequence[MicroBatch]) -> list[int]:
    """Of each depth the tokens of these micro-batches that it predicts."""
    return [
        sum(numbers) for numbers in zip(*([f.count for f in micro.further] for micro in made), strict=True)
    ]


class Pipeline:
    """Forward and backward passes of this rank's part of a model. All ranks of the model call it together."""

    def __init__(
        self,
        chunks: Sequence[PolicyParallel],
        temperature: float,
        device: torch.device,
        filters: SamplingConfig | None = None,
    ) -> None:
        """`filters`: top-k, top-p and min-p of the distribution that is trained; None keeps all tokens."""
        self._chunks, self._temperature, self._device = chunks, temperature, device
        self._filters = filters

    def run_loss(
        self,
        made: Sequence[MicroBatch],
        loss: Loss,
        *,
        backward: bool,
        scored: list[Tensor] | None = None,
        mtp: MtpLoss | None = None,
        observe: Observer | None = None,
    ) -> Metrics:
        """The loss's metrics over all micro-batches; with `backward` also its gradients.

        `mtp` adds the loss of layers for further tokens. On ranks of the last stage `scored` receives what
        the head says of each micro-batch, detached, and `observe` its hidden states.
        """

        def apply(policy: PolicyModel, hidden: Tensor, micro: MicroBatch) -> LossOutput:
            candidates = loss.candidates(micro.batch) if isinstance(loss, CandidateLoss) else None
            outputs, entropy, _ = policy.score(
                *(hidden, micro, self._temperature),
                entropy=loss.needs_entropy,
                candidates=candidates,
                filters=self._filters,
            )
            dropped = None if self._filters is None else outputs.isneginf()
            if dropped is not None:
                outputs = outputs.masked_fill(dropped, DROPPED_LOGPROB)
            if scored is not None:
                scored.append((outputs if candidates is None else outputs[:, 0]).detach())
            if dropped is None:
                return loss(micro.batch, outputs, entropy)
            if isinstance(loss, UnfilteredLoss) and loss.needs_unfiltered:
                unfiltered = policy.score(hidden, micro, self._temperature, entropy=False).logprobs
                output = loss(micro.batch, outputs, entropy, unfiltered)
            else:
                output = loss(micro.batch, outputs, entropy)
            return replace(output, sums={**output.sums, "sampling/dropped": dropped.sum().float()})

        def apply_all(policy: PolicyModel, hidden: Tensor, micro: MicroBatch) -> LossOutput:
            if observe is not None:
                observe(hidden, micro)
            output = apply(policy, hidden, micro)
            if mtp is None:
                return output
            return mtp.added_to(output, policy.predict_further(hidden, micro, detach=mtp.detach))

        outputs = self._run(made, apply_all, backward=backward)
        metrics: Any = None
        if parallel_state.is_pipeline_last_stage():
            metrics = (
                _over_data_parallel([o.sums for o in outputs], torch.sum, dist.ReduceOp.SUM),
                _over_data_parallel([o.maxima for o in outputs], torch.amax, dist.ReduceOp.MAX),
            )
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            # As JSON: `broadcast_object_list` would pickle it.
            text = torch.frombuffer(bytearray(json.dumps(metrics), "utf-8"), dtype=torch.uint8)
            text = text.to(self._device)
            length = from_last_stage(torch.tensor([len(text)], device=self._device))
            if metrics is None:
                text = text.new_empty(int(length))
            metrics = json.loads(bytes(from_last_stage(text).tolist()))
        return metrics[0], metrics[1]

    def outputs(
        self,
        batch: PackedBatch,
        made: Sequence[MicroBatch],
        *,
        entropy: bool = False,
        collision: bool = False,
        filtered: bool = False,
    ) -> Scores:
        """Logprobs or a scalar head's values, and statistics if requested: [N] on the CPU, or 0.

        With `filtered` they are of the distribution that is trained, as in `run_loss`.
        """
        filters = self._filters if filtered else None

        def score(policy: PolicyModel, hidden: Tensor, micro: MicroBatch) -> list[Tensor]:
            outputs, *statistics = policy.score(
                hidden, micro, self._temperature, entropy=entropy, collision=collision, filters=filters
            )
            if filters is not None:
                outputs = outputs.masked_fill(outputs.isneginf(), DROPPED_LOGPROB)
            return [outputs, *(one for one in statistics if one is not None)]

        like = [torch.empty(0)] * (1 + entropy + collision)
        outputs, *statistics = self._over_batch(batch, made, score, like)
        entropies = statistics.pop(0) if entropy else None
        return Scores(outputs, entropies, *statistics)

    def top(self, batch: PackedBatch, made: Sequence[MicroBatch], k: int) -> list[Tensor]:
        """Ids [N, k] int32 and logprobs [N, k] of the likeliest tokens where the mask is set, on the CPU."""

        def top(policy: PolicyModel, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            ids, logprobs = policy.top(hidden, micro, k, temperature=self._temperature)
            return ids.int(), logprobs

        like = [torch.empty(0, k, dtype=torch.int32), torch.empty(0, k)]
        return self._over_batch(batch, made, top, like)

    def top_of_chunks(
        self,
        batch: PackedBatch,
        made: Sequence[MicroBatch],
        k: int,
        *,
        scaled: bool,
        score: TeacherScore | None = None,
    ) -> list[Tensor]:
        """Ids [N, k] int32 and logprobs [N, k] of tokens at the ends of chunks, on the CPU.

        With `score` also its mean [N] over the trained tokens of the sequence, at each of them.

        The ids are the same at all chunks of a sequence: of the tokens whose largest logprobs anywhere in it
        are the highest, ascending. The logprobs are means over the tokens of the chunk, of probabilities that
        are `scaled` to sum to 1 over the ids, if asked for.
        """

        def top(policy: PolicyModel, hidden: Tensor, micro: MicroBatch) -> list[Tensor]:
            ids, logprobs = policy.top(hidden, micro, k, temperature=self._temperature)
            ids = _likeliest_anywhere(micro.batch, ids, logprobs)
            scores = policy.score(hidden, micro, self._temperature, entropy=False, candidates=ids)
            of_ids = scores.logprobs[:, 1:]
            if scaled:
                of_ids = of_ids.log_softmax(-1)
            numbers, ends = micro.batch.chunk_numbers(), micro.batch.chunk_ends()
            means = chunk_means(of_ids, numbers, len(ends))
            found = [ids.int(), torch.zeros_like(logprobs).index_copy(0, ends, means)]
            return found if score is None else [*found, _teacher_scores(policy, hidden, micro, score)]

        like = [torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0)]
        return self._over_batch(batch, made, top, like[: 2 if score is None else 3])

    def _run(self, made: Sequence[MicroBatch], compute: Compute, *, backward: bool = False) -> list[Any]:
        """Results of `compute` for each micro-batch on ranks of the last stage, nothing elsewhere."""

        def forward_step(batches: Iterator[MicroBatch], model: PolicyParallel) -> Any:
            micro, policy = next(batches), model.module

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                output = compute(policy, hidden, micro)
                if not backward:
                    return output
                # The count would divide the loss; see the module's docstring.
                return output.loss, torch.zeros((), dtype=torch.int, device=hidden.device), output

            return model(micro), finish

        config, chunks = self._chunks[0].config, list(self._chunks)
        if len(chunks) > 1:
            stages = config.pipeline_model_parallel_size
            config.microbatch_group_size_per_vp_stage = micro_batches_in_a_row(len(made), stages)
        iterators = [iter(made) for _ in chunks]
        with torch.set_grad_enabled(backward):
            outputs = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks,
                num_microbatches=len(made),
                seq_length=1,  # stages exchange the real number of tokens (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=not backward,
                collect_non_loss_data=not backward,
            )
        return list(outputs)

    def _over_batch(
        self, batch: PackedBatch, made: Sequence[MicroBatch], compute: Compute, like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Values by token of each micro-batch, laid out over the batch: [N, ...] of the types of `like`."""
        outputs = self._run(made, compute)
        return [
            self.lay_out(batch.num_tokens, made, [output[number] for output in outputs], kind)
            for number, kind in enumerate(like)
        ]

    def lay_out(
        self, num_tokens: int, made: Sequence[MicroBatch], outputs: Sequence[Tensor], like: Tensor
    ) -> Tensor:
        """[num_tokens, ...] on the CPU, as `like`, from the last stage's outputs of micro-batches.

        0 where none has the token.
        """
        places = torch.cat([micro.places for micro in made])
        flat = like.new_zeros(len(places), *like.shape[1:], device=self._device)
        if outputs:
            flat = torch.cat(list(outputs))
        values = like.new_zeros(num_tokens, *like.shape[1:])
        values[places] = from_last_stage(flat).cpu()
        return values


def micro_batches_in_a_row(num_micro_batches: int, stages: int) -> int:
    """The number of micro-batches that an interleaved stage runs through a chunk before the next chunk.

    The fewest that Megatron's schedule takes: at least as many as there are stages, and so that the last
    group is whole or also has that many. Raises ValueError for fewer micro-batches than stages.
    """
    for group in range(stages, num_micro_batches + 1):
        left = num_micro_batches % group
        if left == 0 or left >= stages:
            return group
    raise ValueError(
        f"{num_micro_batches} micro-batches cannot keep {stages} interleaved pipeline stages busy: with "
        "policy.layout.virtual_pipeline_parallel_size above 1 there have to be as many as stages"
    )


def from_last_stage(values: Tensor) -> Tensor:
    """The last pipeline stage's tensor on all its stages; the others pass a tensor of the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, source, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def _teacher_scores(policy: PolicyModel, hidden: Tensor, micro: MicroBatch, score: TeacherScore) -> Tensor:
    """[N] the mean over the trained tokens of each sequence, at temperature 1; 0 outside the loss mask."""
    if score == "max_probability":
        values = policy.top(hidden, micro, 1, temperature=1.0)[1].squeeze(1).exp()
    else:
        found = policy.score(hidden, micro, 1.0, entropy=score == "entropy")
        values = found.logprobs if found.entropies is None else -found.entropies
    means, mask = torch.zeros_like(values), micro.batch.loss_mask
    for start, end in pairwise(micro.batch.cu_seqlens.tolist()):
        own = start + mask[start:end].nonzero().squeeze(1)
        means[own] = values[own].mean()
    return means


def _likeliest_anywhere(batch: PackedBatch, ids: Tensor, logprobs: Tensor) -> Tensor:
    """[N, k] the ids of the k tokens of the highest logprob anywhere in each sequence, ascending.

    From the k likeliest tokens [N, k] at each place of the loss mask: they contain these, as any token that
    is not among them at a place has k tokens above it there.
    """
    chosen = torch.zeros_like(ids)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        inside = batch.loss_mask[start:end]
        if not bool(inside.any()):
            continue
        seen, number = ids[start:end][inside].flatten().unique(return_inverse=True)
        highest = logprobs.new_full((len(seen),), -math.inf)
        highest = highest.scatter_reduce(0, number, logprobs[start:end][inside].flatten(), "amax")
        chosen[start:end] = seen[highest.topk(ids.shape[1]).indices].sort().values
    return chosen


def _over_data_parallel(metrics: list[dict[str, Tensor]], reduce: Any, op: Any) -> dict[str, float]:
    names = sorted(metrics[0])
    if not names:
        return {}
    values = reduce(torch.stack([torch.stack([f[name].double() for name in names]) for f in metrics]), dim=0)
    dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, values.tolist(), strict=True))


def over_data_parallel(values: Tensor, device: torch.device) -> Tensor:
    """Values [n] of the data-parallel ranks, which may have differently many, end to end; on the CPU."""
    group = parallel_state.get_data_parallel_group()
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    counts[group.rank()] = len(values)
    dist.all_reduce(counts, group=group)
    padded = F.pad(values.to(device), (0, int(counts.max()) - len(values)))
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(gathered, counts.tolist(), strict=True)]).cpu()


@contextmanager
def stage_range(name: str) -> Iterator[None]:
    """A range of this name in traces of torch's profiler, and with CUDA of NVIDIA's tools (NVTX)."""
    # A build for CUDA has NVTX; a rehearsal pretends to have a GPU.
    has_nvtx = torch.version.cuda is not None and torch.cuda.is_available()
    with record_function(name), torch.cuda.nvtx.range(name) if has_nvtx else nullcontext():
        yield


def sum_over_data_parallel(values: Tensor, device: torch.device) -> Tensor:
    """The sum over the data-parallel ranks, on the CPU."""
    total = values.to(device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def of_first_rank(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Equal values on all ranks of the model, for decisions that all of them must take together."""
    if not values:
        return {}
    shared = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.broadcast(shared, src=0)
    return dict(zip(values, shared.tolist(), strict=True))


def logprob_gap(batch: PackedBatch, trainer: Tensor | None, device: torch.device) -> LogprobStats:
    """Distance of the engine's logprobs from the trainer's [N], over all data-parallel ranks."""
    gaps = torch.zeros(0)
    if trainer is not None and batch.logprobs is not None:
        gaps = (trainer - batch.logprobs)[batch.loss_mask].abs()
    total, count = sum_over_data_parallel(
        torch.tensor([gaps.double().sum(), batch.loss_mask.sum()], dtype=torch.float64), device
    ).tolist()
    largest = torch.tensor([gaps.max() if len(gaps) else 0.0], device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return LogprobStats(total / max(count, 1.0), float(largest), int(count))


def value_metrics(batch: PackedBatch, device: torch.device) -> ValueStats:
    assert batch.values is not None
    mask = batch.loss_mask
    sums = torch.stack((batch.values[mask].double().sum(), mask.sum().double()))
    total, count = sum_over_data_parallel(sums, device).tolist()
    return ValueStats(total / max(count, 1.0), int(count))
