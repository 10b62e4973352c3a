"""Rules of layouts, recomputation and `policy.moe` for a model: what passes them can run. No torch."""

from collections.abc import Iterator

from nemorl.config.generation import GenerationConfig
from nemorl.config.policy import (
    AutoRecompute,
    FullRecompute,
    LayoutConfig,
    MoeConfig,
    NoRecompute,
    RecomputeConfig,
)
from nemorl.errors import Problem

from .shape import Dim, ModelShape

# Of the kernels of flash-attn and of torch's variable-length attention in bfloat16.
_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 8, 256


def layout_problems(shape: ModelShape, layout: LayoutConfig, *, adapters: bool = False) -> Iterator[Problem]:
    """All reasons why a layout cannot run a model; `adapters` are LoRA's."""
    yield from division_problems(shape, layout)
    tp_size, etp_size = layout.tensor_parallel_size, layout.expert_tensor_parallel_size
    if adapters and tp_size > shape.num_key_value_heads:
        problem = f"the model's {shape.num_key_value_heads} key-value heads are divided"
        fix = f"{problem}, and adapters require complete heads: lower this, or set policy.lora to null"
        yield _problem(layout, "tensor_parallel_size", fix)
    if layout.sequence_parallel and tp_size == 1:
        fix = "activations are split over tensor-parallel processes, and there is one: set this to false"
        yield _problem(layout, "sequence_parallel", fix)
    if shape.moe is None:
        for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
            if getattr(layout, name) > 1:
                yield _problem(layout, name, "the model has no experts: set this to 1")
        return
    if tp_size > 1 and not layout.sequence_parallel:
        fix = "Megatron routes whole tokens to experts, so with tensor parallelism this has to be true"
        yield _problem(layout, "sequence_parallel", fix)
    share = layout.expert_parallel_size * etp_size
    if layout.stage_size % share:
        field = "expert_parallel_size" if layout.expert_parallel_size > 1 else "expert_tensor_parallel_size"
        processes = f"the {layout.stage_size} processes of a stage (TP x CP x DP)"
        fix = f"experts are laid over {processes}, and {share} (EP x ETP) does not divide {layout.stage_size}"
        yield _problem(layout, field, fix)
    if etp_size > 1 and shape.linear_bias:
        fix = "Megatron does not divide the biases of experts: set this to 1"
        yield _problem(layout, "expert_tensor_parallel_size", fix)


def gpu_attention_problems(shape: ModelShape, precision: str) -> Iterator[Problem]:
    """Reasons why attention over packed sequences has no kernel on a GPU; not run on hardware."""
    if shape.sinks and precision == "float32":
        kernel = "the kernel for attention sinks, which the model has, takes bfloat16 only"
        yield Problem("policy.precision", precision, f"on a GPU {kernel}: set bfloat16")
    width = shape.head_dim if shape.mla is None else shape.mla.head_dim + shape.mla.rotary_dim
    if precision == "bfloat16" and (width % _HEAD_DIM_MULTIPLE or width > _MAX_HEAD_DIM):
        takes = f"a multiple of {_HEAD_DIM_MULTIPLE} and at most {_MAX_HEAD_DIM}"
        problem = f"on a GPU its attention takes heads of {takes}, and the model's have {width} dimensions"
        fix = "take another model" if shape.sinks else "set float32, or take another model"
        yield Problem("policy.precision", precision, f"{problem}: {fix}")


def with_fewer_copies(
    shape: ModelShape, layout: LayoutConfig, ranks: int, *, adapters: bool = False
) -> LayoutConfig | None:
    """The layout with the most data-parallel copies, fewer than now, that needs at most `ranks` ranks.

    Their number divides the present one, and so every batch that this divides. None if no layout can run.
    """
    size = layout.data_parallel_size
    for copies in (copies for copies in range(size - 1, 0, -1) if size % copies == 0):
        smaller = layout.model_copy(update={"data_parallel_size": copies})
        if smaller.world_size <= ranks and not any(layout_problems(shape, smaller, adapters=adapters)):
            return smaller
    return None


def division_problems(shape: ModelShape, layout: LayoutConfig) -> Iterator[Problem]:
    """Reasons why a layout cannot divide the model's weights among its ranks."""
    tensor_parallel = "tensor_parallel_size"
    yield from _divides(layout, tensor_parallel, "attention heads", shape.num_attention_heads)
    heads, size = shape.num_key_value_heads, layout.tensor_parallel_size
    if heads % size and size % heads:  # ranks have whole heads, or several ranks have one together
        fix = f"it must divide the model's {heads} key-value heads, or be a multiple of their number"
        yield _problem(layout, tensor_parallel, fix)
    if shape.num_moe_layers < shape.num_layers:
        yield from _divides(layout, tensor_parallel, "columns of the MLP", shape.ffn_hidden_size)
    if shape.mla is not None:
        if shape.mla.query_rank:
            what = "rows of the compressed query (q_lora_rank)"
            yield from _divides(layout, tensor_parallel, what, shape.mla.query_rank)
        what = "rows of the compressed key and value (kv_lora_rank + qk_rope_head_dim)"
        yield from _divides(layout, tensor_parallel, what, shape.extent(Dim.KEY_VALUE_LATENT_AND_ROTARY))
    if shape.moe is not None:
        shared, ffn = shape.moe.shared_ffn_hidden_size, shape.moe.ffn_hidden_size
        if shared:
            yield from _divides(layout, tensor_parallel, "columns of the shared experts", shared)
        yield from _divides(layout, "expert_parallel_size", "experts", shape.moe.num_experts)
        yield from _divides(layout, "expert_tensor_parallel_size", "columns of an expert", ffn)
    yield from _stage_problems(shape.num_layers, layout)


def layers_by_stage(num_layers: int, layout: LayoutConfig) -> list[int]:
    """Layers of each pipeline stage; only of layouts without `division_problems`."""
    first = [] if layout.layers_in_first_stage is None else [layout.layers_in_first_stage]
    last = [] if layout.layers_in_last_stage is None else [layout.layers_in_last_stage]
    middle = layout.pipeline_parallel_size - len(first + last)
    layers = num_layers - sum(first + last)
    return [*first, *([layers // middle] * middle if middle else []), *last]


def recompute_problems(
    shape: ModelShape, layout: LayoutConfig, recompute: RecomputeConfig
) -> Iterator[Problem]:
    if isinstance(recompute, NoRecompute | AutoRecompute):
        return
    if isinstance(recompute, FullRecompute):
        chunks = layout.virtual_pipeline_parallel_size
        sizes = sorted({layers // chunks for layers in layers_by_stage(shape.num_layers, layout)})
        runs = f"{' and '.join(map(str, sizes))} layers of a stage{' run' if chunks > 1 else ''}"
        if recompute.num_layers > sizes[-1]:
            fix = f"there are only {runs}: take {sizes[-1]} or fewer"
        elif recompute.method == "uniform" and any(size % recompute.num_layers for size in sizes):
            fix = f"with the method `uniform` it must divide the {runs}: 1 always does"
        else:
            return
        yield Problem("policy.recompute.num_layers", recompute.num_layers, fix)
        return
    missing = {
        "mlp": (shape.num_moe_layers == shape.num_layers, "a layer without experts"),
        "moe": (shape.moe is None, "experts"),
        "shared_experts": (shape.moe is None or not shape.moe.shared_ffn_hidden_size, "shared experts"),
        "mla_up_proj": (shape.mla is None, "latent attention"),
    }
    for module in recompute.modules:
        is_missing, what = missing.get(module, (False, ""))
        if is_missing:
            fix = f"the model has not {what}: remove {module}"
            yield Problem("policy.recompute.modules", list(recompute.modules), fix)


def norms_are_fused(shape: ModelShape) -> bool:
    """True if Transformer Engine computes all norms of a layer with the matrices behind them, which leaves
    `layernorm` nothing to recompute: a router and the latents of MLA have theirs before them."""
    return shape.mla is None and shape.moe is None


def moe_problems(
    shape: ModelShape, config: MoeConfig, generation: GenerationConfig | None, *, gpus: bool
) -> Iterator[Problem]:
    """Settings that would do nothing. `generation` samples what is learned from; None where nothing does."""
    if shape.moe is None:
        usual = MoeConfig().model_dump()
        for name, value in config.model_dump().items():
            if value != usual[name]:
                yield Problem(f"policy.moe.{name}", value, "the model has no experts: remove this")
    elif config.router_replay and generation is None:
        fix = "nothing is sampled, so there is nothing to replay: set false"
        yield Problem("policy.moe.router_replay", True, fix)
    elif config.router_replay and generation is not None:
        yield from generation.router_replay_problems(gpus=gpus)


def _stage_problems(num_layers: int, layout: LayoutConfig) -> Iterator[Problem]:
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    given = [f for f in ("layers_in_first_stage", "layers_in_last_stage") if getattr(layout, f) is not None]
    if stages == 1:
        for name in given:
            yield _problem(layout, name, "there is one stage, and it has all layers: remove this")
        if chunks > 1:
            fix = "one stage has nothing to interleave with: set this to 1, or pipeline_parallel_size higher"
            yield _problem(layout, "virtual_pipeline_parallel_size", fix)
        return
    middle, layers = stages - len(given), num_layers - sum(getattr(layout, name) for name in given)
    if not given:
        yield from _divides(layout, "pipeline_parallel_size", "layers", num_layers)
    elif middle == 0 and layers:
        fix = f"the two stages together must have the model's {num_layers} layers: remove this"
        yield _problem(layout, given[-1], fix)
    elif layers < middle:
        fix = f"it leaves {layers} of the {num_layers} layers for {middle} stages, each of which requires one"
        yield _problem(layout, given[0], fix)
    elif middle and layers % middle:
        rest = f"the other {middle} stages share the {layers} layers that {' and '.join(given)} leave"
        yield _problem(layout, "pipeline_parallel_size", f"{rest}, and {middle} does not divide {layers}")
    if chunks > 1 and middle * layers >= 0 and (not middle or layers % middle == 0):
        sizes = sorted({size for size in layers_by_stage(num_layers, layout) if size % chunks})
        if sizes:
            fix = f"it must divide the {' and the '.join(map(str, sizes))} layers of every stage"
            yield _problem(layout, "virtual_pipeline_parallel_size", fix)


def _divides(layout: LayoutConfig, field: str, what: str, count: int) -> Iterator[Problem]:
    if count % getattr(layout, field):
        fitting = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
        yield _problem(layout, field, f"it must divide the model's {count} {what}: {fitting} do")


def _problem(layout: LayoutConfig, field: str, fix: str) -> Problem:
    return Problem(f"policy.layout.{field}", getattr(layout, field), fix)
