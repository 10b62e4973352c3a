"""`policy`: the model that is trained, its layout over processes, and its optimizer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nemorl.errors import Problem, Problems

from .base import ADVANCED, EXPERT, SIMPLE, Config, FieldLevel, Variants, check, counted
from .quantization import STATIC_INPUTS, QuantizationConfig
from .run import CheckpointingConfig, ClusterConfig

if TYPE_CHECKING:  # sections that depend on this module
    from .algorithm import AlgorithmConfig
    from .generation import GenerationConfig

MomentType = Literal["float32", "bfloat16", "float16", "fp8"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
MOST_FURTHER_TOKENS = 8  # that multi-token prediction predicts
MOST_DRAFT_STEPS = 8  # in which a head for drafts is trained
_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


class OptimizerBase(Config):
    is_sharded: ClassVar[bool] = True
    """Data-parallel copies update different runs of elements, instead of complete parameters."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors that the optimizer keeps of parameters, in its state and in checkpoints."""
        raise NotImplementedError

    @property
    def num_moments(self) -> int:
        """Most moments that one parameter has."""
        return len(self.moments)

    @property
    def kernel(self) -> str | None:
        """What computes the step; None for the AdamW that Megatron chooses."""
        return None

    @property
    def state_is_on_host(self) -> bool:
        return getattr(self, "on_host", False)

    @property
    def narrow_fields(self) -> tuple[str, ...]:
        """Its fields that name another type than float32."""
        return tuple(name for name, value in self if name.endswith("_dtype") and value != "float32")

    @property
    def gradient_bytes(self) -> int:
        """Bytes in which the gradient of a parameter is summed."""
        return _TYPE_BYTES[getattr(self, "main_grads_dtype", "float32")]

    def state_bytes(self, precision: str) -> int:
        """Bytes of state per parameter of a model of this precision, with the float32 copy of its weights."""
        return _TYPE_BYTES["float32"] * (self.num_moments + (precision != "float32"))


class AdamConfig(OptimizerBase):
    """Types other than float32 use Megatron's precision-aware optimizer: Transformer Engine's Adam."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    name: Literal["adam"] = "adam"
    lr: float = Field(1e-6, gt=0, json_schema_extra=SIMPLE)
    """Peak learning rate. 1e-6 is for all weights of a large model; adapters and small models need more."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW); norms and biases are left out."""
    beta1: float = Field(0.9, ge=0, lt=1, json_schema_extra=EXPERT)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1, json_schema_extra=EXPERT)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0, json_schema_extra=EXPERT)
    """Added to the root of the second moment."""
    on_host: bool = False
    """Keep the moments and the float32 weights in host memory and compute the step on the CPU: slower, and
    needs less memory of the device."""
    exp_avg_dtype: MomentType = Field("float32", json_schema_extra=EXPERT)
    """Type of the first moment."""
    exp_avg_sq_dtype: MomentType = Field("float32", json_schema_extra=EXPERT)
    """Type of the second moment."""
    main_params_dtype: Literal["float32", "float16"] = Field("float32", json_schema_extra=EXPERT)
    """Type of the optimizer's copy of bfloat16 weights."""
    main_grads_dtype: Literal["float32", "bfloat16"] = Field("float32", json_schema_extra=EXPERT)
    """Type in which gradients are summed over micro-batches and data-parallel copies."""

    @property
    def kernel(self) -> str | None:
        return "torch AdamW in host memory" if self.on_host else None

    def state_bytes(self, precision: str) -> int:
        moments = _TYPE_BYTES[self.exp_avg_dtype] + _TYPE_BYTES[self.exp_avg_sq_dtype]
        return moments + (_TYPE_BYTES[self.main_params_dtype] if precision != "float32" else 0)


class SgdConfig(OptimizerBase):
    kernel: ClassVar[str | None] = "torch SGD"
    name: Literal["sgd"]
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of the weights; norms and biases are left out."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum."""

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


class MuonConfig(OptimizerBase):
    """Matrices by Muon; embedding, head, norms and biases by AdamW; one rate and weight decay for all."""

    is_sharded: ClassVar[bool] = False
    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    num_moments: ClassVar[int] = 2  # of parameters that are not matrices
    kernel: ClassVar[str | None] = "Muon on matrices, torch AdamW on the rest"
    name: Literal["muon"]
    lr: float = Field(gt=0)
    """Peak learning rate; the steps are as large as AdamW's of this rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; norms and biases are left out."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of the matrices (Nesterov's)."""
    iterations: int = Field(5, ge=1, json_schema_extra=EXPERT)
    """Newton-Schulz iterations that orthogonalize it."""
    beta1: float = Field(0.9, ge=0, lt=1, json_schema_extra=EXPERT)
    """Decay of the first moment, of parameters that are not matrices."""
    beta2: float = Field(0.999, ge=0, lt=1, json_schema_extra=EXPERT)
    """Decay of the second moment, of parameters that are not matrices."""
    eps: float = Field(1e-8, gt=0, json_schema_extra=EXPERT)
    """Added to the root of the second moment."""


OptimizerConfig = Annotated[AdamConfig | SgdConfig | MuonConfig, Variants(AdamConfig)]


class ScheduleBase(Config):
    warmup_start: float = Field(0.0, ge=0, le=1, json_schema_extra=EXPERT)
    """The rate from which the warm-up rises, as a share of the peak."""
    first_step: Literal[0, 1] = Field(1, json_schema_extra=EXPERT)
    """Number of the first optimizer step. 0: it has the rate from which the warm-up rises, as schedulers of
    PyTorch and Megatron do; 1: it is one step above that."""

    @check
    def _warmup_has_a_start(self) -> Problems:
        if not getattr(self, "warmup_steps", 0):
            reason = "warmup_steps is 0, so the rate starts at the peak; raise it, or remove this"
            yield from self.without_effect(("warmup_start",), reason)


class ConstantSchedule(ScheduleBase):
    name: Literal["constant"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly."""


class DecaySchedule(ScheduleBase):
    name: Literal["linear", "cosine"]
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly."""
    stable_steps: int = Field(0, ge=0)
    """Optimizer steps at the peak between warm-up and decay (warmup-stable-decay, WSD)."""
    decay_steps: int = Field(ge=1)
    """Optimizer steps, warm-up and stable steps included, after which the rate has decayed to `min_lr`."""
    min_lr: float = Field(0.0, ge=0)
    """The rate after the decay."""

    @check
    def _decay_follows_warmup(self) -> Problems:
        before = self.warmup_steps + self.stable_steps
        if before >= self.decay_steps:
            fix = f"it includes warmup_steps and stable_steps, {before} together; set it to more than that"
            yield Problem("decay_steps", self.decay_steps, fix)


class InverseSqrtSchedule(ScheduleBase):
    """After the warm-up the rate falls with the root of the step (Vaswani et al. 2017)."""

    name: Literal["inverse_sqrt"]
    warmup_steps: int = Field(ge=1)
    """Optimizer steps over which the rate rises linearly; four times as many halve it again."""
    min_lr: float = Field(0.0, ge=0)
    """The rate falls no further."""


ScheduleConfig = Annotated[ConstantSchedule | DecaySchedule | InverseSqrtSchedule, Variants(ConstantSchedule)]


def decay_problems(section: str, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> Problems:
    """A rate that rises where it should decay; `section` is that of both, for the message."""
    lowest = 0.0 if isinstance(schedule, ConstantSchedule) else schedule.min_lr
    if lowest > optimizer.lr:
        fix = f"the rate decays to this from {section}.optimizer.lr, {optimizer.lr:g}; set it to at most that"
        yield Problem("schedule.min_lr", lowest, fix)


# Arguments of a chat template that depend on the conversation.
_RENDERED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages"}
    | {"return_dict", "tokenize", "tools"}
)


class TokenizerConfig(Config):
    path: Path | None = None
    """Folder of the tokenizer; the model's own folder when not given."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `{enable_thinking: false}`; the same for all conversations."""
    tool_format: Literal[
        "auto", "hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "harmony", "pythonic"
    ] = Field("auto", json_schema_extra=EXPERT)
    """How the model writes tool calls (docs/tools.md); `auto`: as its chat template does."""

    @check
    def _arguments_are_free(self) -> Problems:
        for name in sorted(_RENDERED & self.template_arguments.keys()):
            fix = "conversations are rendered with a value of their own for it; remove it"
            yield Problem(f"template_arguments.{name}", self.template_arguments[name], fix)


class LayoutConfig(Config):
    """How the policy is spread over processes; `world_size` is their number."""

    tensor_parallel_size: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """Processes that share every matrix (TP). Divides the attention heads."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions by tokens (SP). Requires TP of 2 or more."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that share the layers (PP)."""
    virtual_pipeline_parallel_size: int = Field(1, ge=1, json_schema_extra=EXPERT)
    """Runs of layers that every stage holds, interleaved with the others' (VPP); 1 does not interleave."""
    layers_in_first_stage: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Layers of the first stage, if it should hold fewer because of the embedding; null: even split."""
    layers_in_last_stage: int | None = Field(None, ge=1, json_schema_extra=EXPERT)
    """Layers of the last stage, if it should hold fewer because of the head; null: even split."""
    context_parallel_size: int = Field(1, ge=1)
    """Processes that share the tokens of every sequence (CP)."""
    data_parallel_size: int = Field(1, ge=1, json_schema_extra=SIMPLE)
    """Copies that share the batch (DP); the optimizer state is spread over them."""
    expert_parallel_size: int = Field(1, ge=1)
    """Processes that share the experts (EP), out of those of TP, CP and DP."""
    expert_tensor_parallel_size: int = Field(1, ge=1, json_schema_extra=EXPERT)
    """Processes that share every expert's matrices (ETP), out of those of TP, CP and DP."""

    @property
    def name(self) -> str:
        """The axes of more than one process by their short names, such as `TP2-SP PP2 DP4`."""
        axes = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "DP": "data"}
        axes |= {"EP": "expert", "ETP": "expert_tensor"}
        sizes = {short: getattr(self, f"{axis}_parallel_size") for short, axis in axes.items()}
        suffixes = {"TP": "-SP" if self.sequence_parallel else ""}
        names = (f"{short}{size}{suffixes.get(short, '')}" for short, size in sizes.items() if size > 1)
        return " ".join(names) or "one process"

    @property
    def world_size(self) -> int:
        return self.pipeline_parallel_size * self.stage_size

    @property
    def fewest_units(self) -> int:
        """A batch of a multiple of this divides over copies and, if interleaved, fills the stages."""
        interleaved = self.virtual_pipeline_parallel_size > 1
        return self.data_parallel_size * (self.pipeline_parallel_size if interleaved else 1)

    @property
    def stage_size(self) -> int:
        return self.tensor_parallel_size * self.context_parallel_size * self.data_parallel_size


class NoRecompute(Config):
    name: Literal["none"] = "none"
    """All activations are kept for the backward pass."""

    @property
    def described(self) -> str:
        return "nothing"


class SelectiveRecompute(Config):
    name: Literal["selective"]
    """Parts of every layer are computed again in the backward pass."""
    modules: tuple[RecomputeModule, ...] = Field(("core_attn",), min_length=1)
    """Modules to recompute; choose large, cheap ones. `core_attn` helps only where attention keeps its
    scores."""

    @property
    def described(self) -> str:
        return ", ".join(self.modules)


class FullRecompute(Config):
    name: Literal["full"]
    """Whole layers are computed again in the backward pass; about a third more work."""
    method: Literal["uniform", "block"] = "uniform"
    """`uniform` keeps the input of every `num_layers` layers; `block` recomputes the first `num_layers`."""
    num_layers: int = Field(1, ge=1)
    """Layers of a stage (of a run of its layers under VPP), for `method`."""

    @property
    def described(self) -> str:
        if self.method == "block":
            return f"the first {counted(self.num_layers, 'layer')} of each stage"
        return "every layer" + ("" if self.num_layers == 1 else f", {self.num_layers} at a time")


class AutoRecompute(Config):
    name: Literal["auto"]
    """The memory plan chooses the least work with which all processes fit into the memory of this machine."""

    @property
    def described(self) -> str:
        return "what the memory plan chooses"


ChosenRecompute = NoRecompute | SelectiveRecompute | FullRecompute
RecomputeConfig = Annotated[ChosenRecompute | AutoRecompute, Variants(NoRecompute)]


def _count_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("count_or_auto", 'expected an integer of at least 1, or "auto"')


class ActivationOffloadConfig(Config):
    """Saved activations of layers wait in host memory for their backward pass."""

    layers: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
    """First layers of a stage (of a run of its layers under VPP) whose activations leave the device. `auto`:
    the memory plan chooses what fits and takes the fewest seconds, together with `recompute` if that is."""

    @property
    def described(self) -> str:
        if self.layers == "auto":
            return "what the memory plan chooses"
        return f"the first {counted(self.layers, 'layer') if self.layers > 1 else 'layer'} of each stage"


_Attention = Literal["q_proj", "k_proj", "v_proj", "o_proj"]
_LatentAttention = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
_Mlp = Literal["gate_proj", "up_proj", "down_proj"]
Projection = Literal[_Attention, _Mlp, _LatentAttention, "all-linear"]

_one_or_more = BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)


class LoraConfig(Config):
    """Low-rank adapters of frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(ge=1)
    """Rank of every adapter."""
    alpha: float = Field(gt=0)
    """The adapters' part is multiplied by alpha / rank."""
    targets: Annotated[tuple[Projection, ...], _one_or_more] = ("all-linear",)
    """Which matrices get an adapter, by their Hugging Face names; `all-linear` means all of the model's but
    the head, and but the MLPs of a model with experts."""
    start: Path | None = None
    """Adapter in PEFT's format (a folder) from which training starts; null draws new ones."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Fp8Config(Config):
    """Matrix products of forward and backward in FP8 by Transformer Engine; weights stay in bfloat16. Passed
    to Megatron as they are, and not run on hardware."""

    field_level: ClassVar[FieldLevel] = "expert"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: e4m3 forward and e5m2 for gradients."""
    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """What shares a scale, by Transformer Engine's name; `blockwise` and `mxfp8` require newer GPUs."""

    @property
    def described(self) -> str:
        """For the header of a run."""
        return f"{self.format}, {self.recipe} scales, by Transformer Engine"


class OffloadConfig(Config):
    """What leaves the device while generation has it; both follow from `generation.colocated` on GPUs."""

    field_level: ClassVar[FieldLevel] = "expert"
    weights: bool = False
    """Move the weights (and the reference's) to host memory while generation has its copy."""
    optimizer: bool = False
    """Free the gradients, and move the optimizer's state to host memory."""


class MoeConfig(Config):
    """Training of models with experts."""

    field_level: ClassVar[FieldLevel] = "expert"
    freeze_router: bool = False
    """Freeze the router's weights; everything else is trained."""
    load_balancing_loss_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the sequence-wise balance loss of every layer (arXiv 2412.19437), averaged over the
    sequences of an optimizer step; 0 leaves it out."""
    z_loss_coefficient: float = Field(0.0, ge=0)
    """Coefficient of `logsumexp(router logits)^2` of every layer (ST-MoE, arXiv 2202.08906), averaged over
    the tokens of an optimizer step; 0 leaves it out."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Of DeepSeek-V3's bias that balances experts and has no gradient: what an update adds for experts with
    fewer tokens than the mean, and subtracts for others (arXiv 2408.15664); 0 leaves it as it is."""
    router_replay: bool = False
    """Compute the policy's logprobs and gradients with the experts that were chosen when sampling, where the
    generation back end returns them."""
    update_replay: bool = False
    """Compute gradients with the experts that the pass for old logprobs chose (arXiv 2507.18071, 5.3)."""

    @check
    def _choices_come_from_one_pass(self) -> Problems:
        if self.router_replay and self.update_replay:
            fix = "with router_replay all passes have the experts of sampling; remove one of the two"
            yield Problem("update_replay", True, fix)


class MultiTokenPredictionConfig(Config):
    """Train the model's layers that predict further tokens (MTP; DeepSeek-V3, arXiv 2412.19437, 2.2)."""

    field_level: ClassVar[FieldLevel] = "expert"
    loss_weight: float = Field(0.1, ge=0)
    """Weight of the layers' cross entropy, a mean over trained tokens and depths; 0 only measures it."""
    detach: bool = False
    """Train these layers alone: embedding, other layers and head get no gradient from their loss, and their
    gradients are clipped by a norm of their own."""
    depth: int | None = Field(None, ge=1, le=MOST_FURTHER_TOKENS)
    """Further tokens that are predicted; null is one for each of these layers. If the model has one layer, it
    predicts them all, each from its own output."""


class DraftHeadConfig(Config):
    """Train an EAGLE-3 head for drafts (arXiv 2503.01840) on the policy's hidden states."""

    field_level: ClassVar[FieldLevel] = "expert"
    lr: float = Field(1e-4, gt=0)
    """Learning rate of the head's own AdamW; it is constant."""
    depth: int = Field(3, ge=1, le=MOST_DRAFT_STEPS)
    """Tokens of a draft that are trained, the second and later ones from the head's own states. 3 is how many
    engines draft if `generation.speculation.max_tokens` is left out; each step costs as much as the first."""
    step_decay: float = Field(0.8, gt=0, le=1)
    """Weight of a step's loss, as a multiple of that of the step before; 0.8 is that of the published code of
    EAGLE-3."""
    layers: tuple[int, int, int] | None = None
    """After how many layers the policy's hidden states are taken, ascending. null: those of the head in
    `model_path`, or 2, half of all and all but 3, as in vLLM; the last three of fewer than 7 layers."""
    model_path: Path | None = None
    """Folder of a head from which training starts, or its id on the Hugging Face hub; null draws a new one
    of the policy's size."""

    @check
    def _layers_ascend(self) -> Problems:
        if self.layers is not None and sorted(set(self.layers)) != list(self.layers):
            yield Problem("layers", list(self.layers), "engines take them in ascending order; sort them")


class LimitsConfig(Config):
    """Limits of one quantity of an update; docs/faults.md has the formula of a spike."""

    field_level: ClassVar[FieldLevel] = "expert"
    min_value: float | None = None
    """Smallest value of an update."""
    max_value: float | None = None
    """Largest value of an update."""
    max_deviations: float | None = Field(None, gt=0)
    """Largest distance from the median of the updates before, in standard deviations as their median absolute
    deviation estimates them. A gradient norm or a logprob gap below the median is no spike."""
    min_change: float = Field(0.0, ge=0)
    """A smaller distance from the median is no spike, however little the updates before differ."""
    action: Literal["skip", "count"] = "skip"
    """Skip an update beyond a limit, or only count it."""

    @property
    def active(self) -> bool:
        return (self.min_value, self.max_value, self.max_deviations) != (None, None, None)

    @check
    def _limits_allow_values(self) -> Problems:
        if self.min_value is not None and self.max_value is not None and self.min_value >= self.max_value:
            fix = f"it must be less than max_value, {self.max_value:g}, or every update would be beyond one"
            yield Problem("min_value", self.min_value, fix)
        if self.max_deviations is None:
            reason = "max_deviations is not given; set it, or remove this"
            yield from self.without_effect(("min_change",), reason)
        if not self.active:
            reason = "there is no limit; set min_value, max_value or max_deviations, or remove this"
            yield from self.without_effect(("action",), reason)


class UpdateGuardsConfig(Config):
    """Limits of updates, checked before the weights change."""

    field_level: ClassVar[FieldLevel] = "expert"
    loss: LimitsConfig = LimitsConfig()
    """Limits of the loss."""
    grad_norm: LimitsConfig = LimitsConfig()
    """Limits of the gradient norm before clipping."""
    window: int = Field(64, ge=4)
    """Newest updates, without the skipped ones, whose median and deviations `max_deviations` uses."""
    warmup: int = Field(16, ge=4)
    """Updates that these need before a value can be a spike."""

    @property
    def limits(self) -> dict[str, LimitsConfig]:
        """The limits that are set, by quantity."""
        sections = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: one for name, one in sections if isinstance(one, LimitsConfig) and one.active}

    @check
    def _window_is_used(self) -> Problems:
        if all(limits.max_deviations is None for limits in self.limits.values()):
            reason = "no quantity has max_deviations; set it for one, or remove this"
            yield from self.without_effect(("window", "warmup"), reason)
        elif self.warmup > self.window:
            fix = f"a spike would never be recognized; set it to at most window, {self.window}"
            yield Problem("warmup", self.warmup, fix)


class GuardsConfig(UpdateGuardsConfig):
    """Limits of the policy's updates, and what happens if updates stay beyond them."""

    entropy: LimitsConfig = LimitsConfig()
    """Limits of the mean entropy per token."""
    logprob_gap: LimitsConfig = LimitsConfig()
    """Limits of the mean difference between the logprobs of engine and trainer. After the first batch
    `algorithm.max_logprob_gap` and `max_token_logprob_gap` then do not stop the run."""
    max_rollbacks: int = Field(0, ge=0)
    """Times that a run returns to an earlier checkpoint, with other data, when more than
    `policy.max_skipped_steps` updates in a row were skipped; then it stops."""

    @check
    def _quantities_are_computed(self, algorithm: "AlgorithmConfig") -> Problems:
        for name, metric in (("entropy", "entropy"), ("logprob_gap", "logprob_gap/k1")):
            if name in self.limits and metric not in algorithm.metrics:
                fix = f"the updates of `{algorithm.name}` do not compute it; remove this"
                yield Problem(name, self.limits[name].model_dump(mode="json", exclude_unset=True), fix)

    @check
    def _there_is_a_checkpoint(self, checkpointing: CheckpointingConfig) -> Problems:
        if self.max_rollbacks and not checkpointing.enabled:
            fix = "checkpointing.enabled is false, so there is no checkpoint; enable it, or set this to 0"
            yield Problem("max_rollbacks", self.max_rollbacks, fix)


class ProfileConfig(Config):
    """Record steps of the policy's processes with torch's profiler."""

    field_level: ClassVar[FieldLevel] = "expert"
    step_numbers: tuple[int, ...] = Field(min_length=1)
    """Which steps, from 1. The first one of a start does work that later ones do not."""
    ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Which ranks of the policy."""
    shapes: bool = False
    """Record the shapes of operands, which makes traces larger."""
    memory: bool = False
    """Record allocations, and on a GPU write a snapshot of them."""

    @check
    def _they_exist(self, algorithm: "AlgorithmConfig", policy: "PolicyConfig") -> Problems:
        last, ranks = algorithm.num_steps, policy.layout.world_size
        for step in self.step_numbers:
            if not 1 <= step <= last:
                fix = f"the steps are 1 to {last} (algorithm.num_steps); take one of these"
                yield Problem("step_numbers", step, fix)
        for rank in self.ranks:
            if not 0 <= rank < ranks:
                fix = f"policy.layout has the ranks 0 to {ranks - 1}; take one of these"
                yield Problem("ranks", rank, fix)


class PolicyConfig(Config):
    model_path: Path
    """Folder of a Hugging Face model (config.json and safetensors), or the id of one on the hub."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Where the tokenizer and the chat template come from."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in forward and backward; the optimizer keeps float32 copies. bfloat16 needs half of
    the memory of float32, which is for CPUs and comparisons."""
    max_sequence_length: int = Field(2048, ge=2, json_schema_extra=SIMPLE)
    """Tokens of a conversation, prompt included; longer ones are cut off with stop reason `length`."""
    layout: LayoutConfig = LayoutConfig()
    """How the policy is spread over processes."""
    head: Literal["lm", "scalar"] = "lm"
    """`lm`: the vocabulary. `scalar`: one number after each token, as critics and reward models have it."""
    normalize_values: bool = Field(False, json_schema_extra=EXPERT)
    """With `head: scalar`, subtract `mean` of the model's config.json from these numbers and divide them by
    its `std` (OpenRLHF's `normalize_enable`)."""
    lora: LoraConfig | None = Field(None, json_schema_extra=SIMPLE)
    """Train adapters and freeze the weights; null trains the weights."""
    moe: MoeConfig = MoeConfig()
    """What is done with routers and experts."""
    multi_token_prediction: MultiTokenPredictionConfig | None = Field(None, json_schema_extra=EXPERT)
    """Train the layers for further tokens of models that have some; null leaves them out of the policy."""
    draft: DraftHeadConfig | None = Field(None, json_schema_extra=EXPERT)
    """Train a head from which engines draft (docs/draft_heads.md); null trains none."""
    quantization: QuantizationConfig | None = None
    """Numbers of fewer bits in which engines sample; null samples in `generation.precision`."""
    recompute: RecomputeConfig = Field(NoRecompute(), json_schema_extra=ADVANCED)
    """Which activations are computed again in the backward pass instead of kept."""
    offload_activations: ActivationOffloadConfig | None = Field(None, json_schema_extra=ADVANCED)
    """Keep activations in host memory until the backward pass; null keeps them on the device."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Most tokens of one forward and backward pass; at least `max_sequence_length`."""
    share_prefixes: bool = Field(True, json_schema_extra=EXPERT)
    """Compute tokens that sequences of a micro-batch begin with in common once, such as the prompt of a
    group. In float32 on a GPU and with `multi_token_prediction` they are computed for each sequence."""
    logprob_chunk_tokens: int = Field(1024, ge=1, json_schema_extra=EXPERT)
    """Tokens whose logits exist at one time; bounds the memory of the vocabulary."""
    optimizer: OptimizerConfig = AdamConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ConstantSchedule()
    """The learning rate over optimizer steps."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients of a larger norm are scaled down to it; null clips nothing. 1 is also the default of
    NeMo-RL."""
    max_skipped_steps: int = Field(10, ge=0, json_schema_extra=EXPERT)
    """Optimizer steps in a row that may be skipped, for values that are not finite or by `guards`, before the
    run stops or returns to a checkpoint."""
    guards: GuardsConfig = GuardsConfig()
    """Limits beyond which an optimizer step is skipped."""
    kernels: Literal["auto", "local", "transformer_engine"] = Field("auto", json_schema_extra=EXPERT)
    """Matrices and norms on a GPU: `local` are Megatron's, `auto` is Transformer Engine's if it is installed.
    The run's header shows which."""
    fp8: Fp8Config | None = Field(None, json_schema_extra=EXPERT)
    """Train in FP8; null trains in `precision`. Requires Transformer Engine."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the device while generation has it."""
    peak_tflops: float | None = Field(None, gt=0, json_schema_extra=EXPERT)
    """Operations of a device in 10^12 per second, for MFU; null takes that of a known GPU, and shows none of
    other devices."""
    profile: ProfileConfig | None = Field(None, json_schema_extra=EXPERT)
    """Traces of these steps, written into `profiles/` of the run folder; null records none."""

    @property
    def tokenizer_folder(self) -> Path:
        return self.tokenizer.path or self.model_path

    @property
    def offloaded_layers(self) -> int:
        """First layers of each run of layers whose activations leave the device; `auto` counts as none."""
        offload = self.offload_activations
        return offload.layers if offload is not None and offload.layers != "auto" else 0

    @property
    def recomputed_group(self) -> int:
        """Layers that are computed again from one input, which is all that they keep; else 1."""
        if isinstance(self.recompute, FullRecompute) and self.recompute.method == "uniform":
            return self.recompute.num_layers
        return 1

    @property
    def engine_quantization(self) -> QuantizationConfig | None:
        """What engines quantize; None where they receive weights in a type that they compute with."""
        trained = self.trained_quantization
        return self.quantization if trained is None or trained.activations else None

    @property
    def samples_by_input_scales(self) -> bool:
        """True if samples depend on scales of activations that the policy measures."""
        quantization = self.engine_quantization
        return quantization is not None and quantization.format in STATIC_INPUTS

    @property
    def trained_quantization(self) -> QuantizationConfig | None:
        """The format that the policy rounds to while it trains."""
        quantization = self.quantization
        return quantization if quantization is not None and quantization.train == "fake" else None

    @check
    def micro_batch_holds_sequence(self) -> Problems:
        """A sequence is never cut to fit a pass."""
        if self.micro_batch_tokens < self.max_sequence_length:
            least = f"policy.max_sequence_length, {self.max_sequence_length}"
            fix = f"one pass must hold a complete conversation; set it to at least {least}"
            yield Problem("micro_batch_tokens", self.micro_batch_tokens, fix)

    @check
    def _decay_goes_down(self) -> Problems:
        yield from decay_problems("policy", self.optimizer, self.schedule)

    @check
    def narrow_types_have_a_kernel(self, cluster: ClusterConfig) -> Problems:
        """Types of fewer bits require Transformer Engine's Adam: GPUs, bfloat16 and state on the device."""
        reason, optimizer = "", self.optimizer
        if cluster.gpus_per_node == 0:
            reason = (
                "cluster.gpus_per_node is 0, and Transformer Engine's Adam, which takes this, requires GPUs"
            )
        elif self.precision == "float32":
            reason = "policy.precision is float32, which has no use for it"
        elif optimizer.state_is_on_host:
            reason = "policy.optimizer.on_host is true, and the Adam of the host takes float32 only"
        for field in optimizer.narrow_fields if reason else ():
            yield Problem(f"optimizer.{field}", getattr(optimizer, field), f"{reason}; set this to float32")

    @check
    def _kernels_have_gpus(self, cluster: ClusterConfig) -> Problems:
        if self.kernels == "transformer_engine" and cluster.gpus_per_node == 0:
            fix = "it requires GPUs, and cluster.gpus_per_node is 0; set it to auto"
            yield Problem("kernels", self.kernels, fix)

    @check
    def _fp8_has_kernels(self, cluster: ClusterConfig) -> Problems:
        if self.fp8 is None:
            return
        reason = ""
        if cluster.gpus_per_node == 0:
            reason = "Transformer Engine requires GPUs, and cluster.gpus_per_node is 0"
        elif self.kernels == "local":
            reason = "policy.kernels is local, and only Transformer Engine's layers compute in FP8"
        elif self.precision == "float32":
            reason = "policy.precision is float32, and FP8 trains weights in bfloat16"
        if reason:
            yield Problem("fp8", self.fp8.model_dump(), f"{reason}; remove it")

    @check
    def _activations_leave_alone(self) -> Problems:
        if self.offload_activations is None:
            return
        reason, group = "", self.recomputed_group
        if self.fp8 is not None:
            reason = "with policy.fp8 layers also save weights in FP8, which would leave with them; remove it"
        elif self.trained_quantization is not None:
            reason = "policy.quantization.train is fake: layers save rounded weights, which would leave with "
            reason += "them; remove it"
        elif 0 < self.offloaded_layers < group:
            reason = f"policy.recompute keeps one input of every {group} layers; set it to at least that"
        if reason:
            yield Problem("offload_activations.layers", self.offload_activations.layers, reason)

    @check
    def _further_tokens_are_trained(self) -> Problems:
        if (section := self.multi_token_prediction) is None:
            return
        name, reason = "multi_token_prediction", ""
        if self.head == "scalar":
            reason = "policy.head is scalar, and these layers predict tokens"
        elif self.lora is not None:
            reason = "policy.lora freezes the weights, and these layers have no adapters"
        elif self.fp8 is not None:
            reason = "policy.fp8 does not cover these layers"
        if reason:
            yield Problem(name, section.model_dump(), f"{reason}; remove one of the two")

    @check
    def _draft_is_of_tokens(self) -> Problems:
        if self.draft is not None and self.head == "scalar":
            fix = "policy.head is scalar, and a head for drafts predicts tokens; remove it"
            yield Problem("draft", self.draft.model_dump(mode="json"), fix)

    @check
    def _values_can_be_normalized(self) -> Problems:
        if self.head != "scalar":
            reason = "policy.head is lm, which computes no values; remove this"
            yield from self.without_effect(("normalize_values",), reason)

    @check
    def _something_offloads_it(self, algorithm: "AlgorithmConfig") -> Problems:
        if not algorithm.generates:
            fix = "this run never generates, so nothing would leave the device; set it to false"
            yield from self.offload.without_effect(("weights", "optimizer"), fix, "offload.")

    @check
    def _can_sample(self, generation: "GenerationConfig") -> Problems:
        if generation.has_engines:
            return
        name, other = f"generation.backend {generation.backend}", "or use another generation.backend"
        reasons = {
            "context_parallel_size": "decodes complete sequences on each process",
            "virtual_pipeline_parallel_size": "decodes with one run of layers per stage",
        }
        for field, reason in reasons.items():
            if (size := getattr(self.layout, field)) > 1:
                yield Problem(f"layout.{field}", size, f"{name} {reason}; set it to 1, {other}")
        if self.offload.weights:
            fix = f"{name} samples with these weights; set it to false, {other}"
            yield Problem("offload.weights", True, fix)
