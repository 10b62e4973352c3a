"""Megatron's optimizer of a policy, and the inner one that it steps.

| `policy.optimizer` | inner optimizer | of |
|---|---|---|
| `adam` | Transformer Engine's, apex's or torch's AdamW, as Megatron finds them | a rank's float32 shards |
| `adam` with types other than float32 | Transformer Engine's | a rank's shards of the model's weights |
| `adam` with `on_host` | `HostAdam` | a rank's shards of the model's weights |
| `sgd` | torch's | a rank's float32 shards |
| `muon` | `Muon` | whole float32 parameters |
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, assert_never

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor
from torch.optim.adamw import adamw

from nemorl.config.policy import AdamConfig, MuonConfig, PolicyConfig, SgdConfig
from nemorl.device import approximation_dtype
from nemorl.models.adapters import TrainedWeights
from nemorl.models.layout import PolicyRank, policy_rank
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .checkpoint_files import WEIGHT
from .device import DTYPES, DeviceKind, building, finish_copies, host_buffer


class HostAdam(torch.optim.Optimizer):
    """AdamW that keeps float32 weights and moments in host memory and takes the step on the CPU.

    The gradient comes down and the weight goes up by way of two pinned buffers as large as the largest
    parameter; the states are ordinary memory, as torch rounds pinned memory up to powers of two. Megatron's
    HybridDeviceOptimizer would keep a float32 copy of the weights on the device too. `param_groups` are
    assigned by the caller, and every parameter is allocated before the first step.
    """

    def __init__(self, config: AdamConfig, kind: DeviceKind) -> None:
        super().__init__([torch.zeros(())], {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._config, self._kind = config, kind
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


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_RMS = 0.2  # of an update of AdamW, as a rule
_NO_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz: a matrix [rows, columns] with its singular values brought near 1 (0.7 to 1.2).

    On a GPU in bfloat16, as the original; not run on hardware.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if is_tall else matrix
    x = (x / (x.norm() + 1e-7)).to(approximation_dtype(matrix.device))
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrix.dtype)


@dataclass(frozen=True)
class Matrix:
    """An HF matrix, or one expert's part of an HF tensor, and what of it this rank holds."""

    boxes: tuple[TensorSlice, ...]
    start: tuple[int, ...]  # in the HF tensor
    size: tuple[int, ...]  # with the extents of 1 that do not count
    is_shared: bool  # by several tensor-parallel ranks

    def gather(self, param: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole matrix [rows, columns] from the parts that the ranks of a group have in `param`."""
        whole = param.new_zeros(self.size)
        for box in self.boxes:
            whole[self._within(box)] = local_view({box.param: param}, box)
        if self.is_shared:
            dist.all_reduce(whole, group=group)
        return whole.view([extent for extent in self.size if extent > 1])

    def scatter(self, whole: Tensor, param: Tensor) -> None:
        whole = whole.reshape(self.size)
        for box in self.boxes:
            local_view({box.param: param}, box).copy_(whole[self._within(box)])

    def _within(self, box: TensorSlice) -> tuple[slice, ...]:
        return tuple(slice(b - s, b - s + n) for b, s, n in zip(box.start, self.start, box.size, strict=True))


def matrices(trained: TrainedWeights, place: PolicyRank, *, of_experts: bool) -> dict[str, list[Matrix]]:
    """The matrices in each parameter of a rank, its experts' or the others, as its group shares them."""
    layout = place.layout
    if of_experts:
        group = [replace(place, etp_rank=n) for n in range(layout.expert_tensor_parallel_size)]
    else:
        group = [replace(place, tp_rank=n) for n in range(layout.tensor_parallel_size)]
    together: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
    for part in chain(*map(trained.slices, group)):
        together[part.param, part.name].append(part)
    own: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
    for part in trained.slices(place):
        own[part.param, part.name].append(part)
    found: dict[str, list[Matrix]] = defaultdict(list)
    for (param, name), boxes in own.items():
        parts = together[param, name]
        axes = range(len(parts[0].shape))
        start = tuple(min(part.start[axis] for part in parts) for axis in axes)
        end = tuple(max(part.start[axis] + part.size[axis] for part in parts) for axis in axes)
        extents = tuple(e - s for s, e in zip(start, end, strict=True))
        if sum(extent > 1 for extent in extents) == 2 and not param.endswith(_NO_MATRICES):
            is_shared = set(parts) != set(boxes)
            found[param].append(Matrix(tuple(boxes), start, extents, is_shared))
    return found


class Muon(torch.optim.Optimizer):
    """Moves matrices by their orthogonalized momentum, and all else as AdamW does.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of a step is
    matched to AdamW's (Liu et al. 2025, arXiv 2502.16982), so that both share one rate and weight decay.

    A matrix is one of the Hugging Face checkpoint, so every layout takes the same step: those that Megatron
    fuses (q, k and v; gate and up) are orthogonalized apart, and one that tensor parallelism divides is put
    together first. `param_groups` are assigned by the caller; `state` has the moments before the first step.
    """

    def __init__(
        self, config: MuonConfig, matrices_of: Mapping[Tensor, Sequence[Matrix]], groups: Mapping[Tensor, Any]
    ) -> None:
        """`groups` gives each parameter with matrices the group of ranks that share them."""
        super().__init__([torch.zeros(())], {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._config, self._matrices, self._groups = config, matrices_of, groups

    def moments(self, param: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if param in self._matrices else ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from `grad`; all ranks of a tensor-parallel group take it together."""
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
                move = self._move_matrices if param in self._matrices else self._move_as_adam
                move(param, group["lr"], group["step"])

    def _move_matrices(self, param: Tensor, lr: float, step: int) -> None:
        gradient: Any = param.grad
        momentum = self.state[param]["momentum_buffer"].lerp_(gradient, 1 - self._config.momentum)
        ahead = gradient.lerp(momentum, self._config.momentum)  # Nesterov's
        update = torch.zeros_like(param)
        for matrix in self._matrices[param]:
            direction = orthogonalize(matrix.gather(ahead, self._groups[param]), self._config.iterations)
            matrix.scatter(direction * _ADAMW_RMS * max(direction.shape) ** 0.5, update)
        param.sub_(update, alpha=lr)

    def _move_as_adam(self, param: Tensor, lr: float, step: int) -> None:
        config, state = self._config, self.state[param]
        first = state["exp_avg"].lerp_(param.grad, 1 - config.beta1)
        second = state["exp_avg_sq"].mul_(config.beta2)
        second.addcmul_(param.grad, param.grad, value=1 - config.beta2)
        root = (second / (1 - config.beta2**step)).sqrt_().add_(config.eps)
        param.addcdiv_(first, root, value=-lr / (1 - config.beta1**step))


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
        """The gradient of this step, set by `prepare_grads` of Megatron's optimizer."""
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


_TYPES = {**DTYPES, "float16": torch.float16, "fp8": torch.uint8}  # as Transformer Engine's Adam takes them


def norm_of_all(_chunk: int, _flag: Tensor, tensors: Sequence[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """L2 norm [1] of all gradients in `tensors[0]`, by the signature of `amp_C.multi_tensor_l2norm`.

    It equals Megatron's `local_multi_tensor_l2_norm`, in which the host waits for the norm of each gradient.
    """
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors[0])])
    return torch.linalg.vector_norm(norms).reshape(1), None


if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # no kernel library is installed
    clip_grads.l2_norm_impl = norm_of_all


def build_optimizer(
    config: PolicyConfig,
    chunks: Sequence[DistributedDataParallel],
    device: DeviceKind,
    trained: TrainedWeights,
    parameters: Mapping[str, Tensor],
) -> tuple[Any, dict[str, MainShard]]:
    """Megatron's optimizer of `parameters`, its moments allocated, and what this rank updates of each."""
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
    # Megatron then leaves the float32 weights to the inner optimizer, which it gives `decoupled_grad`.
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
            rank = policy_rank(config.layout, dist.get_rank())
            shards |= _replace_by_muon(optimizer, rank, part, trained, parameters)
        else:
            shards |= _replace_inner(config, optimizer, part, device, parameters)
        inner = part.optimizer
        is_torch_adam = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]  # 0 for norms and biases
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
    config: PolicyConfig,
    optimizer: AdamConfig | SgdConfig,
    distributed: Any,
    device: DeviceKind,
    parameters: Mapping[str, Tensor],
) -> dict[str, MainShard]:
    """Replace the Adam of Megatron's distributed optimizer, whose checkpoints support no other; ours do."""
    inner: torch.optim.Optimizer | None = None
    match optimizer:
        case SgdConfig():
            inner = torch.optim.SGD([torch.zeros(())], optimizer.lr, momentum=optimizer.momentum)
        case AdamConfig():
            inner = HostAdam(optimizer, device) if optimizer.on_host else None
        case _:
            assert_never(optimizer)  # construct its inner optimizer above, or Adam would train with it
    if inner is not None:
        # Assigned, as Megatron does: in float32 the shards are views of the weights, for torch non-leaves.
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
    config: MuonConfig, rank: PolicyRank, part: Any, trained: TrainedWeights, parameters: Mapping[str, Tensor]
) -> dict[str, MainShard]:
    """Replace the AdamW in an ordinary optimizer of Megatron's, which keeps parameters whole."""
    mains = {main for group in part.optimizer.param_groups for main in group["params"]}
    theirs = {
        name: (main, not getattr(parameter, "allreduce", True))
        for name, parameter in parameters.items()
        if (main := getattr(parameter, "main_param", parameter)) in mains
    }
    found = {e: matrices(trained, rank, of_experts=e) for e in {e for _, e in theirs.values()}}
    with_matrices = {main: found[e][name] for name, (main, e) in theirs.items() if name in found[e]}
    tensor_parallel = parallel_state.get_tensor_model_parallel_group()
    of_experts = parallel_state.get_expert_tensor_parallel_group()
    groups = {main: of_experts if is_expert else tensor_parallel for main, is_expert in theirs.values()}
    muon = Muon(config, with_matrices, groups)
    muon.param_groups = [{**group, **muon.defaults} for group in part.optimizer.param_groups]
    part.optimizer = muon
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    copy_of_experts = parallel_state.get_expert_data_parallel_rank()
    return {
        name: MainShard(0, main, muon, is_first=(copy_of_experts if is_expert else copy) == 0)
        for name, (main, is_expert) in theirs.items()
    }
