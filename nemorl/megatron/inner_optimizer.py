"""Megatron's optimizer of a policy, and the inner one that it steps.

| `policy.optimizer` | inner optimizer | of |
|---|---|---|
| `adam` | Transformer Engine's, apex's or torch's AdamW, as Megatron finds them | a rank's float32 shards |
| `adam` with types other than float32 | Transformer Engine's | a rank's shards of the model's weights |
| `adam` with `on_host` | `HostAdam` | a rank's shards of the model's weights |
| `sgd` | torch's | a rank's float32 shards |
| `muon` | `Muon` | whole float32 parameters |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from torch.optim.adamw import adamw

from nemorl.config.policy import AdamConfig, MuonConfig, PolicyConfig, SgdConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.layout import policy_rank

from .checkpoint_files import WEIGHT
from .device import DTYPES, DeviceKind, building, finish_copies, host_buffer
from .muon import Muon, group_of, matrices


class HostAdam(torch.optim.Optimizer):
    """AdamW that keeps float32 weights and moments in host memory and takes the step on the CPU.

    Parameter by parameter the gradient comes down, torch's fused AdamW goes over it, and the weight goes up
    in the model's precision, by way of two pinned buffers as large as the largest parameter; the states are
    ordinary memory, as torch rounds pinned memory up to powers of two. Megatron's HybridDeviceOptimizer would
    keep a float32 copy of the weights on the device too.

    `param_groups` are assigned by the caller, and every parameter is allocated before the first step.
    """

    def __init__(self, config: AdamConfig, kind: DeviceKind) -> None:
        super().__init__([torch.zeros(())], {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._config = config
        self._kind: DeviceKind = kind
        # Of one parameter, on the way from and to a GPU.
        self._gradient, self._weight = torch.empty(0), torch.empty(0)

    def allocate(self, param: Tensor) -> None:
        """Allocate the state of a parameter: its present weight, and moments of zero."""
        weight = torch.empty(param.shape).copy_(param.detach())
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        self.state[param] = {WEIGHT: weight, **moments}
        if self._kind != "cpu" and param.numel() > self._gradient.numel():
            self._gradient, self._weight = (host_buffer(self._kind, like) for like in (weight, param))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from `decoupled_grad`, where Megatron puts gradients of a type of their own."""
        on_cpu = self._kind == "cpu"
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                state, gradient = self.state[param], param.decoupled_grad
                weight = state[WEIGHT]
                if not on_cpu:
                    gradient = self._gradient[: gradient.numel()].copy_(gradient, non_blocking=True)
                    finish_copies(self._kind)  # the weight before it has then gone up as well
                steps = torch.tensor(float(group["step"] - 1))  # it counts this step itself
                adamw(
                    *([weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [steps]),
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                    beta1=self._config.beta1,
                    beta2=self._config.beta2,
                    eps=self._config.eps,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                )
                if not on_cpu:  # rounded here, so that half the bytes go up
                    weight = self._weight[: weight.numel()].copy_(weight)
                param.copy_(weight, non_blocking=not on_cpu)


_FUSED_ADAMS_NAMES = {WEIGHT: "master_param"}


@dataclass(frozen=True)
class MainShard:
    """The elements of one parameter that this rank updates; the optimizer's parameter is their weight."""

    start: int  # the first of them in the local parameter
    param: Tensor  # as the optimizer's groups have it
    optimizer: torch.optim.Optimizer  # that updates it
    is_first: bool = True  # of the data-parallel ranks that update the same elements

    @property
    def gradient(self) -> Tensor:
        """Return the gradient of this step, set by `prepare_grads` of Megatron's optimizer."""
        assert self.param.grad is not None
        return self.param.grad

    def has(self, name: str) -> bool:
        return name == WEIGHT or name in self.optimizer.state[self.param]

    def state(self, name: str) -> Tensor:
        """The float32 weight or one of the optimizer's own tensors [elements]."""
        return (self.param if name == WEIGHT else self.optimizer.state[self.param][name]).view(-1)

    def set_state(self, name: str, values: Tensor) -> None:
        self.state(name).copy_(values)

    def take_weight(self) -> None:
        """Take the model's weight; Megatron does it where the two are not one."""

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """State tensors on the policy's device, as they are stored."""
        return (self.state(name) for name in names if self.has(name))


class HeldShard(MainShard):
    """Its float32 weight is a state of the optimizer, in host memory; its parameter is the model's own."""

    @property
    def gradient(self) -> Tensor:
        # In the type of Megatron's buffers, which need not be that of the parameter.
        return self.param.decoupled_grad  # type: ignore[attr-defined, no-any-return]

    def state(self, name: str) -> Tensor:
        return self.optimizer.state[self.param][name]  # type: ignore[no-any-return]

    def take_weight(self) -> None:
        self.set_state(WEIGHT, self.param.detach().float())

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        return iter(())  # all state is in host memory


class NarrowShard(HeldShard):
    """Its states are Transformer Engine's, on the device, in types of fewer bits and with their scales."""

    optimizer: Any  # FusedAdam, of version 2.1 or newer

    def state(self, name: str) -> Tensor:
        """A copy [elements] float32 of a state, in host memory: what saves it reads all of them at a time."""
        stored = _FUSED_ADAMS_NAMES.get(name, name)
        return self.optimizer.get_unscaled_state(self.param, stored).cpu()  # type: ignore[no-any-return]

    def set_state(self, name: str, values: Tensor) -> None:
        stored = _FUSED_ADAMS_NAMES.get(name, name)
        if values.any():
            self.optimizer.set_scaled_state(self.param, stored, values.clone())  # scaled in place
        else:  # which has no scale
            self.optimizer._initialize_state(self.param, stored, zero_buffer=True)

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        states = (self.optimizer.state[self.param][_FUSED_ADAMS_NAMES.get(name, name)] for name in names)
        return (getattr(state, "_data", state) for state in states)  # of one in FP8 its bytes


# FP8 as Transformer Engine's Adam is asked for it.
_TYPES = {**DTYPES, "float16": torch.float16, "fp8": torch.uint8}


def build_optimizer(
    config: PolicyConfig,
    chunks: Sequence[DistributedDataParallel],
    device: DeviceKind,
    trained: TrainedWeights,
    parameters: Mapping[str, Tensor],
) -> tuple[Any, dict[str, MainShard]]:
    """Megatron's optimizer of `parameters`, and what this rank updates of each.

    Moments are allocated, so that a checkpoint can be read into them.
    """
    optimizer = config.optimizer
    adam = optimizer if isinstance(optimizer, AdamConfig) else AdamConfig()
    megatron = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        bf16=config.precision == "bfloat16",
        params_dtype=DTYPES[config.precision],
        use_distributed_optimizer=optimizer.is_sharded,
        clip_grad=0.0,  # clipped by `PolicyOptimizer`, after the norm was found finite
        use_precision_aware_optimizer=bool(adam.narrow_fields),
        # Remainders of bfloat16 would be combined here, by that kernel's arithmetic.
        store_param_remainders=False,
        **{name: _TYPES[getattr(adam, name)] for name in adam.narrow_fields},  # else float32
    )
    # Megatron then leaves the float32 weights to the inner optimizer, and gives it gradients of their own
    # type as `decoupled_grad`.
    megatron.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = _holds_weights(config)
    # Megatron's own overrides (no weight decay for norms and biases), and none for routers that stay.
    overrides: dict[ParamKey, ParamGroupOverride] = get_standard_config_overrides(megatron)
    if config.moe.freeze_router:
        overrides[ParamKey(name="*.router.weight")] = ParamGroupOverride(wd_mult=0.0)
    with building(device):
        whole = get_megatron_optimizer(
            megatron, list(chunks), config_overrides=overrides, use_gloo_process_groups=False
        )
    shards: dict[str, MainShard] = {}
    # One for the ordinary parameters and, where there are any, one for the experts.
    for part in whole.chained_optimizers:
        if isinstance(optimizer, MuonConfig):
            shards |= _replace_by_muon(config, optimizer, part, trained, parameters)
        else:
            shards |= _replace_inner(config, part, device, parameters)
        inner = part.optimizer
        is_torch_adam = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            # 0 for norms and biases, else 1; Megatron leaves the product to the scheduler.
            group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
            if is_torch_adam:
                # One pass over memory instead of about ten; a CPU feels it most.
                group["fused"], group["foreach"] = True, False
            for main in group["params"]:
                if isinstance(inner, HostAdam):
                    inner.allocate(main)
                elif optimizer.narrow_fields:
                    inner.initialize_state(main, store_param_remainders=False)
                else:
                    if is_torch_adam:
                        inner.state[main]["step"] = torch.zeros((), device=main.device)
                    names = inner.moments(main) if isinstance(inner, Muon) else optimizer.moments
                    inner.state[main] |= {name: torch.zeros_like(main) for name in names}
    return whole, shards


def _holds_weights(config: PolicyConfig) -> bool:
    """True if the float32 weights are a state of the inner optimizer, which updates the model's weights."""
    return bool(config.optimizer.narrow_fields) or config.optimizer.state_is_on_host


def _replace_inner(
    config: PolicyConfig, distributed: Any, device: DeviceKind, parameters: Mapping[str, Tensor]
) -> dict[str, MainShard]:
    """Replace the Adam of Megatron's distributed optimizer, whose checkpoints support no other; ours do."""
    optimizer = config.optimizer
    inner: torch.optim.Optimizer | None = None
    match optimizer:
        case SgdConfig():
            inner = torch.optim.SGD([torch.zeros(())], optimizer.lr, momentum=optimizer.momentum)
        case AdamConfig():
            inner = HostAdam(optimizer, device) if optimizer.on_host else None
        case _:  # or it would be trained by Adam
            raise AssertionError(f"{type(optimizer).__name__} has no inner optimizer: construct it here")
    if inner is not None:
        # Assigned, as Megatron does: in float32 the shards are views of the weights, which torch takes for
        # non-leaves.
        inner.param_groups = [{**group, **inner.defaults} for group in distributed.optimizer.param_groups]
        distributed.optimizer = inner
    kind = MainShard
    if _holds_weights(config):
        kind = NarrowShard if optimizer.narrow_fields else HeldShard
    shards = {}
    for name, parameter in parameters.items():
        if parameter in distributed.model_param_gbuf_map:
            group, order = distributed.model_param_group_index_map[parameter]
            start = distributed._get_model_param_range_map(parameter)["param"].start
            main = distributed.optimizer.param_groups[group]["params"][order]
            shards[name] = kind(start, main, distributed.optimizer)
    return shards


def _replace_by_muon(
    config: PolicyConfig,
    muon_config: MuonConfig,
    ordinary: Any,
    trained: TrainedWeights,
    parameters: Mapping[str, Tensor],
) -> dict[str, MainShard]:
    """Replace the AdamW in an ordinary optimizer of Megatron's, which keeps parameters whole."""
    place = policy_rank(config.layout, dist.get_rank())
    mains = {main for group in ordinary.optimizer.param_groups for main in group["params"]}
    theirs = {
        name: (main, not getattr(parameter, "allreduce", True))
        for name, parameter in parameters.items()
        if (main := getattr(parameter, "main_param", parameter)) in mains
    }
    found = {e: matrices(trained, place, of_experts=e) for e in {e for _, e in theirs.values()}}
    muon = Muon(
        muon_config,
        {main: found[e][name] for name, (main, e) in theirs.items() if name in found[e]},
        {main: group_of(e) for main, e in theirs.values()},
    )
    muon.param_groups = [{**group, **muon.defaults} for group in ordinary.optimizer.param_groups]
    ordinary.optimizer = muon
    shards = {}
    for name, (main, is_expert) in theirs.items():
        if is_expert:
            copy = parallel_state.get_expert_data_parallel_rank()
        else:
            copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        shards[name] = MainShard(0, main, muon, is_first=copy == 0)
    return shards
