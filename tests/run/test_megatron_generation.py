"""A policy that samples its own tokens: runs against one with an engine, and where none could sample."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemorl.models.create import MAX_POSITIONS
from nemorl.models.registry import load_shape
from tests.run.runs import finish, lines, start, timeless, write_experiment

GENERATION = {"max_new_tokens": 6, "max_batch_size": 8, "max_kv_tokens": 1024, "stop_strings": ["3"]}
# What says who sampled, not what came of it.
OF_THE_ENGINE = ("generation/", "refit/", "logprob_gap/")


def experiment(folder: Path, model: Path, backend: str, **changes: object) -> Path:
    """Three steps with a validation at the last."""
    path = write_experiment(folder, model, backend, generation={**GENERATION, "backend": backend}, **changes)
    tree = yaml.safe_load(path.read_text())
    tree["algorithm"] |= {"num_steps": 3, "validation": {"period": 3}}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
def test_a_run_is_that_with_the_embedded_engine(folder: Path, model: Path) -> None:
    """The same samples by the same seeds, so the same metrics; weights go nowhere and the gap is rounding."""
    paths = [experiment(folder, model, backend) for backend in ("torch", "megatron")]
    for process in [start("train", path) for path in paths]:
        status, output = finish(process)
        assert status == 0, output
    engine, itself = (lines(path.with_suffix("")) for path in paths)
    assert len(itself) == len(engine) == 3
    for ours, theirs in zip(itself, engine, strict=True):
        metrics = {k: v for k, v in timeless(ours).items() if not k.startswith(OF_THE_ENGINE)}
        expected = {k: v for k, v in timeless(theirs).items() if not k.startswith(OF_THE_ENGINE)}
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5), f"step {ours.step}"
        assert 0 < ours.values["logprob_gap/max"] < 1e-4
        assert not any(key.startswith("refit/") for key in ours.values)
        assert ours.values["version/lag"] == 0
        assert ours.values["stop/stop"] > 0
    assert not list((folder / "megatron" / "logs").glob("generation-*")), "no engine is started"


def test_what_one_step_begins_the_next_one_completes(folder: Path, model: Path) -> None:
    """With staleness: sequences leave the processes before these train, and continue with new weights."""
    path = write_experiment(
        folder, model, "ahead", generation={**GENERATION, "backend": "megatron", "max_batch_size": 3},
        policy={"optimizer": {"name": "adam", "lr": 1e-2}},
        rewards=[{"function": "tests.run.rewards:differs"}], checkpointing={"period": 100},
        algorithm={"num_steps": 4, "validation": {"period": 2, "num_prompts": 2}, "max_staleness": 1},
    )  # fmt: skip
    status, output = finish(start("train", path))
    assert status == 0, output
    steps = lines(path.with_suffix(""))
    assert len(steps) == 4
    assert max(step.values["version/lag_max"] for step in steps) == 1
    assert max(step.values["version/spread"] for step in steps) > 0
    assert max(step.values["staleness/gap_max_0"] for step in steps) < 1e-4  # of the trained version
    assert all("validation/reward" in step.values for step in steps[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_experts_spread_over_copies_sample_and_learn(folder: Path, model: Path, staleness: int) -> None:
    """Copies that share experts go through the model together, also while only one has work.

    The step replays the choices of their routers, which come with the samples; not with staleness, where
    sequences are read again by routers of new weights.
    """
    out = folder / "mixture_model"
    config = Qwen3MoeConfig(
        vocab_size=load_shape(model).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((model / name).read_bytes())
    policy = {
        "layout": {"data_parallel_size": 2, "expert_parallel_size": 2},
        "offload": {"optimizer": True},
        "moe": {"router_replay": staleness == 0},
    }
    rewards = [{"function": "tests.run.rewards:differs"}]
    here = folder / f"experts_{staleness}"
    here.mkdir()
    algorithm = {"max_staleness": staleness}
    path = experiment(here, out, "megatron", policy=policy, rewards=rewards, algorithm=algorithm)
    status, output = finish(start("train", path))
    assert status == 0, output
    steps = lines(path.with_suffix(""))
    assert [step.step for step in steps] == [1, 2, 3]
    newest = "staleness/gap_max_0" if staleness else "logprob_gap/max"
    assert max(step.values[newest] for step in steps) < 1e-4
    assert steps[-1].values["kl/reference"] > 0

    status, output = finish(start("eval", path))
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "metric", "bound"),
    [
        ({"format": "int8", "train": "fake"}, "logprob_gap/max", 1e-4),
        # Ranges are measured on prompts before the first sample, and widen in the first two steps. An input
        # at the border of two values may fall to either side.
        (
            {"format": "fp8", "train": "fake", "activations": True, "calibration": {"prompts": 20}},
            "logprob_gap/mean",
            1e-3,
        ),
    ],
    ids=["weights", "weights and inputs"],
)
def test_a_policy_that_rounds_samples_as_it_trains(
    folder: Path, model: Path, quantization: dict[str, Any], metric: str, bound: float
) -> None:
    name = f"megatron_{quantization['format']}"
    path = write_experiment(
        folder, model, name, generation={**GENERATION, "backend": "megatron"},
        policy={"quantization": quantization}, data={"validation": None},
        algorithm={"num_steps": 3, "validation": {}}, checkpointing={"period": 100},
    )  # fmt: skip
    status, output = finish(start("train", path))
    assert status == 0, output
    steps = lines(path.with_suffix(""))
    assert len(steps) == 3
    assert max(s.values[metric] for s in steps) < bound
    assert all(s.values["updates/empty"] == 0 for s in steps)
