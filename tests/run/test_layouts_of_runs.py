"""A layout is a line of YAML, and the metrics of a whole run do not notice it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemorl.models.create import MAX_POSITIONS
from nemorl.models.registry import load_shape
from nemorl.observe.metrics import StepMetrics
from tests.run.runs import finish, lines, start, timeless, write_experiment

# What says how the work was divided, not what came of it. Tokens that sequences of a micro-batch begin with
# count once in the operations, so they depend on which sequences share a micro-batch.
OF_THE_LAYOUT = ("packing/", "balance/", "flops/")


@pytest.fixture(scope="module")
def mixture(folder: Path, model: Path) -> Path:
    """Four experts of which two serve a token, with the dense model's tokenizer."""
    torch.manual_seed(4)
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
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    out = folder / "mixture"
    Qwen3MoeForCausalLM(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((model / name).read_bytes())
    return out


def run(path: Path) -> list[StepMetrics]:
    status, output = finish(start("train", path))
    assert status == 0, output
    return lines(path.with_suffix(""))


def assert_same_figures(ours: list[StepMetrics], theirs: list[StepMetrics]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, its in zip(ours, theirs, strict=True):
        metrics = {k: v for k, v in timeless(mine).items() if not k.startswith(OF_THE_LAYOUT)}
        expected = {k: v for k, v in timeless(its).items() if not k.startswith(OF_THE_LAYOUT)}
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5), f"step {mine.step}"


@pytest.mark.slow
def test_grpo_on_adapters_does_not_notice_context_parallelism(folder: Path, model: Path) -> None:
    """Adapters, merged for the engine at every refit, under one process and under CP2 with recomputation."""
    policy = {
        "lora": {"rank": 4, "alpha": 16},
        "optimizer": {"name": "adam", "lr": 1e-2},
    }
    alone = write_experiment(folder, model, "alone", policy={**policy, "layout": {}})
    shared = write_experiment(
        folder,
        model,
        "shared",
        policy={
            **policy,
            "layout": {"context_parallel_size": 2},
            "recompute": {"name": "full"},
            "offload": {"weights": True, "optimizer": True},
        },
    )
    metrics = run(alone)
    assert metrics[0].values["kl/reference"] == 0
    assert metrics[-1].values["kl/reference"] > 0
    assert max(step.values["logprob_gap/max"] for step in metrics) < 1e-4
    assert_same_figures(run(shared), metrics)


@pytest.mark.slow
def test_sft_of_experts_does_not_notice_expert_parallelism(folder: Path, mixture: Path) -> None:
    def sft(name: str, layout: dict[str, Any]) -> list[StepMetrics]:
        path = write_experiment(folder, mixture, name)
        tree = yaml.safe_load(path.read_text())
        tree["algorithm"] = {"name": "sft", "num_steps": 6, "batch_size": 16}
        tree["policy"]["layout"] = layout
        for section in ("generation", "rewards"):
            del tree[section]
        del tree["data"]["validation"]
        path.write_text(yaml.safe_dump(tree))
        return run(path)

    alone = sft("experts-alone", {})
    assert alone[-1].values["loss/sft"] < alone[0].values["loss/sft"]
    spread = {"data_parallel_size": 2, "expert_parallel_size": 2}
    assert_same_figures(sft("experts-spread", spread), alone)
