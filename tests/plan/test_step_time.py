"""Time of training, generation and steps: by hand for small cases, and by properties."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.config.experiment import Experiment
from nemorl.config.policy import FullRecompute, LayoutConfig
from nemorl.models.registry import shape_from_config
from nemorl.plan.costs import Attained, Cost
from nemorl.plan.generation_time import Engine
from nemorl.plan.hardware import HARDWARE, Hardware
from nemorl.plan.memory import stage_parameters
from nemorl.plan.operations import forward_attention, forward_products
from nemorl.plan.recompute import with_recompute
from nemorl.plan.step_time import Measured, RunPlan, StepTime, UnplannedRun, fit
from nemorl.plan.training_time import Lengths, MicroBatches, Training, pack
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG

SHAPE = shape_from_config(CONFIG, "config.json")
# Everything but what a test gives is free.
FREE = Hardware("free", "free", 1e30, 1e30, 1, 1e30, 1e30, 8, 1e30, 1e30, 1e30)
IDLE = Attained(
    *(1.0, 1.0, 1.0, 1.0),
    launch=0,
    expert_launch=0,
    decode_layer=0,
    sequence=0,
    step=0,
    refit=1,
    message=0,
    far_message=0,
    expert_load=1,
)
SAME = Lengths(prompt=10, response=30, limit=30)
GPU = (
    "policy.precision=bfloat16",
    "policy.max_sequence_length=4096",
    "policy.micro_batch_tokens=4096",
    "generation={backend: vllm, max_new_tokens: 1024}",
    "cluster.gpus_per_node=8",
)
WIDE = Lengths(prompt=100, response=500, limit=1024, sigma=1.0)


# Lengths and micro-batches


@pytest.mark.parametrize(("mean", "sigma"), [(100, 0.5), (500, 1.0), (900, 0.5), (30, 2.0)])
def test_lengths_have_the_mean_and_end_at_the_limit(mean: float, sigma: float) -> None:
    lengths = Lengths(prompt=0, response=mean, limit=1000, sigma=sigma)
    parts = lengths.parts(64)
    assert fmean(parts) == pytest.approx(mean, rel=1e-3)
    assert parts == sorted(parts)
    assert parts[-1] <= 1000
    # A log-normal: the logarithms of what is not cut are sigma apart for one standard deviation.
    assert math.log(lengths.quantile(0.158655) / lengths.quantile(0.022750)) == pytest.approx(sigma, rel=1e-3)


def test_measured_lengths_are_taken_as_they_are() -> None:
    """Three in four of 8 tokens, and the others between 8 and 128, which no log-normal has."""
    lengths = Lengths(prompt=8, response=23, limit=128, quantiles=(8, 8, 8, 8, 128))
    assert lengths.parts(4) == [8, 8, 8, 68]
    assert (lengths.quantile(0.0), lengths.quantile(0.875), lengths.quantile(1.0)) == (8, 68, 128)
    assert lengths.uncut == 23

    # Of 31 tokens each, prefixes leave 11.5 out of two: half of what a response has.
    packed = replace(lengths, shared=1 - 11.5 / 31).packed(4)
    assert (packed.prompt, packed.response) == (0, 11.5)
    assert packed.quantiles == (4, 4, 4, 4, 64)


def test_tokens_see_half_of_their_sequence() -> None:
    assert SAME.parts(3) == [30, 30, 30]
    assert (SAME.sequence, SAME.seen, SAME.context) == (40, 20, 25)
    # Longer sequences have more of the tokens.
    assert WIDE.seen > WIDE.sequence / 2


def test_micro_batches_hold_complete_sequences() -> None:
    assert pack(SAME, 5, 100) == MicroBatches(count=3, tokens=5 * 40 / 3, fullest=80)
    assert pack(SAME, 5, 40) == MicroBatches(count=5, tokens=40, fullest=40)
    assert pack(SAME, 1, 1000) == MicroBatches(count=1, tokens=40, fullest=40)
    # 1,024 sequences are drawn as 256, four times.
    assert pack(SAME, 1024, 80) == MicroBatches(count=512, tokens=80, fullest=80)


@given(st.integers(1, 300), st.integers(1100, 9000), st.floats(0.1, 1.5))
@settings(max_examples=30)
def test_micro_batches_have_all_tokens_and_fit(sequences: int, capacity: int, sigma: float) -> None:
    lengths = replace(WIDE, sigma=sigma, limit=1000)
    batches = pack(lengths, sequences, capacity)
    assert batches.fullest <= capacity
    drawn = min(sequences, 256)
    mean = lengths.prompt + fmean(lengths.parts(drawn))
    assert batches.count * batches.tokens == pytest.approx(mean * sequences)
    assert batches.count >= mean * sequences / capacity


# Training


def training(experiment: Experiment, hardware: Hardware, attained: Attained = IDLE) -> Training:
    return Training(experiment.policy, SHAPE, hardware, attained, SAME)


def test_operations_of_training_are_six_for_each_parameter_and_token(configure: Configure) -> None:
    """Forward 2, backward 4, and attention."""
    work = training(configure(*GPU), FREE).operations(8)
    assert work == 3 * 8 * 40 * (forward_products(SHAPE) + forward_attention(SHAPE, 20))


def test_the_passes_take_their_operations(configure: Configure) -> None:
    """With single multiprocessors and full tiles no operation is wasted: 128 sequences of 128 tokens."""
    shape = replace(SHAPE, vocab_size=1024)
    slow = replace(FREE, operations=1e12)
    lengths = Lengths(prompt=0, response=128, limit=128)
    policy = configure(*GPU).policy.model_copy(update={"micro_batch_tokens": 128 * 128})
    plan = Training(policy, shape, slow, IDLE, lengths)
    attention = forward_attention(shape, 64)
    tokens = 128 * 128
    forward = tokens * (forward_products(shape) + attention) / 1e12
    assert plan.logprobs(128).compute == pytest.approx(forward)
    both = tokens * (3 * forward_products(shape) + 3.5 * attention) / 1e12
    assert plan.update(128).compute == pytest.approx(both)
    full = with_recompute(configure(*GPU), FullRecompute(name="full")).policy
    full = full.model_copy(update={"micro_batch_tokens": 128 * 128})
    again = replace(plan, policy=full).update(128).compute
    in_layers = tokens * (forward_products(shape) - 2 * 128 * 1024 + attention) / 1e12
    assert again == pytest.approx(both + in_layers, rel=0.02)  # the norms' operations


def test_stages_wait_for_the_first_and_the_last(configure: Configure) -> None:
    """Launches only: a second for a layer forward, two backward; 4 micro-batches of 3 layers, 2 stages."""
    fields = ("policy.layout.pipeline_parallel_size=2", "policy.micro_batch_tokens=4096")
    policy = configure(*GPU, *fields).policy.model_copy(update={"micro_batch_tokens": 40})
    plan = Training(policy, SHAPE, FREE, replace(IDLE, launch=1.0), SAME)
    cost = plan.update(4)
    assert cost.latency == pytest.approx(4 * 3 * 3)
    assert cost.bubble == pytest.approx(1 * 3 * 3)
    assert plan.logprobs(4).bubble == pytest.approx(3)
    interleaved = policy.layout.model_copy(update={"virtual_pipeline_parallel_size": 3})
    policy = policy.model_copy(update={"layout": interleaved})
    assert replace(plan, policy=policy).update(4).bubble == pytest.approx(3)


def test_the_first_micro_batch_fills_a_pipeline_stage_by_stage(configure: Configure) -> None:
    """Two layers, and four with the head: the last stage waits once for the first, and not for itself."""
    layout = {"pipeline_parallel_size": 2, "layers_in_first_stage": 2, "layers_in_last_stage": 4}
    policy = configure(*GPU, "policy.layout.pipeline_parallel_size=2").policy
    policy = policy.model_copy(update={"micro_batch_tokens": 40, "layout": LayoutConfig(**layout)})
    cost = Training(policy, SHAPE, FREE, replace(IDLE, launch=1.0), SAME).update(4)
    assert cost.latency == pytest.approx(4 * 4 * 3)
    assert cost.bubble == pytest.approx(2 * 3)


def test_a_stage_that_works_alone_has_the_memory_of_a_machine_for_itself(configure: Configure) -> None:
    """Memory only. One micro-batch on two stages takes as long as on one process, two take the half each."""
    machine = replace(FREE, memory_rate=1e9, cores=2)

    def forward(stages: int, sequences: int) -> float:
        policy = configure(*GPU, f"policy.layout.pipeline_parallel_size={stages}").policy
        policy = policy.model_copy(update={"micro_batch_tokens": 40})
        hardware = machine.shared_by(stages)
        return Training(policy, SHAPE, hardware, IDLE, SAME).logprobs(sequences).seconds

    assert forward(2, 1) == pytest.approx(forward(1, 1))
    assert forward(2, 2) > 1.4 * forward(1, 2)  # 3 times a half of the layers, at half of the bandwidth


def test_tensor_parallelism_sends_the_hidden_state(configure: Configure) -> None:
    """A link of 1 byte a second: 8 messages in 6 layers, half of 128 elements of two bytes, 160 tokens."""
    fields = ("policy.layout.tensor_parallel_size=2", "policy.layout.sequence_parallel=true")
    plan = training(configure(*GPU, *fields), replace(FREE, domain_rate=1.0))
    assert plan.update(4).link == pytest.approx(160 * 6 * 8 * 128 / 2 * 2)
    assert plan.logprobs(4).link == pytest.approx(160 * 6 * 4 * 128 / 2 * 2)


def test_copies_reduce_gradients_and_gather_weights(configure: Configure) -> None:
    plan = training(configure(*GPU, "policy.layout.data_parallel_size=4"), replace(FREE, domain_rate=1.0))
    parameters = stage_parameters(SHAPE, LayoutConfig(), 0).total
    assert plan.update(4).link == pytest.approx(parameters * (4 + 2) * 3 / 4)


def test_the_optimizer_reads_and_writes_its_state(configure: Configure) -> None:
    """Adam in bfloat16: 12 bytes of state read and written, gradients of 4 read, weights of 2 written."""
    experiment = configure(*GPU)
    slow = replace(FREE, memory_rate=1.0)
    parameters = stage_parameters(SHAPE, LayoutConfig(), 0).total
    assert training(experiment, slow)._optimizer.memory == pytest.approx(parameters * (2 * 12 + 4 + 2))
    on_host = configure(*GPU, "policy.optimizer.on_host=true")
    cost = training(on_host, replace(FREE, host_rate=1.0))._optimizer
    assert cost == Cost(link=pytest.approx(parameters * 6))


# Generation


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    """One sequence on a device whose memory alone takes time."""
    engine = Engine(SHAPE, replace(FREE, memory_rate=1.0), IDLE)
    matrices = 6 * (128 * 256 + 128 * 128 + 3 * 128 * 384) + 128 * 1000
    moved = 6 * (128 + 256 + 128 + 128 + 128 + 768 + 384 + 128) + 128 + 1000  # inputs and outputs
    cache = 6 * 50 * 2 * 64
    assert engine.decode_step(1, 50).memory == pytest.approx(2 * (matrices + moved + cache) + 16 * 1000)
    assert engine.weights == 2 * (matrices + 128 * 1000)
    eight_bits = replace(engine, cache_bytes=1).decode_step(1, 50).memory
    assert engine.decode_step(1, 50).memory - eight_bits == pytest.approx(cache)


def test_a_step_reads_the_experts_that_its_sequences_take() -> None:
    """Of 6 experts 2 are taken: by two sequences 1 - (2/3)^2 of them, on average."""
    fields = {
        **CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    shape = shape_from_config(fields, "config.json")
    engine = Engine(shape, replace(FREE, memory_rate=1.0), IDLE)
    one, two = (engine.decode_step(rows, 0).memory for rows in (1, 2))
    experts = 6 * 2 * (128 * 128 + 64 * 128)  # bytes of one in all layers
    more = (6 * (1 - (2 / 3) ** 2) - 2) * experts
    # Inputs and outputs of a row: 8 query and 4 key-value heads of 128 here, two experts, head; its logits.
    of_layer = 128 + 16 * 128 + 8 * 128 + 128 + 2 * (128 + 128 + 64 + 128)
    row = 2 * (6 * of_layer + 128 + 1000) + 16 * 1000
    assert two - one == pytest.approx(more + row)


def test_latency_of_a_step() -> None:
    attained = replace(IDLE, decode_layer=1.0, sequence=0.5, message=0.25, far_message=2.0)
    assert Engine(SHAPE, FREE, attained).decode_step(4, 0).latency == 6 * 1.0 + 4 * 0.5
    assert Engine(SHAPE, FREE, attained, tensor=2).decode_step(4, 0).latency == 6 * (1.0 + 2 * 0.25) + 2
    far = replace(FREE, domain=1)
    assert Engine(SHAPE, far, attained, tensor=2).decode_step(4, 0).latency == 6 * (1.0 + 2 * 2.0) + 2


def test_a_batch_takes_the_steps_of_its_longest_sequence() -> None:
    """A second for each sequence in a step: as many seconds as tokens, if nothing else takes time."""
    engine = Engine(SHAPE, FREE, replace(IDLE, sequence=1.0))
    assert engine.batch(16, 4, SAME, 16).seconds == pytest.approx(16 * 30)
    steps = Engine(SHAPE, FREE, replace(IDLE, decode_layer=1 / 6))
    assert steps.batch(16, 4, SAME, 16).seconds == pytest.approx(30)
    assert steps.batch(16, 4, WIDE, 16).seconds == pytest.approx(WIDE.quantile(1 - 0.5 / 16))
    rare = replace(WIDE, limit=8192)
    assert steps.batch(16, 4, rare, 4096).straggler > steps.batch(16, 4, rare, 16).straggler
    # Four at a time: 12 follow as others end.
    few = replace(steps, max_sequences=4)
    assert few.batch(16, 4, SAME, 16).seconds == pytest.approx(4 * 30)


def test_prompts_are_read_once_a_group() -> None:
    engine = Engine(SHAPE, replace(FREE, operations=1.0), IDLE)
    work = forward_products(SHAPE) + forward_attention(SHAPE, 5)
    assert engine.prefill(40, 10) == Cost(compute=40 * work)
    assert engine.batch(16, 4, SAME, 16).seconds > 4 * 10 * work


def test_the_cache_bounds_what_runs_together() -> None:
    """Keys and values of 2 x 64 elements in 6 layers for each token; sequences have 10 + 25 on average."""
    engine = Engine(SHAPE, FREE, IDLE)
    token = 2 * 64 * 2 * 6
    room = replace(FREE, memory_bytes=(engine.weights + 350 * token) / 0.9)
    bounded = replace(engine, hardware=room)
    assert bounded.cached_tokens == pytest.approx(350)
    assert bounded.concurrency(SAME) == pytest.approx(10)
    assert replace(bounded, max_sequences=4).concurrency(SAME) == 4
    assert replace(engine, hardware=replace(FREE, memory_bytes=1.0)).concurrency(SAME) == 1


# Steps


def step(experiment: Experiment, hardware: Hardware) -> StepTime:
    return RunPlan(experiment, SHAPE, hardware, WIDE).step()


def test_stages_of_a_step_follow_each_other_or_overlap(configure: Configure) -> None:
    together = step(configure(*GPU, "generation.colocated=true"), HARDWARE["h100"])
    assert set(together.stages) == {"generation", "training", "refit", "offload", "other"}
    assert together.seconds == pytest.approx(sum(cost.seconds for cost in together.stages.values()))
    assert together.devices == 1
    shared = "generation.colocated=true", "algorithm.max_staleness=2"
    in_turn = step(configure(*GPU, *shared), HARDWARE["h100"])
    assert in_turn.seconds == pytest.approx(sum(cost.seconds for cost in in_turn.stages.values()))
    generation = in_turn.stages["generation"].seconds
    rest = together.seconds - together.stages["generation"].seconds
    assert in_turn.seconds - generation == pytest.approx(rest)

    apart = step(configure(*GPU), HARDWARE["h100"])
    assert apart.devices == 2
    assert apart.seconds == pytest.approx(sum(cost.seconds for cost in apart.stages.values()))
    busy = apart.stages["training"].seconds + apart.stages["refit"].seconds
    assert apart.idle["policy"] == pytest.approx(1 - busy / apart.seconds)

    ahead = step(configure(*GPU, "algorithm.max_staleness=1"), HARDWARE["h100"])
    seconds = {name: cost.seconds for name, cost in ahead.stages.items()}
    longer = max(seconds["generation"], seconds["training"] + seconds["other"])
    assert ahead.seconds == pytest.approx(longer + seconds["refit"])
    assert min(ahead.idle.values()) >= 0
    # Batches of two steps at a time, in the launches of one.
    two = step(configure(*GPU, "algorithm.max_staleness=2"), HARDWARE["h100"]).stages["generation"].seconds
    assert seconds["generation"] / 2 < two < seconds["generation"] * 0.75
    assert generation == pytest.approx(two)


def test_passes_follow_from_the_algorithm(configure: Configure) -> None:
    kl = "algorithm.kl={coefficient: 0.01}"
    assert "reference" in step(configure(*GPU, kl), HARDWARE["h100"]).stages
    two = step(configure(*GPU, "algorithm.num_minibatches=2"), HARDWARE["h100"])
    assert "logprobs" in two.stages
    assert two.stages["training"].seconds > step(configure(*GPU), HARDWARE["h100"]).stages["training"].seconds


def test_values_of_a_step_by_their_definition(configure: Configure) -> None:
    result = step(configure(*GPU), HARDWARE["h100"])
    tokens = 32 * 600
    assert result.trained_tokens == tokens
    assert result.tokens_per_second == pytest.approx(tokens / result.seconds)
    # Two devices at 3 an hour.
    assert result.cost_per_million(3.0) == pytest.approx(2 * 3 / 3600 * result.seconds / tokens * 1e6)
    lengths = replace(WIDE, prompt=100 / 8)  # prompts of the 8 samples of a group are computed once
    plan = RunPlan(configure(*GPU), SHAPE, HARDWARE["h100"], WIDE).training
    assert plan.lengths == lengths
    share = plan.operations(32) / result.stages["training"].seconds / 989e12
    assert result.training_utilization == pytest.approx(share)
    assert result.utilization == pytest.approx(plan.operations(32) / result.seconds / 2 / 989e12)


def test_a_refit_moves_what_a_device_receives_or_sends(configure: Configure) -> None:
    slow = replace(FREE, domain_rate=1.0)
    two = configure(*GPU, "generation.tensor_parallel_size=2")
    plan = RunPlan(two, SHAPE, slow, WIDE, IDLE)
    assert plan.refit_cost.link == plan.engine.weights  # sent by the only policy process
    more = configure(*GPU, "generation.tensor_parallel_size=2", "policy.layout.data_parallel_size=4")
    assert RunPlan(more, SHAPE, slow, WIDE, IDLE).refit_cost.link == plan.engine.weights / 2
    gathering = replace(IDLE, gathers_weights=True)
    assert RunPlan(more, SHAPE, slow, WIDE, gathering).refit_cost.link == plan.engine.weights


def test_runs_without_a_plan_are_refused(configure: Configure) -> None:
    with pytest.raises(UnplannedRun, match=r"policy\.precision = float32: .* set it to bfloat16"):
        step(configure(), HARDWARE["h100"])
    server = "generation={backend: openai, base_url: 'http://127.0.0.1:1/v1', model: a}"
    with pytest.raises(UnplannedRun, match=r"generation\.backend = openai: .* choose an engine"):
        step(configure("policy.precision=bfloat16", server), HARDWARE["h100"])


_RATES = ("operations", "memory_rate", "domain_rate", "network_rate", "host_rate")


@given(st.sampled_from(_RATES), st.floats(1.0, 20.0), st.sampled_from(sorted(HARDWARE)), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_faster_hardware_never_makes_a_step_slower(
    steps: Sequence[Experiment], rate: str, times: float, name: str, which: int
) -> None:
    slow = HARDWARE[name]
    fast = replace(slow, **{rate: getattr(slow, rate) * times})
    before, after = (step(steps[which], device) for device in (slow, fast))
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert all(0 <= share <= 1 for share in after.idle.values())
    assert 0 < after.utilization <= after.training_utilization < 1


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Experiment]:
    """Four runs: shared devices, engines ahead of training, stages, tensor parallelism."""
    from nemorl.config.load import load_experiment
    from tests.config.experiments import write

    file = write(tmp_path_factory.mktemp("steps"))
    variants: list[tuple[str, ...]] = [
        ("generation.colocated=true",),
        ("algorithm.max_staleness=2",),
        ("policy.layout.pipeline_parallel_size=2",),
        ("policy.layout.tensor_parallel_size=2", "policy.layout.sequence_parallel=true"),
    ]
    return [load_experiment(file, [*GPU, *variant]) for variant in variants]


# Fitting


def test_a_fit_finds_constants_that_explain_the_steps() -> None:
    """Seconds that two constants make, by different parts."""
    true = Attained(step=20.0, sequence=5e-5)

    def planned(weight: float) -> Measured:
        def predicted(attained: Attained) -> float:
            return attained.step + weight * attained.sequence

        return Measured(predicted(true), predicted)

    found = fit([planned(weight) for weight in (0, 1e5, 1e6, 1e7)], Attained(), ("step", "sequence"))
    assert found.step == pytest.approx(20.0, rel=0.1)
    assert found.sequence == pytest.approx(5e-5, rel=0.1)
    assert replace(found, step=Attained().step, sequence=Attained().sequence) == Attained()


def test_a_fit_keeps_shares_at_most_one_and_what_steps_do_not_say() -> None:
    found = fit([Measured(1e-9, lambda attained: 1 / attained.matmul)], Attained(), ("matmul", "step"))
    assert found.matmul == 1.0
    assert found.step == Attained().step
