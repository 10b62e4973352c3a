"""Megatron's optimizer of a policy, and the inner one that it steps.

| `policy.optimizer` | inner optimizer | of |
|---|---|---|
| `adam` | Transformer Engine's, apex's or torch's AdamW, as Megatron finds them | a rank's float32 shards |
| `adam` with types other than float32 | Transformer Engine's | a rank's shards of the model's weights |
| `adam` with `on_host` | `HostAdam` | a rank's shards of the model's weights |
| `sgd` | torch's | a rank's float32 shards |
| `muon` | `Muon` | whole float32 parameters |
"""

from collections.abc import Mapping, Sequence
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
from nemorl.models.layout import policy_rank

from .device import DTYPES, DeviceKind, building
from .host_adam import HostAdam
from .main_shards import HeldShard, MainShard, NarrowShard
from .muon import Muon, group_of, matrices

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
    with building(device):
        megatron = _megatron_config(config)
        whole = get_megatron_optimizer(
            megatron,
            list(chunks),
            config_overrides=_group_overrides(config, megatron),
            use_gloo_process_groups=False,
        )
    # One for the ordinary parameters and, where there are any, one for the experts.
    each = list(whole.chained_optimizers)
    if isinstance(config.optimizer, MuonConfig):
        shards = _replace_by_muon(config, config.optimizer, each, trained, parameters)
    else:
        for distributed in each:
            _replace_inner(config, distributed, device)
        shards = _main_shards(config, each, parameters)
    for one in each:
        _prepare_groups(config, one.optimizer)
    return whole, shards


def moments(config: PolicyConfig) -> tuple[str, ...]:
    """Names of the tensors that the inner optimizer keeps of parameters."""
    optimizer = config.optimizer
    if isinstance(optimizer, AdamConfig):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, MuonConfig):
        return ("momentum_buffer", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimizer.momentum else ()


def holds_weights(config: PolicyConfig) -> bool:
    """Whether the float32 weights are a state of the inner optimizer, which steps the model's own."""
    optimizer = config.optimizer
    return _is_narrow(config) or (isinstance(optimizer, AdamConfig) and optimizer.on_host)


def _replace_inner(config: PolicyConfig, distributed: Any, device: DeviceKind) -> None:
    """Megatron's distributed optimizer takes only Adam because its checkpoints know no other; ours do."""
    inner: torch.optim.Optimizer
    if isinstance(config.optimizer, SgdConfig):
        inner = torch.optim.SGD([torch.zeros(())], config.optimizer.lr, momentum=config.optimizer.momentum)
    elif isinstance(config.optimizer, AdamConfig) and config.optimizer.on_host:
        inner = HostAdam(config.optimizer, device)
    else:
        return
    # Assigned, as Megatron does: in float32 the shards are views of the weights, which torch takes for
    # non-leaves.
    inner.param_groups = [{**group, **inner.defaults} for group in distributed.optimizer.param_groups]
    distributed.optimizer = inner


def _replace_by_muon(
    config: PolicyConfig,
    muon_config: MuonConfig,
    optimizers: Sequence[Any],
    trained: TrainedWeights,
    parameters: Mapping[str, Tensor],
) -> dict[str, MainShard]:
    """In place of the AdamW in Megatron's ordinary optimizers, which keep parameters whole."""
    place = policy_rank(config.layout, dist.get_rank())
    found = {e: matrices(trained, place, of_experts=e) for e in (False, True)}
    shards = {}
    for whole in optimizers:
        mains = {main for group in whole.optimizer.param_groups for main in group["params"]}
        theirs = {
            name: (main, not getattr(parameter, "allreduce", True))
            for name, parameter in parameters.items()
            if (main := getattr(parameter, "main_param", parameter)) in mains
        }
        muon = Muon(
            muon_config,
            {main: found[e][name] for name, (main, e) in theirs.items() if name in found[e]},
            {main: group_of(e) for main, e in theirs.values()},
        )
        muon.param_groups = [{**group, **muon.defaults} for group in whole.optimizer.param_groups]
        whole.optimizer = muon
        for name, (main, is_expert) in theirs.items():
            shards[name] = MainShard(0, main, muon, _data_parallel_rank(is_expert) == 0)
    return shards


def _main_shards(
    config: PolicyConfig, optimizers: Sequence[Any], parameters: Mapping[str, Tensor]
) -> dict[str, MainShard]:
    kind = MainShard
    if holds_weights(config):
        kind = NarrowShard if _is_narrow(config) else HeldShard
    found = {}
    for distributed in optimizers:
        for name, parameter in parameters.items():
            if parameter in distributed.model_param_gbuf_map:
                group, order = distributed.model_param_group_index_map[parameter]
                start = distributed._get_model_param_range_map(parameter)["param"].start
                optimizer = distributed.optimizer
                found[name] = kind(start, optimizer.param_groups[group]["params"][order], optimizer)
    return found


def _is_narrow(config: PolicyConfig) -> bool:
    return isinstance(config.optimizer, AdamConfig) and bool(config.optimizer.narrow_fields)


def _prepare_groups(config: PolicyConfig, optimizer: Any) -> None:
    """Set the weight decays and allocate the moments, into which a checkpoint can then be read."""
    is_torch_adam = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        # 0 for norms and biases, else 1; Megatron leaves multiplying to whoever schedules.
        group["weight_decay"] = config.optimizer.weight_decay * group["wd_mult"]
        if is_torch_adam:
            # One pass over memory instead of about ten; a CPU feels it most.
            group["fused"], group["foreach"] = True, False
        for main in group["params"]:
            if isinstance(optimizer, HostAdam):
                optimizer.allocate(main)
                continue
            if _is_narrow(config):
                optimizer.initialize_state(main, store_param_remainders=False)
                continue
            state = optimizer.state[main]
            if is_torch_adam:
                state["step"] = torch.zeros((), device=main.device)
            names = optimizer.moments(main) if isinstance(optimizer, Muon) else moments(config)
            for name in names:
                state[name] = torch.zeros_like(main)


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
        use_distributed_optimizer=not isinstance(optimizer, MuonConfig),
        clip_grad=0.0,  # clipped by `PolicyOptimizer`, after the norm was found finite
        use_precision_aware_optimizer=bool(adam.narrow_fields),
        # Remainders beside bfloat16 would be put together here, by that kernel's arithmetic.
        store_param_remainders=False,
        exp_avg_dtype=_TYPES[adam.exp_avg_dtype],
        exp_avg_sq_dtype=_TYPES[adam.exp_avg_sq_dtype],
        main_params_dtype=_TYPES[adam.main_params_dtype],
        main_grads_dtype=_TYPES[adam.main_grads_dtype],
    )
    # Megatron then leaves the float32 weights to the inner optimizer, and gives it gradients of their own
    # type as `decoupled_grad`.
    megatron.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = holds_weights(config)
    return megatron
