"""What is chosen, from what is asked for and what is installed."""

import sys
import types

import pytest

from nemorl.config.policy import AdamConfig, MuonConfig, NoRecompute, SelectiveRecompute, SgdConfig
from nemorl.megatron.kernels import (
    Installed,
    Kernels,
    KernelsNotFound,
    check_optimizer,
    choose,
    optimizer_kernel,
    recompute_notes,
)
from nemorl.models.registry import shape_from_config
from tests.plan.models import CONFIG

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

    assert bool(recompute_notes(shape, recompute, layers)) == told
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
