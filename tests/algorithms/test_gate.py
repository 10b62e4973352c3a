"""The gate over a real trainer and real engines, sound and wrong ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.algorithms.metrics import LogprobGapTooLarge, LogprobGate, versions_of
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.generation import OpenAIGenerationConfig, TorchGenerationConfig
from nemorl.data.packed import pack_trajectories
from nemorl.generation.torch_engine.engine import create_engine
from nemorl.generation.types import EngineOptions, SamplingParams
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.trajectories import StopReason, Trajectory, Turn
from tests.generation.examples import request, serve
from tests.megatron.cases import start_worker
from tests.megatron.examples import policy_config

VOCABULARY, LENGTH = 53, 48
GRPO = {"name": "grpo", "num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 4}


def model(folder: Path, seed: int, **changes) -> Path:
    """Random weights from a seed, with a config that `changes` may have spoilt."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH,
        "initializer_range": 0.15,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes, **changes)).save_pretrained(folder)
    return folder


def sampled(folder: Path, temperature: float = 1.0) -> list[Trajectory]:
    """What an engine with the weights of a folder samples."""
    engine = create_engine(TorchGenerationConfig(), EngineOptions(folder, folder, LENGTH))
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (8, 5)).astype(np.int32)
    asked = [
        request(prompt, f"{i}", SamplingParams(temperature), max_new_tokens=30, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    made = serve(engine, asked)
    return [trajectory(asked[i].prompt, made[f"{i}"], i) for i in range(len(asked))]


def trajectory(prompt, completion, group: int) -> Trajectory:
    given, new = np.zeros(len(prompt)), np.ones(len(completion.tokens))
    return Trajectory(
        tokens=np.concatenate([prompt, completion.tokens]),
        loss_mask=np.concatenate([given, new]).astype(bool),
        logprobs=np.concatenate([given, completion.logprobs]).astype(np.float32),
        versions=np.concatenate([given - 1, completion.versions]).astype(np.int32),
        turns=(Turn(len(prompt), len(prompt) + len(new), StopReason.LENGTH),),
        rewards={},
        reward=0.0,
        stop=StopReason.LENGTH,
        group=group,
        task=0,
    )


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Path:
    return model(tmp_path_factory.mktemp("right"), seed=0)


@pytest.fixture(scope="module")
def compare(right, tmp_path_factory):
    """The metrics of samples against a trainer that has the right weights and temperature 1."""
    rendezvous = tmp_path_factory.mktemp("meet") / "meet"
    worker = start_worker(0, 1, f"file://{rendezvous}", policy_config(right))

    def compare(trajectories: list[Trajectory]) -> dict[str, float]:
        worker.load_batch(pack_trajectories(trajectories, [0.0] * 8, [1.0] * 8))
        gap = worker.compute_logprobs([[0, 1, 2, 3], [4, 5, 6, 7]], old=True, reference=False)
        return {"logprob_gap/mean": gap.gap_mean, "logprob_gap/max": gap.gap_max}

    yield compare
    worker.close()


def gate(generation=None, **config) -> LogprobGate:
    return LogprobGate(OnlineConfig(**GRPO, **config), generation or TorchGenerationConfig())


def test_a_sound_engine_passes(right, compare):
    metrics = compare(sampled(right))
    assert 0 < metrics["logprob_gap/mean"] < 1e-5
    assert metrics["logprob_gap/mean"] < metrics["logprob_gap/max"] < 1e-4
    mine = gate(max_token_logprob_gap=1e-4)
    mine.check(metrics, range(1), 0)
    assert mine.compared


@pytest.mark.parametrize(
    ("wrong", "temperature"),
    [({"seed": 1}, 1.0), ({"seed": 0, "rms_norm_eps": 1.0}, 1.0), ({"seed": 0}, 0.6), ({"seed": 0}, 1.5)],
    ids=["weights", "norm", "cold", "hot"],
)
def test_a_wrong_engine_stops_the_run_with_the_likely_causes(compare, tmp_path, wrong, temperature):
    metrics = compare(sampled(model(tmp_path, **wrong), temperature))
    with pytest.raises(LogprobGapTooLarge) as stop:
        gate().check(metrics, range(1), 0)
    said = str(stop.value)
    assert f"the mean difference is {metrics['logprob_gap/mean']:.4g}, the largest" in said
    assert "algorithm.max_logprob_gap allows a mean of 0.2" in said
    for cause in ("other weights, or another tokenizer", "generation.sampling.temperature, which is 1,",
                  "top-p", "precision", "rope scaling, norm epsilon"):  # fmt: skip
        assert cause in said
    assert "stale" not in said


FIGURES = {"logprob_gap/mean": 0.1, "logprob_gap/max": 3.0}


def test_the_limit_of_a_token_is_one_of_its_own():
    gate(max_token_logprob_gap=3.0).check(FIGURES, range(1), 0)
    with pytest.raises(LogprobGapTooLarge, match=r"max_token_logprob_gap allows 2\.5 at a token"):
        gate(max_token_logprob_gap=2.5).check(FIGURES, range(1), 0)
    with pytest.raises(LogprobGapTooLarge, match="is nan"):
        gate().check({**FIGURES, "logprob_gap/mean": float("nan")}, range(1), 0)


def test_stale_tokens_are_named_first(right):
    server = OpenAIGenerationConfig(backend="openai", base_url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(
        LogprobGapTooLarge, match=r"stale weights: tokens are of versions 3 to 4, .* of 5"
    ) as e:
        gate(server, max_logprob_gap=0.01).check(FIGURES, range(3, 5), 5)
    assert "this back end gets none from the run" in str(e.value)
    with pytest.raises(LogprobGapTooLarge, match="an update so large that the policy broke down"):
        gate(max_logprob_gap=0.01).check(FIGURES, range(5, 6), 5)


def test_of_stale_samples_the_youngest_count():
    """The rest differ from the trainer by updates."""
    ages = {
        "staleness/gap_1": 0.05,
        "staleness/gap_max_1": 0.4,
        "staleness/gap_2": 0.5,
        "staleness/gap_max_2": 3.0,
    }
    mine = gate(max_staleness=2, max_logprob_gap=0.03, max_token_logprob_gap=0.25)  # 0.06 and 0.5 at age 1
    mine.check({**FIGURES, "staleness/gap_max_0": 0.0, **ages}, range(3, 5), 5)
    for name in ("staleness/gap_1", "staleness/gap_max_1"):
        with pytest.raises(
            LogprobGapTooLarge, match=r"the age of the tokens, 1, as much again(.|\n)*: sequences keep"
        ):
            mine.check({**FIGURES, **ages, name: 0.6}, range(3, 5), 5)
    younger = {**ages, "staleness/gap_0": 0.02, "staleness/gap_max_0": 0.2}
    mine.check({**FIGURES, **younger}, range(3, 6), 5)
    with pytest.raises(LogprobGapTooLarge, match=r"allows a mean of 0\.03\. "):
        mine.check({**FIGURES, **younger, "staleness/gap_0": 0.04}, range(3, 6), 5)


def test_the_first_batch_and_those_of_the_period_are_compared_before_they_are_learned():
    mine = gate(logprob_gap_period=3)
    assert mine.due(1)
    mine.check(FIGURES, range(1), 0)
    assert [step for step in range(2, 10) if mine.due(step)] == [3, 6, 9]
    first_only = gate()
    first_only.check(FIGURES, range(1), 0)
    assert not any(first_only.due(step) for step in range(2, 10))


def test_versions_of_a_batch(right):
    trajectories = sampled(right)
    summaries = tuple(summarize([t], row) for row, t in enumerate(trajectories))
    assert versions_of([GroupSummary(0, 0, None, summaries)]) == range(1)
    stale = replace(summaries[0], min_version=-1, max_version=7, error="lost", trains=False)
    assert versions_of([GroupSummary(0, 0, None, (*summaries, stale))]) == range(1)
    assert not versions_of([])


def test_a_guard_of_the_gap_decides_after_the_first_batch():
    guarded = LogprobGate(OnlineConfig(**GRPO, max_logprob_gap=0.01), TorchGenerationConfig(), guarded=True)
    with pytest.raises(LogprobGapTooLarge):
        guarded.check(FIGURES, range(1), 0)
    guarded.check(FIGURES, range(1, 2), 1)
