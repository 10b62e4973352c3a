"""The optimizer of a policy: Megatron's distributed one, a schedule and the guard against NaN."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor

from nemorl.config.policy import AdamConfig, MuonConfig, PolicyConfig, SgdConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.layout import chunk_prefix, policy_rank
from nemorl.models.megatron_names import local_name

from .checkpoint_files import WEIGHT, Shard, UnfitCheckpoint
from .device import DTYPES, DeviceKind, building
from .learning_rate import learning_rate
from .muon import Muon, group_of, matrices

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
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class _MainShard:
    """The elements of one parameter that this rank updates."""

    start: int  # the first of them in the local parameter
    weight: Tensor  # float32
    optimizer: torch.optim.Optimizer  # that updates it
    is_first: bool = True  # of the data-parallel ranks that update the same elements

    def has(self, name: str) -> bool:
        """Whether it has a state of this name."""
        return name == WEIGHT or name in self.optimizer.state[self.weight]

    def state(self, name: str) -> Tensor:
        """The float32 weight or one of the optimizer's own tensors, in one dimension."""
        return (self.weight if name == WEIGHT else self.optimizer.state[self.weight][name]).view(-1)


class PolicyOptimizer:
    """Steps Megatron's optimizer unless the gradients are not finite."""

    def __init__(
        self,
        config: PolicyConfig,
        chunks: Sequence[DistributedDataParallel],
        device: DeviceKind,
        trained: TrainedWeights,
    ) -> None:
        self._config = config
        self._weights = trained
        self._chunks = chunks
        with building(device):
            megatron = _megatron_config(config)
            self.megatron = get_megatron_optimizer(
                megatron,
                list(chunks),
                config_overrides=_group_overrides(config, megatron),
                use_gloo_process_groups=False,
            )
        if isinstance(config.optimizer, SgdConfig):
            self._replace_by_sgd(config.optimizer)
        self.progress = OptimizerProgress()
        parameters = {
            chunk_prefix(number) + local_name(name): parameter
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.module.named_parameters()
            if parameter.requires_grad
        }
        self.trained = frozenset(parameters)
        if isinstance(config.optimizer, MuonConfig):
            self._main = self._replace_by_muon(config.optimizer, parameters)
        else:
            self._main = self._main_shards(parameters)
        for distributed in self._distributed:
            self._prepare_groups(distributed.optimizer)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """One update from the gradients in the model's buffers.

        A non-finite norm leaves weights and optimizer state untouched; the norm is global, so all ranks
        agree. Raises `TooManySkippedSteps` after more than `policy.max_skipped_steps` of these in a row.
        """
        lr = learning_rate(self.progress.updates + 1, self._config.optimizer.lr, self._config.schedule)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            self._skip(norm)
            return StepResult(norm, lr, skipped=True)
        if self._config.max_grad_norm is not None and norm > self._config.max_grad_norm:
            shards = [part.weight for part in self._main.values()]
            torch.nn.utils.clip_grads_with_norm_(shards, self._config.max_grad_norm, torch.tensor(norm))
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self.megatron.step_with_ready_grads()
        self.progress.updates += 1
        self.progress.skipped_in_a_row = 0
        return StepResult(norm, lr, skipped=False)

    def weights_changed(self) -> None:
        """Take the model's weights as the new float32 weights, after loading them from outside."""
        self.megatron.reload_model_params()

    @property
    def state_names(self) -> tuple[str, ...]:
        """The float32 weights and the optimizer's own tensors, as a checkpoint names them."""
        return (WEIGHT, *self._moments())

    def shards(self, state: str) -> dict[str, Shard]:
        """What this rank updates of one state, by parameter; the tensors themselves."""
        return {
            name: Shard(part.start, part.state(state)) for name, part in self._main.items() if part.has(state)
        }

    def saves(self, name: str) -> bool:
        """Whether this rank's shards of a parameter go into a checkpoint, not those of a copy of it."""
        return self._main[name].is_first

    def states_of(self, name: str) -> tuple[str, ...]:
        """The states of which this rank has a part, for one parameter; the weights in any case."""
        part = self._main.get(name)
        return tuple(state for state in self.state_names if state == WEIGHT or (part and part.has(state)))

    def set_shard(self, name: str, state: str, values: Tensor) -> None:
        """Take this rank's part of a state from the whole local parameter [its elements]."""
        if name in self._main:
            part = self._main[name]
            shard = part.state(state)
            shard.copy_(values[part.start : part.start + shard.numel()])

    def check_state_names(self, saved: tuple[str, ...], where: Path) -> None:
        """Raise `UnfitCheckpoint` unless these are the states of this optimizer."""
        if saved != self.state_names:
            raise UnfitCheckpoint(
                f"{where} holds the optimizer states {', '.join(saved)}; policy.optimizer "
                f"{self._config.optimizer.name!r} wants {', '.join(self.state_names)}: resume with the "
                "optimizer the run began with"
            )

    def resume(self, progress: OptimizerProgress) -> None:
        """Go on from here, after the shards were set."""
        self.progress = progress
        for optimizer in (distributed.optimizer for distributed in self._distributed):
            if isinstance(optimizer, torch.optim.AdamW):
                for state in optimizer.state.values():
                    state["step"].fill_(progress.updates)
            else:
                # Transformer Engine's and apex's Adam count by group; SGD does not count.
                for group in optimizer.param_groups:
                    group["step"] = progress.updates

    @property
    def _distributed(self) -> list[Any]:
        """Megatron's: one for the ordinary parameters and, where there are any, one for the experts."""
        return list(self.megatron.chained_optimizers)

    def _moments(self) -> tuple[str, ...]:
        optimizer = self._config.optimizer
        if isinstance(optimizer, AdamConfig):
            return ("exp_avg", "exp_avg_sq")
        if isinstance(optimizer, MuonConfig):
            return ("momentum_buffer", "exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if optimizer.momentum else ()

    def _replace_by_sgd(self, config: SgdConfig) -> None:
        """Megatron's distributed optimizer takes only Adam because its checkpoints know no other; ours do."""
        for distributed in self._distributed:
            sgd = torch.optim.SGD([torch.zeros(())], config.lr, momentum=config.momentum)
            # Assigned, as Megatron does: in float32 the shards are views of the weights, which torch takes
            # for non-leaves.
            sgd.param_groups = [{**group, **sgd.defaults} for group in distributed.optimizer.param_groups]
            distributed.optimizer = sgd

    def _replace_by_muon(self, config: MuonConfig, parameters: Mapping[str, Tensor]) -> dict[str, _MainShard]:
        """In place of the AdamW in Megatron's ordinary optimizers, which keep parameters whole."""
        place = policy_rank(self._config.layout, dist.get_rank())
        found = {e: matrices(self._weights, place, of_experts=e) for e in (False, True)}
        shards = {}
        for whole in self._distributed:
            mains = {main for group in whole.optimizer.param_groups for main in group["params"]}
            theirs = {
                name: (main, not getattr(parameter, "allreduce", True))
                for name, parameter in parameters.items()
                if (main := getattr(parameter, "main_param", parameter)) in mains
            }
            muon = Muon(
                config,
                {main: found[e][name] for name, (main, e) in theirs.items() if name in found[e]},
                {main: group_of(e) for main, e in theirs.values()},
            )
            muon.param_groups = [{**group, **muon.defaults} for group in whole.optimizer.param_groups]
            whole.optimizer = muon
            for name, (main, is_expert) in theirs.items():
                shards[name] = _MainShard(0, main, muon, _data_parallel_rank(is_expert) == 0)
        return shards

    def _prepare_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the weight decays and allocate the moments, into which a checkpoint can then be read."""
        is_torch_adam = isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            # 0 for norms and biases, else 1; Megatron leaves multiplying to whoever schedules.
            group["weight_decay"] = self._config.optimizer.weight_decay * group["wd_mult"]
            if is_torch_adam:
                # One pass over memory instead of about ten; a CPU feels it most.
                group["fused"], group["foreach"] = True, False
            for main in group["params"]:
                state = optimizer.state[main]
                if is_torch_adam:
                    state["step"] = torch.zeros((), device=main.device)
                moments = optimizer.moments(main) if isinstance(optimizer, Muon) else self._moments()
                for moment in moments:
                    state[moment] = torch.zeros_like(main)

    def _main_shards(self, parameters: Mapping[str, Tensor]) -> dict[str, _MainShard]:
        found = {}
        for distributed in self._distributed:
            for name, parameter in parameters.items():
                if parameter in distributed.model_param_gbuf_map:
                    group, order = distributed.model_param_group_index_map[parameter]
                    start = distributed._get_model_param_range_map(parameter)["param"].start
                    optimizer = distributed.optimizer
                    found[name] = _MainShard(start, optimizer.param_groups[group]["params"][order], optimizer)
        return found

    def _skip(self, norm: float) -> None:
        self.progress.skipped_in_a_row += 1
        logger.warning(
            "optimizer step skipped: the gradient norm is %s (%d in a row, policy.max_skipped_steps is %d)",
            norm,
            self.progress.skipped_in_a_row,
            self._config.max_skipped_steps,
        )
        if self.progress.skipped_in_a_row > self._config.max_skipped_steps:
            raise TooManySkippedSteps(
                f"the gradient norm was not finite in {self.progress.skipped_in_a_row} optimizer steps in a "
                f"row (policy.max_skipped_steps is {self._config.max_skipped_steps}): lower "
                "policy.optimizer.lr, or look at the rewards and logprobs of these steps for infinities"
            )


def _data_parallel_rank(is_expert: bool) -> int:
    """Among the ranks that hold the same parameters."""
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank()  # type: ignore[no-any-return]
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)  # type: ignore[no-any-return]


def _group_overrides(
    config: PolicyConfig, megatron: MegatronOptimizerConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own (no weight decay for norms and biases), and none for routers that stay as they are."""
    overrides: dict[ParamKey, ParamGroupOverride] = get_standard_config_overrides(megatron)
    if config.moe.freeze_router:
        overrides[ParamKey(name="*.router.weight")] = ParamGroupOverride(wd_mult=0.0)
    return overrides


def _megatron_config(config: PolicyConfig) -> MegatronOptimizerConfig:
    optimizer = config.optimizer
    adam = optimizer if isinstance(optimizer, AdamConfig) else AdamConfig()
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        bf16=config.precision == "bfloat16",
        params_dtype=DTYPES[config.precision],
        use_distributed_optimizer=not isinstance(optimizer, MuonConfig),
        clip_grad=0.0,  # clipped by `PolicyOptimizer`, after the norm was found finite
    )
