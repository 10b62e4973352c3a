"""Seconds of a step of a run: its stages, what bounds them, who waits, and what it costs. Imports no torch.

engines share the policy's devices:   step = generation + passes of the policy + refit + offload + other
engines of their own, max_staleness 0: the same, and each group waits while the other works
engines ahead of training:             step = max(generation, passes of the policy + other) + refit

With a max_staleness of n engines sample the batches of n steps at a time, also on the policy's devices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.models.shape import ModelShape

from .costs import Attained, Cost
from .generation_time import Engine
from .hardware import Hardware
from .training_time import Lengths, Training


class UnplannedRun(Exception):
    """A run whose time the plan has no model of; the message names field, value and fix."""


@dataclass(frozen=True)
class StepTime:
    """A step, in seconds; shares are of its time."""

    stages: Mapping[str, Cost]
    seconds: float
    idle: Mapping[str, float]  # by group of processes
    devices: int
    trained_tokens: float
    training_utilization: float  # MFU of the optimizer steps
    utilization: float  # the same operations of all devices in the whole step

    @property
    def longest(self) -> str:
        """The stage that takes longest."""
        return max(self.stages, key=lambda stage: self.stages[stage].seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    def cost_per_million(self, price_per_hour: float) -> float:
        """Of trained tokens, in the unit of `price_per_hour` of a device."""
        return self.devices * price_per_hour * self.seconds / 3600 / self.trained_tokens * 1e6


@dataclass(frozen=True)
class RunPlan:
    """A run on one kind of hardware. Raises `UnplannedRun` where it is used."""

    experiment: Experiment  # with a settled `policy.recompute`
    shape: ModelShape
    hardware: Hardware
    lengths: Lengths
    attained: Attained = Attained()

    @cached_property
    def training(self) -> Training:
        policy, lengths, algorithm = self.experiment.policy, self.lengths, self.experiment.algorithm
        shares = policy.share_prefixes and policy.multi_token_prediction is None
        if isinstance(algorithm, OnlineBase) and shares:  # prompts are computed once a group
            lengths = lengths.packed(algorithm.num_generations_per_prompt)
        return Training(policy, self.shape, self._policy_device, self.attained, lengths, self.lengths)

    @cached_property
    def engine(self) -> Engine:
        generation, layout = self.experiment.generation, self.experiment.policy.layout
        if not generation.takes_weights:
            fix = "the speed of a server is not known; choose an engine of the run"
            raise UnplannedRun(f"generation.backend = {generation.backend}: {fix}")
        tensor = getattr(generation, "tensor_parallel_size", 1)
        stages = getattr(generation, "pipeline_parallel_size", 1)
        if not generation.has_engines:
            tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
        fp8 = getattr(generation, "quantization", None) == "fp8"
        hardware = self._engine_device
        return Engine(
            self.shape,
            hardware,
            self.attained,
            tensor=tensor,
            stages=stages,
            max_sequences=getattr(generation, generation.batch_field),
            memory_share=getattr(generation, "gpu_memory_utilization", 0.9),
            weight_bytes=1 if fp8 else hardware.element_bytes,
            cache_bytes=1
            if getattr(generation, "kv_cache_dtype", "auto") == "fp8"
            else hardware.element_bytes,
            max_cached=getattr(generation, "max_kv_tokens", None) or math.inf,
            fp8=fp8,
        )

    @cached_property
    def _policy_device(self) -> Hardware:
        """What a process of the policy computes with."""
        policy, world = self.experiment.policy, self.experiment.policy.layout.world_size
        return self._device("policy", policy.precision, world, self.experiment.cluster.policy_threads)

    @cached_property
    def _engine_device(self) -> Hardware:
        generation, policy = self.experiment.generation, self.experiment.policy
        if not generation.has_engines:
            return self._policy_device
        section = "policy" if generation.precision is None else "generation"
        precision = generation.precision or policy.precision
        return self._device(section, precision, self._num_engines, generation.threads)

    @property
    def _num_engines(self) -> int:
        """Processes of engines."""
        generation = self.experiment.generation
        return self.replicas * generation.ranks_per_replica if generation.has_engines else 0

    def _device(self, section: str, precision: str, at_once: int, threads: int | None) -> Hardware:
        """`section` is the one that sets the precision; `at_once` processes of a kind work together."""
        if precision == "float32" and not self.hardware.operations_float32:
            fix = f"the rates of {self.hardware.name} are of bfloat16 and FP8; set it to bfloat16, or give a"
            fix += " file of hardware with operations_float32"
            raise UnplannedRun(f"{section}.precision = {precision}: {fix}")
        if self.experiment.samples_ahead:
            at_once = self.experiment.policy.layout.world_size + self._num_engines
        return self.hardware.shared_by(at_once, threads).in_precision(precision)

    @property
    def replicas(self) -> int:
        generation = self.experiment.generation
        if not generation.has_engines:
            return self.experiment.policy.layout.data_parallel_size
        return generation.max_replicas or generation.replicas

    @property
    def devices(self) -> int:
        """Of the policy and of engines with their own."""
        generation, own = self.experiment.generation, 0
        samples = isinstance(self.experiment.algorithm, OnlineBase)
        if samples and not generation.takes_turns:
            own = self.replicas * generation.ranks_per_replica
        return self.experiment.policy.layout.world_size + own

    @cached_property
    def generation_cost(self) -> Cost:
        """The samples of a step."""
        algorithm = self.experiment.algorithm
        if not isinstance(algorithm, OnlineBase):
            return Cost()
        group, total = algorithm.num_generations_per_prompt, algorithm.trajectories_per_step
        samples = math.ceil(total * algorithm.oversampling / self.replicas)
        ahead = max(1, algorithm.max_staleness)
        return self.engine.batch(ahead * samples, group, self.lengths, ahead * total) * (1 / ahead)

    @cached_property
    def refit_cost(self) -> Cost:
        """The weights from the policy to the engines: what a device receives, or sends if that is more."""
        generation, world = self.experiment.generation, self.experiment.policy.layout.world_size
        if not isinstance(self.experiment.algorithm, OnlineBase) or not generation.has_engines:
            return Cost()
        weights, ranks = self.engine.weights, self.engine.tensor * self.engine.stages
        moved = max(weights / ranks, weights * self.replicas / world)
        if self.attained.gathers_weights:
            moved = weights
        rate = self.hardware.link_rate(self.devices) * self.attained.refit
        return Cost(
            link=moved / rate,
            latency=self.attained.far_message * self.shape.num_layers + self.attained.refit_call,
        )

    def step(self) -> StepTime:
        algorithm, training = self.experiment.algorithm, self.training
        sequences, updates = algorithm.sequences_per_update, 1
        total = sequences
        if isinstance(algorithm, OnlineBase):
            total = algorithm.trajectories_per_step
            updates = getattr(algorithm, "updates_per_step", 1)
        call = Cost(latency=self.attained.call)
        one = training.logprobs(total) + call
        passes = {
            "logprobs": one * bool(getattr(algorithm, "needs_old_logprobs", False)),
            "reference": one * bool(algorithm.keeps_reference),
            "training": (training.update(sequences) + call) * updates,
        }
        stages = {"generation": self.generation_cost, **passes, "refit": self.refit_cost}
        stages |= {"offload": training.offload, "other": Cost(latency=self.attained.step)}
        stages = {name: cost for name, cost in stages.items() if cost.seconds > 0}
        seconds, idle = self._overlapped(stages)
        epochs = getattr(algorithm, "num_epochs", 1)
        device = self._policy_device
        peak = device.operations_fp8 if self.experiment.policy.fp8 else device.operations
        work, world = training.operations(total) * epochs, self.experiment.policy.layout.world_size
        return StepTime(
            stages=stages,
            seconds=seconds,
            idle=idle,
            devices=self.devices,
            trained_tokens=total * self.lengths.sequence,
            training_utilization=work / (stages["training"].seconds * world * peak),
            utilization=work / (seconds * self.devices * peak),
        )

    def _overlapped(self, stages: Mapping[str, Cost]) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and the share of it in which each group of processes waits."""
        of = {name: cost.seconds for name, cost in stages.items()}
        generation, refit = of.get("generation", 0.0), of.get("refit", 0.0)
        policy = sum(of.values()) - generation - refit - of.get("other", 0.0)
        other = of.get("other", 0.0)
        if self.experiment.samples_ahead:
            seconds = max(generation, policy + other) + refit
        else:
            seconds = generation + policy + other + refit
        if self.devices == self.experiment.policy.layout.world_size:
            return seconds, {"all devices": 1 - (generation + policy + refit) / seconds}
        shares = {"policy": policy + refit, "generation": generation + refit}
        return seconds, {group: 1 - busy / seconds for group, busy in shares.items()}


@dataclass(frozen=True)
class Measured:
    """A step that was measured, and the plan of it by given constants."""

    seconds: float
    predicted: Callable[[Attained], float]  # seconds


# What `fit` changes, each by at most this factor, as far as measured steps outweigh the values in `Attained`.
FITTED = ("matmul", "memory", "launch", "expert_launch", "decode_layer", "sequence", "step", "refit")
SHARES = ("matmul", "attention", "memory", "link", "refit")  # at most 1
_MAX_FACTOR = 8.0
_PULL = 0.02  # of a squared logarithm of a constant's factor, next to that of a step's error


def fit(measured: Sequence[Measured], start: Attained, names: Sequence[str] = FITTED) -> Attained:
    """Constants with the least squared logarithms of predicted by measured seconds.

    Coordinate descent over factors of `start`, which a small penalty keeps near where steps do not say more.
    """
    factors = dict.fromkeys(names, 0.0)  # logarithms
    limit = math.log(_MAX_FACTOR)

    def constants(changed: Mapping[str, float]) -> Attained:
        values = {name: getattr(start, name) * math.exp(value) for name, value in changed.items()}
        return replace(start, **{name: min(v, 1.0) if name in SHARES else v for name, v in values.items()})

    def loss(changed: Mapping[str, float]) -> float:
        attained = constants(changed)
        errors = (math.log(one.predicted(attained) / one.seconds) for one in measured)
        return sum(error**2 for error in errors) + _PULL * sum(value**2 for value in changed.values())

    best, stride = loss(factors), 0.4
    while stride > 0.04:
        improved = False
        for name, change in _moves(names, stride):
            value = min(limit, max(-limit, factors[name] + change))
            trial = factors | {name: value}
            if (at := loss(trial)) < best - 1e-9:
                factors, best, improved = trial, at, True
        stride = stride if improved else stride / 2
    return constants(factors)


def _moves(names: Sequence[str], stride: float) -> Iterator[tuple[str, float]]:
    for name in names:
        yield name, stride
        yield name, -stride
