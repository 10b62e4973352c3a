"""What is chosen, from what is asked for and what is installed; and the table of all uses."""

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

from nemorl.config.policy import AdamConfig, Fp8Config, MuonConfig, NoRecompute, SelectiveRecompute, SgdConfig
from nemorl.megatron.kernels import (
    APEX,
    FLASH_ATTENTION,
    FUSED_WEIGHT_GRADIENT,
    TRANSFORMER_ENGINE,
    TRITON,
    USES,
    Installed,
    Kernels,
    KernelsNotFound,
    check_fp8,
    check_optimizer,
    choose,
    optimizer_kernel,
    recompute_notes,
)
from nemorl.models.registry import shape_from_config
from tests.plan.models import CONFIG

ROOT = Path(__file__).parents[2]
LIBRARIES = {TRANSFORMER_ENGINE, APEX, FUSED_WEIGHT_GRADIENT, FLASH_ATTENTION, TRITON}
# Modules of the product that name a library in code; the table covers what they do with it.
NAMED_IN = {
    "nemorl/config/policy.py",  # policy.kernels
    "nemorl/importing/openrlhf.py",  # an option of OpenRLHF
    "nemorl/megatron/device.py",  # flash-attn's function
    "nemorl/megatron/kernels.py",
    "nemorl/megatron/model.py",  # Megatron's layers of Transformer Engine
    "nemorl/megatron/moe.py",  # the same for experts
    "nemorl/models/kv_cache.py",  # flash-attn's function for caches
    "nemorl/plan/problems.py",  # its fused norms are not recomputed
}

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}

NOTHING = Installed({})
EVERYTHING = Installed(
    {
        "transformer_engine": "2.8.0",
        "apex": "",
        "flash_attn": "2.8.3",
        "fused_weight_gradient_mlp_cuda": "",
        "triton": "3.5.0",
    },
    compiler=True,
)


def chosen(wanted="auto", kind="cuda", precision="bfloat16", activation="silu", installed=EVERYTHING):
    return choose(wanted, kind=kind, precision=precision, activation=activation, installed=installed)


def test_a_cpu_computes_with_torch_whatever_is_installed():
    assert chosen(kind="cpu") == chosen(kind="cpu", installed=NOTHING) == Kernels()
    assert Kernels() == Kernels("torch_buckets", "local", fused_gradients=False, fused_activation=False)


def test_a_gpu_takes_all_that_is_installed():
    assert chosen() == Kernels("flash_attn", "transformer_engine", True, True)


def test_a_gpu_with_nothing_installed_needs_only_torch():
    assert chosen(installed=NOTHING) == Kernels("torch_varlen", "local", False, False)


def test_local_layers_can_be_asked_for():
    assert chosen("local") == Kernels("flash_attn", "local", True, True)


def test_no_variable_length_kernel_takes_float32():
    assert chosen(precision="float32").attention == "torch_buckets"


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_other_activations_than_swiglu_are_not_fused(activation):
    assert not chosen(activation=activation).fused_activation


def test_the_fused_activation_requires_a_compiler():
    without = Installed(EVERYTHING.versions, compiler=False)
    assert not chosen(installed=without).fused_activation


@pytest.mark.parametrize(
    ("kind", "installed", "reason"),
    [
        ("cpu", EVERYTHING, "this process runs on the CPU"),
        ("cuda", NOTHING, "the package transformer_engine cannot be imported here"),
    ],
)
def test_transformer_engine_that_cannot_be_had_is_refused(kind, installed, reason):
    with pytest.raises(KernelsNotFound, match=f"policy.kernels is transformer_engine, but {reason}.*auto"):
        chosen("transformer_engine", kind=kind, installed=installed)


def test_the_header_names_what_is_used():
    assert chosen().described(EVERYTHING, "cuda") == {
        "attention kernel": "flash_attn 2.8.3 (flash_attn_varlen_func)",
        "layer kernels": "transformer_engine 2.8.0",
        "activation kernel": "fused (triton 3.5.0)",
        "optimizer kernel": "FusedAdam of transformer_engine 2.8.0",
        "gradient accumulation": "fused (fused_weight_gradient_mlp_cuda)",
    }


def test_the_header_of_a_gpu_says_what_was_not_found():
    assert chosen(installed=NOTHING).described(NOTHING, "cuda") == {
        "attention kernel": "torch varlen_attn (flash_attn not found)",
        "layer kernels": "megatron-core local (transformer_engine not found)",
        "activation kernel": "not fused (triton not found)",
        "optimizer kernel": "torch AdamW (transformer_engine not found) (apex not found)",
        "gradient accumulation": "not fused (fused_weight_gradient_mlp_cuda not found)",
    }


def test_on_a_cpu_nothing_is_missed():
    lines = chosen(kind="cpu", installed=NOTHING).described(NOTHING, "cpu")
    assert not [line for line in lines.values() if "not found" in line]


@pytest.mark.parametrize(
    ("optimizer", "kernel"),
    [
        (SgdConfig(name="sgd", lr=0.1), "torch SGD"),
        (MuonConfig(name="muon", lr=0.1), "Muon on matrices, torch AdamW on"),
        (AdamConfig(on_host=True), "torch AdamW in host memory"),
    ],
)
def test_the_header_names_the_optimizer_that_runs(optimizer, kernel):
    assert kernel in chosen().described(EVERYTHING, "cuda", optimizer)["optimizer kernel"]


def test_types_that_only_transformer_engine_takes_require_it():
    narrow = AdamConfig(exp_avg_dtype="bfloat16", main_grads_dtype="bfloat16")
    check_optimizer(narrow, Installed({"transformer_engine": "2.8.0"}))
    check_optimizer(AdamConfig(), NOTHING)
    with pytest.raises(KernelsNotFound, match=r"policy.optimizer.exp_avg_dtype is bfloat16, .*set float32"):
        check_optimizer(narrow, NOTHING)


def test_fp8_requires_layers_of_transformer_engine():
    check_fp8(Fp8Config(), chosen())
    check_fp8(None, Kernels())
    with pytest.raises(KernelsNotFound, match=r"policy.fp8 is given, .*install it, or remove policy.fp8"):
        check_fp8(Fp8Config(), chosen(installed=NOTHING))


@pytest.mark.parametrize(
    ("config", "layers", "told"),
    [
        (CONFIG, "transformer_engine", True),
        (CONFIG, "local", False),
        (CONFIG | MIXTRAL, "transformer_engine", False),  # its router has a norm of its own before it
    ],
)
def test_the_header_says_where_norms_are_not_recomputed(config, layers, told):
    shape = shape_from_config(config, "config.json")
    recompute = SelectiveRecompute(name="selective", modules=("core_attn", "layernorm"))

    note = recompute_notes(shape, recompute, layers)["recomputation"]
    assert note.startswith("core_attn, layernorm")
    assert ("norms are not" in note) == told
    assert not recompute_notes(shape, NoRecompute(), layers)


def test_megatron_looks_for_adam_in_transformer_engine_first():
    assert "transformer_engine" in optimizer_kernel(EVERYTHING, "cuda")
    assert optimizer_kernel(Installed({"apex": ""}), "cuda") == "FusedAdam of apex"


def test_what_cannot_be_imported_is_not_installed(monkeypatch):
    apex = types.ModuleType("apex")  # another project of this name, without optimizers
    monkeypatch.setitem(sys.modules, "apex", apex)
    flash = types.ModuleType("flash_attn")
    flash.__version__ = "2.8.3"
    monkeypatch.setitem(sys.modules, "flash_attn", flash)

    found = Installed.find()

    assert found.versions.get("flash_attn") == "2.8.3"
    assert "apex" not in found
    assert found.described("apex") == "apex not found"


def defines(file: str, name: str) -> bool:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return any(isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name for n in tree.body)


@pytest.mark.parametrize("use", USES, ids=[f"{use.library} {use.what}" for use in USES])
def test_a_use_names_what_exists(use):
    """The test against the fallback, and where the kernel is chosen."""
    file, _, name = use.test.partition("::")
    assert defines(file, name)
    module, _, chooser = use.chosen.rpartition(".")
    if use.chosen.startswith("nemorl."):
        assert hasattr(importlib.import_module(module), chooser)
    else:
        assert importlib.import_module(use.chosen)


def test_every_library_is_in_the_table():
    assert {use.library for use in USES} == LIBRARIES


def test_no_other_module_uses_a_library():
    found = set()
    for path in sorted((ROOT / "nemorl").rglob("*.py")) + sorted((ROOT / "algorithms").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and node not in docs else ""
            if isinstance(node, ast.ImportFrom):
                text = node.module
            elif isinstance(node, ast.Import):
                text = node.names[0].name
            if isinstance(text, str) and LIBRARIES & set(text.split(".")):
                found.add(str(path.relative_to(ROOT)))
    assert found == NAMED_IN


@pytest.mark.ci
def test_the_fused_activation_computes_the_same():
    """torch.compile makes a kernel of Megatron's function here, too, in C++ instead of Triton."""
    torch.manual_seed(0)
    x = torch.randn(5, 1, 16, requires_grad=True)

    dynamo.utils.counters.clear()
    with dynamo.config.patch(disable=False):  # of policy processes on a CPU
        fused = bias_swiglu_impl(x, None)
    assert dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    (fused_gradient,) = torch.autograd.grad(fused.sum(), x)
    gate, up = x.chunk(2, -1)
    plain = torch.nn.functional.silu(gate) * up
    (gradient,) = torch.autograd.grad(plain.sum(), x)

    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(fused_gradient, gradient)
