"""Operations of the model in a run's steps, from real lengths, and the share of the peak (MFU). No torch.

Counted are products with weight matrices, and attention over the tokens that each token sees, itself
included: two operations for each multiplication. Not counted are padding, what is recomputed, routers, norms,
the optimizer, and work that training saves: tokens that several sequences of a micro-batch begin with count
once, and the head counts where a logprob is computed. So an MFU of training is never above what was done.

backward of a trained matrix = 2 forward: the gradients of its input and its elements
backward of a frozen matrix (LoRA) = 1 forward: that of its input
backward of attention = 2 forward
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.policy import LoraConfig, MultiTokenPredictionConfig, PolicyConfig
from nemorl.models.adapters import adapter_tensors
from nemorl.models.shape import ModelShape

from .hardware import known_hardware
from .operations import attention_width, forward_products, mtp_products


@dataclass(frozen=True)
class ModelWork:
    """Operations of a model; of a token where nothing else is said."""

    body: int  # in the layers' products
    head: int
    seen: int  # for each token that it sees in one layer
    windows: tuple[tuple[int | None, int], ...]  # how many tokens layers see, None for all, and their number
    adapters: int = 0  # elements of LoRA's matrices, if only these are trained
    further: int = 0  # products of all depths of multi-token prediction, in training
    depth: int = 0  # of it

    @classmethod
    def of(
        cls, shape: ModelShape, lora: LoraConfig | None = None, mtp: MultiTokenPredictionConfig | None = None
    ) -> "ModelWork":
        body = forward_products(shape) - 2 * shape.hidden_size * shape.vocab_size
        head = 2 * shape.hidden_size * (1 if shape.head == "scalar" else shape.vocab_size)
        windows = Counter(shape.window(layer) for layer in range(shape.num_layers))
        sizes = () if lora is None else adapter_tensors(shape, lora).values()
        adapters = sum(map(math.prod, sizes))
        depth = 0 if mtp is None else shape.mtp_depth(mtp.depth)
        further = depth * mtp_products(shape) if depth else 0
        seen = 2 * attention_width(shape)
        return cls(body, head, seen, tuple(windows.items()), adapters, further, depth)

    def training(self, segments: Sequence[tuple[int, int]], num_scored: int) -> float:
        """Forward and backward over tokens at places [start, end) of their sequences.

        `num_scored` tokens have a logprob, or with a scalar head a number.
        """
        tokens, products, attention = self._parts(segments, num_scored)
        if self.adapters:
            return 2 * products + 3 * attention + 6 * self.adapters * tokens
        products += tokens * self.further + self.depth * num_scored * self.head
        attention += self.depth * self.seen * sum(_seen(start, end, None) for start, end in segments)
        return 3 * (products + attention)

    def scoring(
        self, segments: Sequence[tuple[int, int]], num_scored: int, *, adapters: bool = True
    ) -> float:
        """The forward pass alone, for logprobs or values; without `adapters` that of the frozen model."""
        tokens, products, attention = self._parts(segments, num_scored)
        return products + attention + (2 * self.adapters * tokens if adapters else 0)

    def _parts(self, segments: Sequence[tuple[int, int]], num_scored: int) -> tuple[int, int, float]:
        """Tokens, and a forward pass over them in products with weights and in attention."""
        tokens = sum(end - start for start, end in segments)
        attention = sum(self._attention(start, end) for start, end in segments)
        return tokens, tokens * self.body + num_scored * self.head, attention

    def generation(self, samples: Sequence[Sequence[tuple[int, int]]]) -> float:
        """Prompts and sampled tokens of groups: of each sample its tokens, and how many were sampled.

        The prompt of a group with one length of prompts is read once. A last sampled token is not read.
        """
        total = 0.0
        for group in samples:
            prompts = {tokens - sampled for tokens, sampled in group}
            shared = prompts.pop() if len(prompts) == 1 else 0
            total += self._forward(0, shared)
            for tokens, sampled in group:
                total += self._forward(shared, max(shared, tokens - 1)) + sampled * self.head
        return total

    def _forward(self, start: int, end: int) -> float:
        return (end - start) * self.body + self._attention(start, end)

    def _attention(self, start: int, end: int) -> float:
        """Of tokens at places [start, end), each of which sees itself and those before it."""
        return float(self.seen * sum(count * _seen(start, end, window) for window, count in self.windows))


def _seen(start: int, end: int, window: int | None) -> int:
    """Tokens that those at places [start, end) see: at place p the last p + 1, or `window` of them."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    border = max(start, window)
    return _seen(start, border, None) * (start < window) + (end - border) * window


def peak_tflops(policy: PolicyConfig, device_name: str | None) -> float | None:
    """10^12 operations per second of a device: the config's, or the maker's for a GPU of this name.

    None for other devices, and for float32, which the table of devices does not have.
    """
    if policy.peak_tflops is not None:
        return policy.peak_tflops
    if policy.precision != "bfloat16":
        return None
    known = known_hardware(device_name)
    if known is None:
        return None
    return (known.operations if policy.fp8 is None else known.operations_fp8) / 1e12


def utilization(values: Mapping[str, float], experiment: Experiment) -> dict[str, float]:
    """TFLOP/s of each device in the stages that compute with a model, and their MFU where the peak is known.

    `values` are a step's metrics: operations, seconds of stages and `tflops/peak`. While engines sample ahead
    of training, generation takes the whole step. A reference that the policy's processes keep computes in
    the stage of the logprobs, or, of algorithms that learn from data, of training.
    """
    generation, online = experiment.generation, isinstance(experiment.algorithm, OnlineBase)
    ahead = experiment.samples_ahead
    sizes = {model.name: model.config.layout.world_size for model in models_of(experiment)}
    world = engines = sizes["policy"]
    if generation.has_engines:
        replicas = values.get("generation/replicas", float(generation.replicas))
        engines = round(replicas * generation.ranks_per_replica)
    stages: dict[str, tuple[tuple[str, ...], int, str]] = {
        "training": (("training",), world, "time/training"),
        "generation": (("generation",), engines, "time/step" if ahead else "time/generation"),
        "logprobs": (("logprobs",), world, "time/logprobs"),
        "values": (("values",), sizes.get("critic", 0), "time/values"),
    }
    if "reference" in sizes:
        stages["reference"] = ("reference",), sizes["reference"], "time/reference"
    else:
        stage = "logprobs" if online else "training"
        work, devices, seconds = stages[stage]
        stages[stage] = (*work, "reference"), devices, seconds
    found: dict[str, float] = {}
    for stage, (work, devices, seconds) in stages.items():
        operations = sum(values.get(f"flops/{name}", 0.0) for name in work)
        peak = values.get("tflops/peak")
        if operations and devices and values.get(seconds, 0.0) > 0:
            found[f"tflops/{stage}"] = operations / values[seconds] / devices / 1e12
            if peak:
                found[f"mfu/{stage}"] = found[f"tflops/{stage}"] / peak
    return found
