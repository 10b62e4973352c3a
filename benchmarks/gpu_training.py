"""How fast is a training step on a GPU, where does its time go, and does the plan know its memory?"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_setting import Row, Setting, per_second, policy
from meter import measured, now, peak_flops
from policies import grpo_experiment
from torch._C._autograd import DeviceType
from training_work import Work, equal_work, training_flops

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.base import Config
from nemorl.config.policy import AdamConfig, FullRecompute, NoRecompute
from nemorl.data.packed import PackedBatch, pack_examples
from nemorl.megatron.device import DeviceKind
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.shape import ModelShape
from nemorl.plan.memory import ProcessMemory, policy_memory

TOKENS = 8192  # of a micro-batch
STEPS = 3  # that count, after one that warms up
KERNELS = 15  # that a profile lists
# Of parts that are on the device while a step runs without engines.
_COMPARED = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "head_gradient")
MEMORY_TOLERANCE = 0.10


@dataclass(frozen=True)
class Case:
    name: str
    sequences: int  # that fill a micro-batch
    micro_batches: int = 1
    recompute: bool = False
    chunk: int = 1024  # tokens whose logits exist at one time


CASES = (
    Case("8 x 1k", 8),
    Case("1 x 8k", 1),
    Case("8 x 1k, two micro-batches", 8, micro_batches=2),
    Case("8 x 1k, full recomputation", 8, recompute=True),
    Case("8 x 1k, logits of 4,096 tokens", 8, chunk=4096),
)


def measure(setting: Setting) -> tuple[list[Row], Row]:
    """Milliseconds of a GRPO step on random weights, tokens a second, and memory against the plan."""
    rows, details = [], {}
    for case in CASES[:2] if setting.small else CASES:
        row, profile = measure_case(setting, case)
        rows.append(row)
        details[case.name] = {"kernels": profile, "predicted": row.pop("predicted")}
    return rows, details


def measure_case(setting: Setting, case: Case) -> tuple[Row, list[Row]]:
    folder, shape = setting.large()
    tokens = 256 if setting.small else TOKENS
    work = equal_work(case.sequences * case.micro_batches, tokens // case.sequences, tokens, shape.vocab_size)
    fields: Row = {
        "max_sequence_length": tokens // case.sequences,
        "micro_batch_tokens": tokens,
        "logprob_chunk_tokens": case.chunk,
        "recompute": FullRecompute(name="full") if case.recompute else NoRecompute(),
        "optimizer": AdamConfig(lr=1e-6),
    }
    per = case.sequences
    micro_batches = [list(range(per * i, per * (i + 1))) for i in range(case.micro_batches)]
    with policy(setting, folder, **fields) as worker:
        worker.load_batch(batch_of(work))
        loss = PolicyLoss(ClipLossConfig())
        optimizer = timed_optimizer(worker, setting.device)

        def forward() -> None:
            worker.compute_logprobs(micro_batches, old=True, reference=False)

        def step() -> None:
            worker.train(micro_batches, loss)

        forward()
        step()  # which also makes the optimizer's state
        optimizer.clear()
        forwards = [measured(setting.device, forward)[1].seconds for _ in range(STEPS)]
        steps = [measured(setting.device, step) for _ in range(STEPS)]
        profile = kernels_of(step, setting.device)
    whole = min(span.seconds for _, span, _ in steps)
    updating, once = min(optimizer[:STEPS]), min(forwards)
    predicted = predicted_memory(setting, folder, shape, fields, work)
    peak = max(memory.peak_bytes for _, _, memory in steps)
    flops, limit = training_flops(shape, work), peak_flops(setting.device)
    on_device = sum(getattr(predicted, part) for part in _COMPARED)
    return {
        "case": case.name,
        "forward_ms": 1e3 * once,
        "backward_ms": 1e3 * (whole - updating - once),
        "optimizer_ms": 1e3 * updating,
        "tokens_per_second": per_second(work.num_tokens, whole),
        "mfu": per_second(flops, whole - updating) / limit if limit else 0.0,
        "peak_gigabytes": peak / 1e9,
        "planned_gigabytes": on_device / 1e9,
        "peak_over_plan": peak / on_device,
        "within_10_percent": "yes" if abs(peak / on_device - 1) <= MEMORY_TOLERANCE else "NO",
        "predicted": {part: getattr(predicted, part) for part in _COMPARED},
    }, profile


def batch_of(work: Work) -> PackedBatch:
    """What a rollout of these lengths gives: advantages, and logprobs of an engine that was certain."""
    batch = pack_examples(work.examples(), work.weights())
    mask = batch.loss_mask.float()
    return PackedBatch(**{**vars(batch), "advantages": mask, "logprobs": torch.zeros_like(mask)})


def timed_optimizer(worker: PolicyWorker, device: DeviceKind) -> list[float]:
    """The seconds of each of its steps from now on."""
    seconds: list[float] = []
    step = worker.optimizer.step

    def timed(values: Mapping[str, float]) -> Any:
        began = now(device)
        result = step(values)
        seconds.append((now(device) - began).seconds)
        return result

    worker.optimizer.step = timed  # type: ignore[method-assign]
    return seconds


def kernels_of(work: Callable[[], object], device: DeviceKind) -> list[Row]:
    """The kernels that take longest, with their share of the time of all."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        work()
    return longest(profiler.key_averages(), device)


def longest(events: Iterable[Any], device: DeviceKind) -> list[Row]:
    """Rows of a profile: on a GPU those of kernels, whose time is also in the row of the operator."""
    kind = "self_cpu_time_total"
    if device == "cuda":
        kind = "self_device_time_total"
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    ordered = sorted(events, key=lambda event: -getattr(event, kind))
    whole = sum(getattr(event, kind) for event in ordered) or 1.0
    return [
        {"kernel": event.key[:90], "calls": event.count, "share": getattr(event, kind) / whole}
        for event in ordered[:KERNELS]
    ]


def predicted_memory(
    setting: Setting, folder: Path, shape: ModelShape, fields: Row, work: Work
) -> ProcessMemory:
    """What `nemorl plan` says of a policy without a reference that trains on this work."""
    # A group has two at least; a second sequence behind a full micro-batch changes no peak without stages.
    sampled = {"num_prompts_per_step": 1, "num_generations_per_prompt": max(2, len(work.lengths))}
    plain = {n: value.model_dump() if isinstance(value, Config) else value for n, value in fields.items()}
    experiment = grpo_experiment(
        folder,
        {"model_path": str(folder), "precision": setting.precision, **plain},
        algorithm={"num_steps": 1, **sampled},
        generation={"max_new_tokens": 8},
        cluster={"gpus_per_node": 2 * (setting.device == "cuda")},  # the engine has one of its own
    )
    return policy_memory(experiment, shape)
