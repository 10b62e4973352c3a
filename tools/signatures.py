"""Read the signatures that nemorl relies on from a package's sources, and keep them in a table for the tests.

    python tools/signatures.py PACKAGE FOLDER --release RELEASE --origin ORIGIN [--write [TABLE]]

FOLDER has the package's sources, such as a checkout of its release; they are parsed and not imported, because
most of these packages require CUDA. `USED` names what nemorl and the stand-ins of the tests use: the
parameters of a function or of a class's constructor, the fields of a configuration class, the members of an
enumeration. Of classes with hundreds of fields only those that nemorl sets are kept. What is missing fails.

Without `--write` the signatures are printed. `tests/signatures/` compares the table with the stand-ins and
with what nemorl passes.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

Parameters: TypeAlias = list[str]  # as in Python's syntax: "name", "name=default", "*", "*args", "**kwargs"
Signatures: TypeAlias = dict[str, Parameters]  # by `file::Class`, `file::Class.method` or `file::function`

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "signatures" / "signatures.json"
FACTORY = "<factory>"  # a default that is made for each object
_FIELD = ("Field", "PydanticField", "field")

# Package: file: name: fields to keep, or nothing for all.
USED: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "transformer_engine": {
        "transformer_engine/pytorch/module/linear.py": {"Linear": (), "Linear.forward": ()},
        "transformer_engine/pytorch/module/layernorm_linear.py": {
            "LayerNormLinear": (),
            "LayerNormLinear.forward": (),
        },
        "transformer_engine/pytorch/module/grouped_linear.py": {
            "GroupedLinear": (),
            "GroupedLinear.forward": (),
        },
        "transformer_engine/pytorch/module/rmsnorm.py": {"RMSNorm": ()},
        "transformer_engine/pytorch/optimizers/fused_adam.py": {
            "FusedAdam": (),
            "FusedAdam.step": (),
            "FusedAdam.initialize_state": (),
            "FusedAdam._initialize_state": (),
            "FusedAdam.get_unscaled_state": (),
            "FusedAdam.set_scaled_state": (),
        },
        "transformer_engine/pytorch/quantization.py": {
            "FP8GlobalStateManager.is_fp8_enabled": (),
            "fp8_autocast": (),
        },
    },
    "apex": {
        "apex/optimizers/fused_adam.py": {"FusedAdam": (), "FusedAdam.step": ()},
        "apex/optimizers/fused_sgd.py": {"FusedSGD": (), "FusedSGD.step": ()},
        "csrc/megatron/fused_weight_gradient_dense.cpp": {
            "wgrad_gemm_accum_fp32": (),
            "wgrad_gemm_accum_fp16": (),
        },
    },
    "nixl": {
        "nixl_cu12/_api.py": {
            "nixl_agent_config": (),
            "nixl_agent": (),
            **{
                f"nixl_agent.{method}": ()
                for method in (
                    *("register_memory", "deregister_memory", "get_agent_metadata", "add_remote_agent"),
                    *("make_connection", "get_xfer_descs", "initialize_xfer", "transfer", "check_xfer_state"),
                    *("release_xfer_handle", "send_notif", "get_new_notifs"),
                )
            },
        },
    },
    "flash_attn": {"flash_attn/flash_attn_interface.py": {"flash_attn_with_kvcache": ()}},
    "tensorrt_llm": {
        "tensorrt_llm/_torch/async_llm.py": {
            "AsyncLLM": (),
            "AsyncLLM.setup_async": (),
            "AsyncLLM.collective_rpc": (),
        },
        "tensorrt_llm/llmapi/llm.py": {
            "BaseLLM.generate_async": ("inputs", "sampling_params", "streaming"),
            "BaseLLM.shutdown": (),
        },
        "tensorrt_llm/llmapi/llm_args.py": {
            "TorchLlmArgs": (
                *("model", "backend", "dtype", "skip_tokenizer_init", "trust_remote_code"),
                *("tensor_parallel_size", "pipeline_parallel_size"),
                *("moe_tensor_parallel_size", "moe_expert_parallel_size"),
                *("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"),
                *("kv_cache_config", "sleep_config", "disable_overlap_scheduler", "enable_chunked_prefill"),
                *("orchestrator_type", "ray_worker_extension_cls", "ray_placement_config"),
                *("allreduce_strategy", "speculative_config"),
            ),
            "KvCacheConfig": ("free_gpu_memory_fraction", "enable_block_reuse", "max_tokens", "dtype"),
            "SleepConfig": (),
            "NGramDecodingConfig": (
                *("max_draft_len", "allow_advanced_sampling", "use_rejection_sampling"),
                *("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
            ),
            "DraftTargetDecodingConfig": (
                *("max_draft_len", "allow_advanced_sampling", "use_rejection_sampling"),
                "speculative_model",
            ),
            "MTPDecodingConfig": (
                *("max_draft_len", "allow_advanced_sampling", "use_rejection_sampling"),
                "use_relaxed_acceptance_for_thinking",
            ),
        },
        "tensorrt_llm/sampling_params.py": {
            "LogprobMode": (),
            "SamplingParams": (
                *("end_id", "pad_id", "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
                *("n", "top_k", "top_p", "seed", "temperature", "min_p", "logprobs", "logprobs_mode"),
                *("ignore_eos", "detokenize"),
            ),
        },
        "tensorrt_llm/executor/result.py": {
            "Logprob": (),
            "CompletionOutput": ("index", "token_ids", "logprobs", "finish_reason"),
        },
        "tensorrt_llm/executor/ray/gpu_worker.py": {"RayGPUWorker.sleep": (), "RayGPUWorker.wakeup": ()},
        "tensorrt_llm/llmapi/rlhf_utils.py": {
            "WorkerExtension.update_weights": (),
            "WorkerExtension.reset_prefix_cache": (),
        },
        "tensorrt_llm/_ray_utils.py": {"control_action_decorator": ()},
    },
    "vllm": {
        "vllm/engine/arg_utils.py": {
            "AsyncEngineArgs": (
                *("model", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs"),
                *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend"),
                *("enforce_eager", "enable_prefix_caching", "logprobs_mode", "worker_extension_cls"),
                *("disable_log_stats", "quantization", "enable_sleep_mode", "gpu_memory_utilization"),
                *("kv_cache_dtype", "speculative_config"),
                *("kv_cache_memory_bytes", "enable_chunked_prefill", "max_num_batched_tokens"),
                *("hf_overrides", "enable_return_routed_experts", "enable_lora", "max_loras"),
                *("max_lora_rank", "lora_target_modules"),
            ),
        },
        "vllm/config/speculative.py": {
            "SpeculativeConfig": (
                *("num_speculative_tokens", "model", "method", "draft_tensor_parallel_size"),
                *("prompt_lookup_max", "prompt_lookup_min"),
            ),
        },
        "vllm/sampling_params.py": {
            "SamplingParams": (
                *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids"),
                *("ignore_eos", "detokenize", "logprobs", "routed_experts_prompt_start", "output_kind"),
            ),
        },
        "vllm/lora/request.py": {"LoRARequest": ("lora_name", "lora_int_id", "lora_path")},
        "vllm/v1/engine/async_llm.py": {
            "AsyncLLM.from_engine_args": ("engine_args",),
            "AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "lora_request"),
            "AsyncLLM.pause_generation": (),
            "AsyncLLM.resume_generation": (),
            "AsyncLLM.reset_prefix_cache": (),
            "AsyncLLM.update_weight_version": (),
            "AsyncLLM.collective_rpc": (),
            "AsyncLLM.sleep": (),
            "AsyncLLM.wake_up": (),
            "AsyncLLM.shutdown": (),
        },
        # What the workers of a GPU have: nothing else than the names that our extension uses.
        "vllm/v1/worker/gpu_worker.py": {"Worker.sleep": (), "Worker.wake_up": ()},
        "vllm/v1/worker/gpu_model_runner.py": {
            "GPUModelRunner.get_model": (),
            "GPUModelRunner.get_draft_model": (),
            "GPUModelRunner.reload_weights": (),
        },
        "vllm/model_executor/model_loader/utils.py": {"process_weights_after_loading": ()},
        "vllm/model_executor/model_loader/default_loader.py": {"DefaultModelLoader.get_all_weights": ()},
    },
}


class NotFound(LookupError):
    """The sources lack something that nemorl uses."""


def signatures(package: str, folder: Path) -> Signatures:
    """Return what `USED` names of a package whose sources are in `folder`. Raises NotFound."""
    found: Signatures = {}
    for file, used in USED[package].items():
        path = folder / file
        if not path.is_file():
            raise NotFound(f"{path} does not exist")
        text = path.read_text(encoding="utf-8")
        for name, fields in used.items():
            try:
                parameters = read(text, name) if path.suffix == ".py" else read_binding(text, name)
            except NotFound as error:
                raise NotFound(f"{file} has no {error}") from None
            if lacking := [field for field in fields if field not in map(name_of, parameters)]:
                raise NotFound(f"{name} in {file} has no {', '.join(lacking)}")
            kept = [one for one in parameters if not fields or name_of(one) in fields]
            found[f"{file}::{name}"] = kept
    return found


def name_of(parameter: str) -> str:
    return parameter.split("=")[0]


def read(source: str, name: str) -> Parameters:
    """Return the parameters of `function`, `Class` or `Class.method` in a module. Raises NotFound."""
    module = ast.parse(source)
    outer, _, method = name.partition(".")
    definition = _definition(module.body, outer)
    if method:
        assert isinstance(definition, ast.ClassDef), f"{outer} is no class"
        definition = _definition(definition.body, method)
    if isinstance(definition, ast.ClassDef):
        return _of_class(module, definition)
    return _of_function(definition)


def read_binding(source: str, name: str) -> Parameters:
    """Return the parameters of a C++ function that pybind11 binds under `name`. Raises NotFound."""
    bound = re.search(rf'm\.def\("{name}",\s*&(\w+)', source)
    declared = bound and re.search(rf"\bvoid {bound[1]}\(([^)]*)\)", source)
    if not declared:
        raise NotFound(name)
    # Bound without names, so they are passed by position.
    return [*(part.split()[-1].lstrip("&*") for part in declared[1].split(",")), "/"]


def _definition(body: list[ast.stmt], name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    # The last one counts: the ones before are overloads.
    for node in reversed(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    raise NotFound(name)


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [_parameter(one.arg, default) for one, default in zip(positional, defaults, strict=True)]
    if found and found[0] in ("self", "cls"):
        del found[0]
    if arguments.vararg is not None:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [_parameter(one.arg, default) for one, default in pairs]
    if arguments.kwarg is not None:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def _of_class(module: ast.Module, definition: ast.ClassDef) -> Parameters:
    """Return a constructor's parameters, or fields, also those of base classes of the same module."""
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _of_function(node)
    fields: dict[str, str] = {}
    for base in reversed(definition.bases):
        if isinstance(base, ast.Name):
            local = [one for one in module.body if isinstance(one, ast.ClassDef) and one.name == base.id]
            fields |= {name_of(one): one for one in (_of_class(module, local[0]) if local else ())}
    fields |= {name_of(one): one for one in _fields(definition)}
    return list(fields.values())


def _fields(definition: ast.ClassDef) -> Iterator[str]:
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
                yield _parameter(node.target.id, _default(node.value))
        elif _is_enum(definition) and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id


def _is_enum(definition: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Enum") for base in definition.bases)


def _default(value: ast.expr | None) -> ast.expr | None:
    """Return the default of a field, also of pydantic's and of a dataclass's `field(...)`."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in _FIELD):
        return value
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    if "default_factory" in options:
        return ast.Name(FACTORY)
    return options.get("default", value.args[0] if value.args else None)


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def main() -> None:
    """Print the signatures, or write them into the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=sorted(USED))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", required=True, help="release, such as 2.18")
    parser.add_argument("--origin", required=True, help="where the sources are from, such as a commit")
    parser.add_argument("--write", type=Path, nargs="?", const=TABLE, help=f"table, by default {TABLE.name}")
    arguments = parser.parse_args()
    try:
        found = signatures(arguments.package, arguments.folder)
    except NotFound as error:
        raise SystemExit(f"{arguments.package} {arguments.release}: {error}") from error
    entry = {"release": arguments.release, "origin": arguments.origin, "signatures": found}
    if arguments.write is None:
        json.dump({arguments.package: entry}, sys.stdout, indent=2)
        return
    path: Path = arguments.write
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table[arguments.package] = entry
    path.write_text(json.dumps(dict(sorted(table.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
