"""Training state of a policy on its device: the optimizer step, offloading, and the reference weights."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from torch import Tensor, UntypedStorage

from nemorl.config.policy import OffloadConfig, PolicyConfig, ScheduleConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.layout import chunk_of, chunk_prefix

from .checkpoint_files import WEIGHT, Shard
from .device import DeviceKind, finish_copies, host_buffer, release_memory
from .guards import History, UpdateGuards
from .inner_optimizer import build_optimizer
from .model import PolicyParallel, local_name
from .mtp import PREFIX as MTP_PREFIX

logger = logging.getLogger(__name__)


def learning_rate(update: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of the `update`-th optimizer step, counted from 1; warm-up reaches the peak at `warmup_steps`."""
    update += schedule.first_step - 1
    if schedule.warmup_steps and update <= schedule.warmup_steps:
        start = schedule.warmup_start
        return peak * (start + (1 - start) * update / schedule.warmup_steps)
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return max(schedule.min_lr, peak * math.sqrt(schedule.warmup_steps / update))
    if update >= schedule.decay_steps:
        return schedule.min_lr
    start = schedule.warmup_steps + schedule.stable_steps
    done = max(0, update - start) / (schedule.decay_steps - start)
    left = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.min_lr + left * (peak - schedule.min_lr)


@dataclass(frozen=True)
class StepResult:
    grad_norm: float  # before clipping, over all parameters but those that are clipped apart
    lr: float  # the rate of this step
    skipped: bool = False  # by a guard, so nothing was changed
    empty: bool = False  # the norm was 0, so nothing was changed
    guards: dict[str, bool] = field(default_factory=dict)  # of `Verdict`
    skip_reason: str = ""
    skipped_in_a_row: int = 0
    mtp: dict[str, float] = field(default_factory=dict)  # metrics of what is clipped apart, if anything is


@dataclass
class OptimizerProgress:
    """State of the schedule and of the guards; part of a checkpoint."""

    updates: int = 0  # optimizer steps that changed the weights
    skipped_in_a_row: int = 0
    accepted: History = field(default_factory=dict)  # of the newest of these; never changed in place


class PolicyOptimizer:
    """Steps Megatron's optimizer unless a guard skips the step, or the gradients are all 0."""

    def __init__(
        self, config: PolicyConfig, chunks: list[PolicyParallel], device: DeviceKind, trained: TrainedWeights
    ) -> None:
        self._config, self._chunks = config, chunks
        self.name = config.optimizer.name
        self.progress = OptimizerProgress()
        self._guards = UpdateGuards(config.guards)
        # The float32 weights and the optimizer's own tensors, as a checkpoint names them.
        self.state_names = (WEIGHT, *config.optimizer.moments)
        parameters = {
            chunk_prefix(number) + local_name(name): parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.module.named_parameters()
            if parameter.requires_grad
        }
        self.trained = frozenset(parameters)
        self.megatron, self._main = build_optimizer(config, chunks, device, trained, parameters)
        further = config.multi_token_prediction
        is_apart = further is not None and further.detach
        self._apart = {name for name in self._main if is_apart and chunk_of(name)[1].startswith(MTP_PREFIX)}
        self._has_apart = is_apart  # on some rank

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self, values: Mapping[str, float]) -> StepResult:
        """One update from the gradients in the model's buffers, unless their norm is 0 or a guard skips it.

        `values` of the update are equal on all ranks, as the norm is.
        """
        lr = learning_rate(self.progress.updates + 1, self._config.optimizer.lr, self._config.schedule)
        self.megatron.prepare_grads()
        norm, own_norm = self._norms()
        mtp = {"mtp/grad_norm": own_norm} if self._has_apart else {}
        progress, values = self.progress, {**values, "grad_norm": norm, **mtp}
        if norm == own_norm == 0 and all(map(math.isfinite, values.values())):
            # Momentum and weight decay would move the weights without anything to learn from.
            return StepResult(norm, lr, empty=True, skipped_in_a_row=progress.skipped_in_a_row, mtp=mtp)
        verdict = self._guards.judge(values, progress.accepted)
        if verdict.reason:
            progress.skipped_in_a_row += 1
            row, most = progress.skipped_in_a_row, self._config.max_skipped_steps
            counts = f"{row} in a row, policy.max_skipped_steps is {most}"
            logger.warning("optimizer step skipped: %s (%s)", verdict.reason, counts)
            return StepResult(
                norm,
                lr,
                skipped=True,
                guards=verdict.guards,
                skip_reason=verdict.reason,
                skipped_in_a_row=row,
                mtp=mtp,
            )
        for apart, its_norm in ((False, norm), (True, own_norm)):
            if self._config.max_grad_norm is not None and its_norm > self._config.max_grad_norm:
                coefficient = self._config.max_grad_norm / (torch.tensor(its_norm) + 1e-6)
                for name, part in self._main.items():
                    if (name in self._apart) == apart:
                        part.gradient.mul_(coefficient)
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self.megatron.step_with_ready_grads()
        progress.updates += 1
        progress.skipped_in_a_row = 0
        progress.accepted = self._guards.accept(values, progress.accepted)
        return StepResult(norm, lr, guards=verdict.guards, mtp=mtp)

    def _norms(self) -> tuple[float, float]:
        """Of the gradients that are clipped together, and of those that are clipped apart."""
        if not self._has_apart:
            return float(self.megatron.get_grad_norm()), 0.0
        squares = [0.0, 0.0]
        for one in self.megatron.chained_optimizers:  # of ordinary parameters, and of experts
            apart = {p.gradient.data_ptr() for name, p in self._main.items() if name in self._apart}
            counted = one.get_main_grads_for_grad_norm()  # once over all ranks
            for place in (0, 1):
                grads = [grad for grad in counted if (grad.data_ptr() in apart) == bool(place)]
                group = one.get_grad_stats_parallel_group()
                squares[place] += float(get_grad_norm_fp32(grads, grad_stats_parallel_group=group)) ** 2
        return math.sqrt(squares[0]), math.sqrt(squares[1])

    def weights_changed(self) -> None:
        """Take the model's weights as the new float32 weights, after loading them from outside."""
        self.megatron.reload_model_params()
        for part in self._main.values():
            part.take_weight()

    def shards(self, state: str) -> dict[str, Shard]:
        """This rank's shards of one state, by parameter; the tensors themselves if they are float32."""
        held = {name: part for name, part in self._main.items() if part.has(state)}
        return {name: Shard(part.start, part.state(state), part.is_first) for name, part in held.items()}

    def device_tensors(self) -> Iterator[Tensor]:
        """All state tensors that this rank holds on its device, as they are stored."""
        return (t for part in self._main.values() for t in part.device_tensors(self.state_names))

    def states_of(self, name: str) -> tuple[str, ...]:
        """The states of which this rank has a part, for one parameter; the weights in any case."""
        part = self._main.get(name)
        return tuple(state for state in self.state_names if state == WEIGHT or (part and part.has(state)))

    def set_shard(self, name: str, state: str, values: Tensor) -> None:
        """Take this rank's part of a state from the whole local parameter [its elements]."""
        if name in self._main:
            part = self._main[name]
            part.set_state(state, values[part.start : part.start + part.param.numel()])

    def resume(self, progress: OptimizerProgress) -> None:
        self.progress = progress
        for optimizer in (one.optimizer for one in self.megatron.chained_optimizers):
            if isinstance(optimizer, torch.optim.AdamW):
                for state in optimizer.state.values():
                    state["step"].fill_(progress.updates)
            else:
                # Transformer Engine's, apex's and our own count by group; SGD does not count.
                for group in optimizer.param_groups:
                    group["step"] = progress.updates


class Offload:
    """Moves storages off the device and back, to the bit: all parameters and gradients are views of a few."""

    def __init__(self, kind: DeviceKind, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._moved: list[tuple[UntypedStorage, Tensor]] = []  # with the copy of its bytes
        self._freed: list[tuple[UntypedStorage, int]] = []  # with its size in bytes

    def require_back(self) -> None:
        """Raise RuntimeError while something is away: reading it would read memory that is not there."""
        if self._moved or self._freed:
            raise RuntimeError("the policy has left its device to generation: call onload first")

    def out(
        self,
        chunks: list[PolicyParallel],
        optimizer: PolicyOptimizer | None,
        reference: Iterable[Tensor],
        config: OffloadConfig,
    ) -> int:
        """Move what `config` says, and free gradients with the optimizer's state; returns the bytes freed."""
        self.require_back()
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        modules = [chunk.module for chunk in chunks]
        tensors = chain(*(m.parameters() for m in modules), *(m.buffers() for m in modules))
        weights = self._storages([*tensors, *(buffer.param_data for buffer in buffers), *reference])
        moving = list(weights.values()) if config.weights else []
        if config.optimizer:
            states = self._storages(optimizer.device_tensors() if optimizer else ())
            moving += [storage for address, storage in states.items() if address not in weights]
            for storage in self._storages(buffer.grad_data for buffer in buffers).values():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)
        num_bytes = sum(storage.nbytes() for storage in moving) + sum(size for _, size in self._freed)
        for storage in moving:
            original = _bytes(storage)
            copy = host_buffer(self._kind, original).copy_(original, non_blocking=True)
            finish_copies(self._kind)
            self._moved.append((storage, copy))
            storage.resize_(0)
        release_memory(self._kind)
        return num_bytes

    def back(self) -> None:
        """Bring everything back; gradients are zero."""
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
            _bytes(storage).zero_()
        for storage, copy in self._moved:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        finish_copies(self._kind)
        self._freed, self._moved = [], []

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
        """Storages on the policy's device by address, each once."""
        storages = (t.untyped_storage() for t in tensors if t.device == self._device)
        return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ReferenceWeights:
    """A frozen copy of a model's local parameters that can take their place for a forward pass."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._copies = [(p, p.detach().clone()) for module in modules for p in module.parameters()]

    def tensors(self) -> list[Tensor]:
        return [copy for _, copy in self._copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference weights; nothing is copied."""
        current = [p.data for p, _ in self._copies]
        for parameter, copy in self._copies:
            parameter.data = copy
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._copies, current, strict=True):
                parameter.data = data
