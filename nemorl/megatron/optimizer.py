"""The optimizer of a policy: Megatron's distributed optimizer, a learning-rate schedule and the guard against NaN."""

import logging
import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from nemorl.config.policy import AdamConfig, ConstantSchedule, PolicyConfig, ScheduleConfig

from .device import DTYPES, DeviceKind, building

logger = logging.getLogger(__name__)


class TooManySkippedSteps(RuntimeError):
    """Gradients stayed non-finite for more optimizer steps in a row than the config allows."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks."""

    grad_norm: float  # before clipping, over all parameters
    lr: float  # the rate of this step
    skipped: bool  # the norm was not finite, so nothing was changed


@dataclass
class OptimizerProgress:
    """What the schedule and the guard remember; part of a checkpoint."""

    updates: int = 0  # optimizer steps that changed the weights
    skipped: int = 0  # optimizer steps that were skipped, ever
    skipped_in_a_row: int = 0


def learning_rate(update: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of the `update`-th optimizer step, counted from 1.

    Linear warm-up reaches the peak at step `warmup_steps`; a decay reaches `min_lr` at step `decay_steps`.
    """
    if update <= schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return peak
    if update >= schedule.decay_steps:
        return schedule.min_lr
    done = (update - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps)
    left = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.min_lr + left * (peak - schedule.min_lr)


class PolicyOptimizer:
    """Steps Megatron's optimizer unless the gradients are not finite."""

    def __init__(self, config: PolicyConfig, model: DistributedDataParallel, device: DeviceKind) -> None:
        self._config = config
        self._model = model
        with building(device):
            self.megatron = get_megatron_optimizer(
                _megatron_config(config), [model], use_gloo_process_groups=False
            )
        self.progress = OptimizerProgress()
        for group in self.megatron.param_groups:
            if isinstance(self.megatron.optimizer, torch.optim.AdamW):
                # One pass over memory instead of about ten; a CPU feels it most.
                group["fused"], group["foreach"] = True, False

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self._model.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """One update from the gradients in the model's buffers.

        A non-finite norm leaves weights and optimizer state untouched; the norm is global, so all ranks agree.
        Raises `TooManySkippedSteps` after more than `policy.max_skipped_steps` of these in a row.
        """
        lr = learning_rate(self.progress.updates + 1, self._config.optimizer.lr, self._config.schedule)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            self._skip(norm)
            return StepResult(norm, lr, skipped=True)
        if self._config.max_grad_norm is not None and norm > self._config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                self.megatron.get_parameters(), self._config.max_grad_norm, torch.tensor(norm)
            )
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self.megatron.step_with_ready_grads()
        self.progress.updates += 1
        self.progress.skipped_in_a_row = 0
        return StepResult(norm, lr, skipped=False)

    def weights_changed(self) -> None:
        """Take the model's weights as the new float32 weights, after loading them from outside."""
        self.megatron.reload_model_params()

    def _skip(self, norm: float) -> None:
        self.progress.skipped += 1
        self.progress.skipped_in_a_row += 1
        logger.warning(
            "optimizer step skipped: the gradient norm is %s (%d in a row, policy.max_skipped_steps is %d)",
            norm,
            self.progress.skipped_in_a_row,
            self._config.max_skipped_steps,
        )
        if self.progress.skipped_in_a_row > self._config.max_skipped_steps:
            raise TooManySkippedSteps(
                f"the gradient norm was not finite in {self.progress.skipped_in_a_row} optimizer steps in a row "
                f"(policy.max_skipped_steps is {self._config.max_skipped_steps}): lower policy.optimizer.lr, "
                "or look at the rewards and logprobs of these steps for infinities"
            )


def _megatron_config(config: PolicyConfig) -> MegatronOptimizerConfig:
    """Megatron leaves biases and norms (one-dimensional parameters) out of weight decay by itself."""
    optimizer = config.optimizer
    common = {
        "lr": optimizer.lr,
        "min_lr": 0.0,
        "weight_decay": optimizer.weight_decay,
        "bf16": config.precision == "bfloat16",
        "params_dtype": DTYPES[config.precision],
        "use_distributed_optimizer": True,
        "clip_grad": 0.0,  # clipped by `PolicyOptimizer`, after the norm was found finite
    }
    if isinstance(optimizer, AdamConfig):
        return MegatronOptimizerConfig(
            optimizer="adam",
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            **common,
        )
    return MegatronOptimizerConfig(optimizer="sgd", sgd_momentum=optimizer.momentum, **common)
