"""The Adam: arguments, states, types and scales are the real one's (version 2.18), the step is torch's.

Without weights of its own it steps what it is given, in float32; with them, what is in `decoupled_grad`.
"""

import torch

from tests.megatron.adam_of_stand_ins import adam_step


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    """The norm of all tensors, as a tensor of one element, and none of each."""
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in tensor_lists[0]]).norm().reshape(1), None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


class FusedSGD:
    """Megatron takes either both optimizers of the library or none."""


class Float8Tensor:
    """E4M3 bytes and a scale. The real one is a tensor."""

    dtype = torch.float32  # as which it poses

    def __init__(self, shape):
        self._data = torch.zeros(shape, dtype=torch.uint8)
        self.scale = torch.ones(1)

    def copy_(self, values):
        self._data.copy_((values * self.scale).to(torch.float8_e4m3fn).view(torch.uint8))

    def float(self):
        return self._data.view(torch.float8_e4m3fn).float() / self.scale


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        assert adam_w_mode
        assert master_weights == use_decoupled_grad, "Megatron asks for both or none"
        assert not any((store_param_remainders, amsgrad, capturable))
        assert master_weight_dtype in (torch.float32, torch.float16)
        for dtype in (exp_avg_dtype, exp_avg_sq_dtype):
            assert dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.master_weights = master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._scales = {}

    def _initialize_state(self, param, state_name, zero_buffer, store_param_remainders=False):
        dtype = self.name_to_dtype_map[state_name]
        if dtype == torch.uint8:
            self.state[param][state_name] = Float8Tensor(param.shape)
        else:
            self.state[param][state_name] = torch.empty_like(param, dtype=dtype)
            if zero_buffer:
                self.state[param][state_name].zero_()
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[state_name] = torch.ones(1)

    def initialize_state(self, param, store_param_remainders):
        self._initialize_state(param, "exp_avg", zero_buffer=True)
        self._initialize_state(param, "exp_avg_sq", zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def get_unscaled_state(self, param, state_name):
        state, dtype = self.state[param][state_name], self.name_to_dtype_map[state_name]
        if dtype == torch.float16:
            return state.float().mul_(self._scales[param][state_name])
        return state if dtype == torch.float32 else state.float()

    def set_scaled_state(self, param, state_name, unscaled_state):
        assert unscaled_state.dtype == torch.float32
        state, dtype = self.state[param][state_name], self.name_to_dtype_map[state_name]
        if dtype in (torch.float32, torch.bfloat16):
            state.copy_(unscaled_state)
            return
        largest = 448.0 if dtype == torch.uint8 else torch.finfo(dtype).max / 2
        scale = self._scales[param][state_name]
        torch.div(unscaled_state.abs().max(), largest, out=scale)
        if dtype == torch.uint8:
            state.scale.copy_(1 / scale)
            state.copy_(unscaled_state)
        else:
            state.copy_(unscaled_state.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0)))

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                states = {name: self.get_unscaled_state(param, name) for name in self.state[param]}
                master, gradient = states.get("master_param", param), param.grad
                if self.master_weights:
                    gradient = param.decoupled_grad.float()
                adam_step(master, gradient, states["exp_avg"], states["exp_avg_sq"], group)
                param.copy_(master)
                for name, values in states.items():
                    if self.name_to_dtype_map[name] != torch.float32:
                        self.set_scaled_state(param, name, values)
