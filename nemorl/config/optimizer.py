"""`policy.optimizer` and `policy.schedule`: how gradients become steps, and how large these are."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config, default_variant

MomentType = Literal["float32", "bfloat16", "float16", "fp8"]


class AdamConfig(Config):
    """Types other than float32 are Megatron's precision-aware optimizer: Transformer Engine's Adam."""

    name: Literal["adam"] = "adam"
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW); norms and biases are left out."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    on_host: bool = False
    """Keep the moments and the float32 weights in host memory and take the step on the CPU: it takes longer,
    and leaves that memory of the device to others."""
    exp_avg_dtype: MomentType = "float32"
    """Type of the first moment."""
    exp_avg_sq_dtype: MomentType = "float32"
    """Type of the second moment."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Type of the optimizer's weights beside those of bfloat16."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over micro-batches and data-parallel copies."""

    @property
    def narrow_fields(self) -> tuple[str, ...]:
        """Those of its fields that name another type than float32."""
        types = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype")
        return tuple(name for name in types if getattr(self, name) != "float32")

    @property
    def narrow_grads(self) -> bool:
        """Whether gradients are summed in fewer bits than float32 has."""
        return self.main_grads_dtype != "float32"


class SgdConfig(Config):
    name: Literal["sgd"]
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of the weights; norms and biases are left out."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum."""


class MuonConfig(Config):
    """Matrices by Muon; embedding, head, norms and biases by AdamW; one rate and weight decay for all."""

    name: Literal["muon"]
    lr: float = Field(gt=0)
    """Peak learning rate; the steps are as large as AdamW's of this rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; norms and biases are left out."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of the matrices (Nesterov's)."""
    iterations: int = Field(5, ge=1)
    """Newton-Schulz iterations that orthogonalise it."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment, of what is no matrix."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment, of what is no matrix."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""


OptimizerConfig = Annotated[
    AdamConfig | SgdConfig | MuonConfig, Field(discriminator="name"), default_variant(AdamConfig)
]


class ConstantSchedule(Config):
    name: Literal["constant"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from zero."""


class DecaySchedule(Config):
    name: Literal["linear", "cosine"]
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from zero."""
    stable_steps: int = Field(0, ge=0)
    """Optimizer steps at the peak between warm-up and decay (warmup-stable-decay, WSD)."""
    decay_steps: int = Field(ge=1)
    """Optimizer steps, those before the decay included, after which the rate has come down to `min_lr`."""
    min_lr: float = Field(0.0, ge=0)
    """The rate after the decay."""


class InverseSqrtSchedule(Config):
    """After the warm-up the rate falls with the root of the step (Vaswani et al. 2017)."""

    name: Literal["inverse_sqrt"]
    warmup_steps: int = Field(ge=1)
    """Optimizer steps over which the rate rises linearly from zero; four times as many halve it again."""
    min_lr: float = Field(0.0, ge=0)
    """The rate falls no further."""


ScheduleConfig = Annotated[
    ConstantSchedule | DecaySchedule | InverseSqrtSchedule,
    Field(discriminator="name"),
    default_variant(ConstantSchedule),
]
