"""`policy.offload_activations`: what stays on the device, what it costs, and what the plan chooses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.policy import (
    ActivationOffloadConfig,
    FullRecompute,
    LayoutConfig,
    NoRecompute,
    PolicyConfig,
    RecomputeConfig,
)
from nemorl.models.registry import shape_from_config
from nemorl.plan.costs import Attained
from nemorl.plan.hardware import HARDWARE, Hardware, known_hardware
from nemorl.plan.layouts import list_layouts
from nemorl.plan.machine import Gpu, Machine
from nemorl.plan.memory import kept_elements, policy_memory
from nemorl.plan.problems import plan_run
from nemorl.plan.recompute import fitting, settled, with_recompute
from nemorl.plan.training_time import Lengths, Training
from nemorl.run.inspection import _settled
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG, write_model
from tests.plan.test_memory import MLP, NARROW, NARROW_LAYER

DEEP = {"num_hidden_layers": 64, "hidden_size": 512, "intermediate_size": 1536}
SHAPE = shape_from_config(CONFIG | DEEP, "config.json")
AUTO = (
    *("policy.offload_activations={layers: auto}", "policy.recompute={name: auto}"),
    *("policy.micro_batch_tokens=65536", "policy.precision=bfloat16", "cluster.gpus_per_node=2"),
)
NONE, FULL = NoRecompute(), FullRecompute(name="full")
H100 = HARDWARE["h100"]
# A link that is as fast as the memory of the device, and one that nothing hides.
FAST, SLOW = replace(H100, host_rate=H100.memory_rate), replace(H100, host_rate=1e8)


def with_layers(experiment: Experiment, layers: int | None, recompute: RecomputeConfig) -> Experiment:
    offload = None if layers is None else ActivationOffloadConfig(layers=layers)
    policy = experiment.policy.model_copy(update={"offload_activations": offload})
    return with_recompute(experiment.model_copy(update={"policy": policy}), recompute)


BLOCK = FullRecompute(name="full", method="block", num_layers=3)
TWO = FullRecompute(name="full", num_layers=2)


@pytest.mark.parametrize(
    ("layers", "recompute", "stages", "on_device", "on_host"),
    [
        # Of eight layers; two pass, or more stay.
        (2, NONE, 1, 6 * NARROW_LAYER, 2 * NARROW_LAYER),
        (7, NONE, 1, 2 * NARROW_LAYER, 7 * NARROW_LAYER),
        (8, NONE, 1, 2 * NARROW_LAYER, 8 * NARROW_LAYER),
        (9, NONE, 1, 2 * NARROW_LAYER, 8 * NARROW_LAYER),
        # Inputs alone, and one layer that is computed again.
        (7, FULL, 1, 2 * 100 + NARROW_LAYER, 7 * 100),
        (5, TWO, 1, 2 * 100 + 2 * NARROW_LAYER, 2 * 100),  # the inputs of four layers
        (2, BLOCK, 1, 100 + 5 * NARROW_LAYER, 2 * 100),  # which are free when others are computed again
        (7, BLOCK, 1, 2 * NARROW_LAYER, 3 * 100 + 4 * NARROW_LAYER),
        # Of four layers, with two micro-batches in flight.
        (3, NONE, 2, (1 + 2) * NARROW_LAYER, 2 * 3 * NARROW_LAYER),
        (4, NONE, 2, 2 * NARROW_LAYER, 2 * 4 * NARROW_LAYER),
    ],
)
def test_what_is_kept_of_a_token(
    layers: int, recompute: RecomputeConfig, stages: int, on_device: int, on_host: int
) -> None:
    policy = PolicyConfig(
        model_path=Path("model"),
        layout=LayoutConfig(pipeline_parallel_size=stages),
        recompute=recompute,
        offload_activations=ActivationOffloadConfig(layers=layers),
    )
    kept = kept_elements(NARROW, policy, 0, 7, 100)
    gradients = MLP  # of what the MLP of a layer keeps
    assert (kept.on_device, kept.on_host) == (7 * (on_device + gradients), 7 * on_host)


def seconds(experiment: Experiment, hardware: Hardware) -> float:
    lengths = Lengths(prompt=1000, response=1000, limit=2000, sigma=0)
    return Training(experiment.policy, SHAPE, hardware, Attained(), lengths).update(64).seconds


def test_copies_that_computation_hides_cost_nothing(configure: Configure) -> None:
    experiment = configure(*AUTO)
    plain = seconds(with_layers(experiment, None, NONE), H100)
    for recompute in (NONE, FULL):
        alone = seconds(with_layers(experiment, None, recompute), H100)
        assert seconds(with_layers(experiment, 3, recompute), FAST) == alone
        slow = [seconds(with_layers(experiment, layers, recompute), SLOW) for layers in (1, 2, 3)]
        assert plain <= alone < slow[0] < slow[1] < slow[2]
        # Layers are equal.
        assert slow[2] - slow[1] == pytest.approx(slow[1] - slow[0])


def test_a_copy_that_nothing_hides_takes_its_bytes_both_ways(configure: Configure) -> None:
    """2,000 tokens in a sequence, 32 of them in a micro-batch of 65,536 tokens, 64 sequences."""
    experiment = configure(*AUTO, "policy.max_sequence_length=2048")
    slower = [replace(H100, host_rate=rate) for rate in (1e6, 2e6)]
    one, two = (seconds(with_layers(experiment, 1, FULL), hardware) for hardware in slower)
    moved = 2 * 64 * 2000 * 512 * 2  # there and back, of bfloat16
    assert one - two == pytest.approx(moved / (1e6 * Attained().link) / 2, rel=0.01)


@pytest.fixture
def sizes(configure: Configure) -> Callable[[RecomputeConfig], int]:
    """Bytes of a rank without offloading."""
    experiment = configure(*AUTO)

    def of(recompute: RecomputeConfig) -> int:
        return policy_memory(with_layers(experiment, None, recompute), SHAPE).on_device

    return of


def test_the_cheaper_way_is_chosen(configure: Configure, sizes: Callable[[RecomputeConfig], int]) -> None:
    experiment, memory = configure(*AUTO), round(0.8 * sizes(NONE))

    fast, slow = (fitting(experiment, SHAPE, memory, hardware) for hardware in (FAST, SLOW))

    policy = fast.experiment.policy
    assert policy.recompute == NONE
    assert policy.offloaded_layers > 0
    fewer = with_layers(experiment, policy.offloaded_layers - 1 or None, NONE)
    assert policy_memory(fast.experiment, SHAPE).on_device <= memory < policy_memory(fewer, SHAPE).on_device
    assert "s without offloading (recompute " in fast.reason

    policy = slow.experiment.policy
    assert policy.recompute != NONE
    assert policy.offload_activations is None
    assert "s with offloading (recompute " in slow.reason
    assert policy_memory(slow.experiment, SHAPE).on_device <= memory


def test_both_where_recomputation_alone_does_not_fit(
    configure: Configure, sizes: Callable[[RecomputeConfig], int]
) -> None:
    experiment = configure(*AUTO)
    least = policy_memory(with_layers(experiment, 64, FULL), SHAPE).on_device
    assert least < sizes(FULL)

    chosen = fitting(experiment, SHAPE, least, SLOW)

    assert policy_memory(chosen.experiment, SHAPE).on_device <= least
    assert chosen.experiment.policy.offloaded_layers > 0
    assert "without offloading nothing fits" in chosen.reason
    nothing = fitting(experiment, SHAPE, least // 2, SLOW).experiment
    assert policy_memory(nothing, SHAPE).on_device <= least


@pytest.mark.parametrize("layers", [0, 2])
def test_recomputation_is_chosen_next_to_given_layers(configure: Configure, layers: int) -> None:
    given = AUTO[1:] if not layers else (f"policy.offload_activations={{layers: {layers}}}", *AUTO[1:])
    chosen = fitting(configure(*given), SHAPE, 10**12, FAST)
    assert chosen.experiment.policy.recompute == NONE
    assert chosen.experiment.policy.offloaded_layers == layers
    assert chosen.reason == ""


def test_layers_are_chosen_next_to_given_recomputation(
    configure: Configure, sizes: Callable[[RecomputeConfig], int]
) -> None:
    experiment = configure(AUTO[0], "policy.recompute={name: full}", *AUTO[2:])
    roomy, tight = (fitting(experiment, SHAPE, sizes(FULL) - less, SLOW).experiment.policy for less in (0, 1))
    assert roomy.offload_activations is None
    assert (tight.recompute, tight.offloaded_layers) == (FULL, 1)


@pytest.mark.parametrize(
    "hardware",
    [None, replace(FAST, cores=8), replace(FAST, host_rate=0.0)],
    ids=["unknown", "CPU", "no link"],
)
def test_nothing_is_offloaded_without_rates(
    configure: Configure, sizes: Callable[[RecomputeConfig], int], hardware: Hardware | None
) -> None:
    policy = fitting(configure(*AUTO), SHAPE, round(0.8 * sizes(NONE)), hardware).experiment.policy
    assert policy.offload_activations is None
    assert policy.recompute != NONE
    without_gpus = configure(*AUTO[:-1])
    assert settled(without_gpus, machine(10**12)).experiment.policy.offload_activations is None


def machine(memory_bytes: int, *gpus: Gpu) -> Machine:
    return Machine(cores=8, memory_bytes=memory_bytes, shared_memory_bytes=10**10, gpus=gpus)


def test_a_run_is_settled_by_its_gpu_and_its_host(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a host has no room, more is recomputed; what is given is refused."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    experiment = configure(*AUTO, f"policy.model_path={write_model(tmp_path / 'deep', **DEEP)}")
    least = policy_memory(with_layers(experiment, 64, FULL), SHAPE)
    gpu = Gpu(H100.device_name, least.on_device)
    assert known_hardware(gpu.name) is H100

    roomy = machine(10**12, gpu, gpu)
    choice = settled(experiment, roomy)

    assert choice.experiment.policy.offloaded_layers > 0
    text = _settled(choice, roomy)
    assert "and to offload activations of the first" in text
    assert "without offloading nothing fits" in text
    assert not any("offload" in problem.field for problem in plan_run(choice.experiment, roomy).problems)

    on_host = policy_memory(choice.experiment, SHAPE).activations_on_host
    full = machine(on_host // 2, gpu, gpu)
    (problem,) = (p for p in plan_run(choice.experiment, full).problems if "offload" in p.field)
    assert (problem.field, problem.value) == (
        "policy.offload_activations.layers",
        choice.experiment.policy.offloaded_layers,
    )
    assert "offloaded activations, and it has" in problem.fix
    assert f"{on_host / 1e9:.1f} GB of that" in problem.fix
    other = settled(experiment, full).experiment
    assert policy_memory(other, SHAPE).activations_on_host != on_host


def test_layouts_are_listed_with_their_choice(
    configure: Configure, sizes: Callable[[RecomputeConfig], int]
) -> None:
    choices = list_layouts(configure(*AUTO), SHAPE, 1, round(0.8 * sizes(NONE)), hardware=FAST)
    (choice,) = choices
    assert choice.offload is not None
    assert choice.fits
    assert "without offloading" in choice.reason
