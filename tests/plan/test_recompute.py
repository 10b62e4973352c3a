"""`policy.recompute: {name: auto}`: the work of each setting, and the one that is chosen."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.policy import (
    AutoRecompute,
    ChosenRecompute,
    FullRecompute,
    NoRecompute,
    RecomputeModule,
    SelectiveRecompute,
)
from nemorl.models.layout_rules import recompute_problems
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import MlaShape
from nemorl.plan.layouts import list_layouts
from nemorl.plan.machine import Gpu, Machine
from nemorl.plan.memory import policy_memory
from nemorl.plan.operations import forward_operations
from nemorl.plan.problems import plan_run
from nemorl.plan.recompute import (
    Chosen,
    fitting_recompute,
    with_recompute,
    with_settled_recompute,
)
from nemorl.run.inspection import _settled
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG
from tests.plan.test_layouts import EXPERTS

SHAPE = shape_from_config(CONFIG, "config.json")
AUTO = ("policy.recompute={name: auto}", "policy.micro_batch_tokens=65536")
LENGTH = 100


def selective(*modules: RecomputeModule) -> SelectiveRecompute:
    return SelectiveRecompute(name="selective", modules=modules)


def block(number: int) -> FullRecompute:
    return FullRecompute(name="full", method="block", num_layers=number)


# Of a layer with a hidden size of 128, 8 query and 4 key-value heads of 16, and an MLP of 384.
MLP = 2 * 3 * 128 * 384
ATTENTION = 2 * 2 * 8 * 16 * LENGTH / 2
LAYER = MLP + ATTENTION + 2 * 128 * (8 + 4 + 4 + 8) * 16


@pytest.mark.parametrize(
    ("recompute", "work", "tolerance"),
    [
        (NoRecompute(), 0, 0),
        (selective("mlp"), 6 * MLP, 0),
        (selective("core_attn"), 6 * ATTENTION, 0),
        (selective("mlp", "core_attn"), 6 * (MLP + ATTENTION), 0),
        (FullRecompute(name="full"), 6 * LAYER, 0.01),  # and norms
        (FullRecompute(name="full", num_layers=3), 6 * LAYER, 0.01),
        (block(2), 2 * LAYER, 0.01),
    ],
)
def test_work_of_a_dense_model(
    configure: Configure, recompute: ChosenRecompute, work: float, tolerance: float
) -> None:
    policy = configure(f"policy.max_sequence_length={LENGTH}").policy
    assert forward_operations(SHAPE, policy, recompute) == pytest.approx(work, rel=tolerance or 1e-12)


def test_work_of_experts_and_of_latent_attention(configure: Configure) -> None:
    policy = configure(f"policy.max_sequence_length={LENGTH}").policy
    experts = shape_from_config(EXPERTS, "config.json")
    assert forward_operations(experts, policy, selective("moe")) == 6 * 2 * (2 * 3 * 128 * 64)  # top 2
    latent = replace(SHAPE, mla=MlaShape(32, 24, head_dim=16, rotary_dim=8, value_dim=12))
    up = 2 * (32 * 8 * (16 + 8) + 24 * 8 * (16 + 12))
    assert forward_operations(latent, policy, selective("mla_up_proj")) == 6 * up


def all_settings(experiment: Experiment) -> Sequence[Experiment]:
    """Without two modules at a time, apart from those that the tests expect."""
    modules: list[RecomputeModule] = ["core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
    pairs = [selective("core_attn", "mlp"), selective("core_attn", "layernorm", "mlp")]
    settings = [NoRecompute(), *map(selective, modules), *pairs, *map(block, range(1, 6))]
    settings += [FullRecompute(name="full", num_layers=number) for number in (1, 2, 3, 6)]
    layout = experiment.policy.layout
    return [with_recompute(experiment, s) for s in settings if not any(recompute_problems(SHAPE, layout, s))]


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_choice_fits_with_the_least_work(configure: Configure, layout: dict[str, int]) -> None:
    sizes = (f"policy.layout.{name}={size}" for name, size in layout.items())
    experiment = configure(*AUTO, "policy.kernels=local", *sizes)
    options = all_settings(experiment)

    def work(choice: Experiment) -> float:
        recompute = choice.policy.recompute
        assert not isinstance(recompute, AutoRecompute)
        return forward_operations(SHAPE, choice.policy, recompute)

    limits = sorted({policy_memory(option, SHAPE).on_device for option in options})
    chosen = [fitting_recompute(experiment, SHAPE, limit) for limit in limits]
    for size, choice in zip(limits, chosen, strict=True):
        assert policy_memory(choice, SHAPE).on_device <= size
        fitting = [option for option in options if policy_memory(option, SHAPE).on_device <= size]
        assert work(choice) <= min(map(work, fitting))
    works = list(map(work, chosen))
    assert works == sorted(works, reverse=True)
    assert works[-1] == 0
    assert len(set(works)) > 3
    too_small = fitting_recompute(experiment, SHAPE, limits[0] // 2)
    assert policy_memory(too_small, SHAPE).on_device <= limits[0]


def test_norms_that_may_be_fused_are_no_way_to_save_memory(configure: Configure) -> None:
    sizes = [policy_memory(o, SHAPE).on_device for o in all_settings(configure(*AUTO))]
    for kernels, saves in (("auto", False), ("local", True)):
        experiment = configure(*AUTO, f"policy.kernels={kernels}")
        chosen = [fitting_recompute(experiment, SHAPE, size).policy.recompute for size in sizes]
        assert any("layernorm" in getattr(choice, "modules", ()) for choice in chosen) == saves


def test_all_processes_of_a_run_fit(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    experiment = configure(*AUTO)
    least = plan_run(with_recompute(experiment, FullRecompute(name="full")), machine(10**12)).processes
    needed = sum(process.total * process.count for process in least)
    tight, roomy = machine(round(needed * 1.01)), machine(10**12)
    assert isinstance(with_settled_recompute(experiment, roomy).policy.recompute, NoRecompute)
    settled = with_settled_recompute(experiment, tight)
    assert not isinstance(settled.policy.recompute, NoRecompute | AutoRecompute)
    assert plan_run(settled, tight).problems == ()
    (problem,) = plan_run(with_recompute(experiment, NoRecompute()), tight).problems
    assert "all processes need about" in problem.fix


def machine(memory_bytes: int, *gpus: Gpu) -> Machine:
    return Machine(cores=8, memory_bytes=memory_bytes, shared_memory_bytes=10**10, gpus=gpus)


def test_an_explicit_setting_and_an_unknown_memory(configure: Configure) -> None:
    explicit = configure("policy.recompute={name: full}")
    assert with_settled_recompute(explicit, machine(10**6)) is explicit
    elsewhere = configure(*AUTO, "cluster.gpus_per_node=8")  # of which this machine has none
    assert isinstance(with_settled_recompute(elsewhere, machine(10**6)).policy.recompute, NoRecompute)


@pytest.mark.parametrize("words", [("cluster.num_nodes=2",), ()], ids=["two nodes", "a cluster of Ray"])
def test_gpus_of_a_cluster_are_taken_to_be_those_of_this_machine(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A run that starts on a node of a cluster would recompute nothing, whatever its memory."""
    if not words:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    experiment = configure(*AUTO, "cluster.gpus_per_node=8", "policy.kernels=local", *words)
    full = policy_memory(with_recompute(experiment, FullRecompute(name="full")), SHAPE).on_device
    tight, roomy = (machine(10**12, Gpu("H100", size)) for size in (round(full * 1.05), 10**12))
    assert isinstance(with_settled_recompute(experiment, roomy).policy.recompute, NoRecompute)
    settled = with_settled_recompute(experiment, tight)
    assert not isinstance(settled.policy.recompute, NoRecompute | AutoRecompute)
    assert "for GPUs as those of this machine" in _settled(Chosen(settled), tight)
    assert "without GPUs nothing is recomputed" in _settled(Chosen(experiment), machine(10**12))


def test_layouts_are_listed_with_their_choice(configure: Configure) -> None:
    experiment = configure(*AUTO)
    two_copies = configure(*AUTO, "policy.layout.data_parallel_size=2")
    plain = policy_memory(with_recompute(two_copies, NoRecompute()), SHAPE).on_device
    found = {
        choice.layout.name: choice.recompute.described
        for choice in list_layouts(experiment, SHAPE, 2, plain - 1)
    }
    assert found["DP2"] != "nothing"
    assert "nothing" in found.values()  # where two ranks share the activations
