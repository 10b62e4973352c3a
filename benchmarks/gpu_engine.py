"""How far is decoding on a GPU from its memory's speed, and does it wait for the host?

The least that a step of decoding can take is reading all weights and the cache once. Two generators: the
embedded engine, and the policy's own network with its cache.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from gpu_models import fill
from gpu_setting import Row, Setting, per_second, policy
from meter import now, peak_bandwidth

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.torch_engine.engine import TorchEngine
from nemorl.generation.types import GenerationRequest, SamplingParams
from nemorl.megatron.decode import CachedModel
from nemorl.models.kv_cache import Prompt
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape

PROMPT, NEW = 256, 256
BATCHES = (1, 64, 256)
STEPS = 64  # that are timed


def measure(setting: Setting) -> tuple[list[Row], Row]:
    """Milliseconds of a step for several batches, with CUDA graphs, without, and with cuDNN's attention."""
    prompt, new, batches, steps = (16, 24, (1, 4), 4) if setting.small else (PROMPT, NEW, BATCHES, STEPS)
    _, shape = setting.large()
    rows = []
    engine = make_engine(setting, shape, max(batches), prompt + new)
    ways = ((True, False), (False, False), (False, True)) if setting.device == "cuda" else ((False, False),)
    for graphs, cudnn in ways:
        if not graphs:
            engine.model.run_eagerly()
        how: Row = {"graphs": "on" if graphs else "off", "cudnn": "on" if cudnn else "off"}
        with cudnn_attention(cudnn):
            rows += [step_row(setting, shape, engine, batch, prompt, new, steps, how) for batch in batches]
            rows.append(ragged_row(setting, shape, engine, max(batches), prompt, new, how))
    del engine
    rows.append(policy_row(setting, shape, batches[1], prompt, steps))
    return rows, {"prompt_tokens": prompt, "new_tokens": new, "timed_steps": steps}


def make_engine(setting: Setting, shape: ModelShape, rows: int, length: int) -> TorchEngine:
    engine = TorchEngine(
        shape,
        TorchGenerationConfig(max_batch_size=rows, max_kv_tokens=rows * length),
        device=setting.torch_device,
        dtype=setting.dtype,
        max_sequence_length=length,
    )
    fill(engine.model.staging_parameters())
    engine.commit(0)
    return engine


def step_row(
    setting: Setting,
    shape: ModelShape,
    engine: TorchEngine,
    batch: int,
    prompt: int,
    new: int,
    steps: int,
    how: Row,
) -> Row:
    """Equal lengths: prefill, then steps in which no sequence ends."""
    for request in requests(batch, prompt, [new] * batch):
        engine.add(request)
    began = now(setting.device).seconds
    engine.step()
    prefilled = now(setting.device).seconds
    waits = host_waits(setting, engine.step)
    seconds = seconds_of(setting, engine.step, steps)
    for number in range(batch):
        engine.abort(str(number))
    return {
        **described(f"embedded, {batch}", how),
        "prefill_tokens_per_second": per_second(batch * prompt, prefilled - began),
        **speed(setting, shape, batch, prompt + 2 + steps // 2, seconds / steps),
        "host_waits_per_step": waits,
    }


def ragged_row(
    setting: Setting,
    shape: ModelShape,
    engine: TorchEngine,
    batch: int,
    prompt: int,
    new: int,
    how: Row,
) -> Row:
    """Sequences have different lengths, so that the batch has another size at nearly each step."""
    lengths = np.linspace(new // 8, new, batch).astype(int).tolist()
    for request in requests(batch, prompt, lengths):
        engine.add(request)
    engine.step()
    began, count = now(setting.device).seconds, 0
    while engine.num_running:
        engine.step()
        count += 1
    seconds = now(setting.device).seconds - began
    sampled = sum(lengths) - batch
    return {
        **described(f"embedded, {batch} ragged", how),
        "prefill_tokens_per_second": 0.0,
        **speed(setting, shape, sampled / count, prompt + new // 2, seconds / count),
        "host_waits_per_step": 0,
    }


def policy_row(setting: Setting, shape: ModelShape, batch: int, prompt: int, steps: int) -> Row:
    """The policy's network, which `generation.backend: megatron` samples with."""
    folder, _ = setting.large()
    length = prompt + steps + 2
    with policy(setting, folder, max_sequence_length=length, micro_batch_tokens=max(4096, length)) as worker:
        (module,) = worker._modules
        model = CachedModel(module, worker._maker, shape.vocab_size, max_tokens=batch * length)
        model.cache.reserve(batch, length)
        tokens = np.random.default_rng(0).integers(2, shape.vocab_size, prompt).tolist()
        began = now(setting.device).seconds
        model.prefill([Prompt(np.array(tokens, np.int32), [row]) for row in range(batch)])
        prefilled = now(setting.device).seconds
        place = iter(range(prompt, length))

        def step() -> None:
            model.decode([tokens[0]] * batch, [next(place)] * batch, [1] * batch)

        waits = host_waits(setting, step)
        seconds = seconds_of(setting, step, steps)
    return {
        **described(f"policy, {batch}", {"graphs": "off", "cudnn": "off"}),
        "prefill_tokens_per_second": per_second(batch * prompt, prefilled - began),
        **speed(setting, shape, batch, prompt + 2 + steps // 2, seconds / steps),
        "host_waits_per_step": waits,
    }


def requests(batch: int, prompt: int, lengths: list[int]) -> Iterator[GenerationRequest]:
    drawn = np.random.default_rng(0)
    for number, length in enumerate(lengths[:batch]):
        tokens = drawn.integers(2, 1000, prompt).astype(np.int32)
        yield GenerationRequest(str(number), tokens, SamplingParams(), length, seed=number)


def described(name: str, how: Row) -> Row:
    return {"generator, batch": name, **how}


def speed(setting: Setting, shape: ModelShape, batch: float, length: int, seconds: float) -> Row:
    """Of a step whose sequences have this length; the bound is what its memory has to bring."""
    item = setting.dtype.itemsize
    weights = sum(int(np.prod(extents)) for extents in hf_tensors(shape).values())
    cached = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * length * batch
    bandwidth = peak_bandwidth(setting.device)
    bound = (weights + cached) * item / bandwidth if bandwidth else 0.0
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": per_second(batch, seconds),
        "memory_bound_ms": 1e3 * bound,
        "of_memory_bound": bound / seconds,
    }


def seconds_of(setting: Setting, step: Callable[[], object], steps: int) -> float:
    began = now(setting.device).seconds
    for _ in range(steps):
        step()
    return now(setting.device).seconds - began


def host_waits(setting: Setting, step: Callable[[], object]) -> int:
    """Times that the host waits for the GPU in one step, as torch notices; each step needs one."""
    if setting.device == "cpu":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Another warning says, when the mode is set for the first time, that it is a prototype.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
