"""Latent attention: what is special next to other families' tests of logprobs and layouts."""

import pytest
import torch

from nemorl.config.policy import SelectiveRecompute
from nemorl.megatron.worker import PolicyWorker
from tests.megatron.cases import live
from tests.megatron.examples import policy_config, ragged_batch

EVERYTHING = SelectiveRecompute(
    name="selective", modules=("core_attn", "layernorm", "mlp", "moe", "mla_up_proj")
)


@pytest.fixture
def steps(model, tmp_path):
    """Two steps of a DeepSeek-V3 in this process; call it with fields of its config."""

    def run(**fields):
        config = policy_config(model("deepseek-v3")[1], **fields)
        batches = [ragged_batch(seed=seed) for seed in range(2)]
        rendezvous = f"file://{tmp_path}/{len(list(tmp_path.iterdir()))}"
        return live(0, 1, rendezvous, config, batches, 3)

    return run


def test_what_is_recomputed_changes_nothing(steps):
    kept, recomputed = steps(), steps(recompute=EVERYTHING)
    for mine, its in zip(recomputed.steps, kept.steps, strict=True):
        assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
        assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


def test_the_router_bias_is_read_in_float32_and_stays(steps, model, monkeypatch):
    """Megatron would move it by 0.001 a step towards an even use of the experts."""
    seen = []
    close = PolicyWorker.close

    def look(worker):
        seen.append(worker.parameters()["decoder.layers.1.mlp.router.expert_bias"].clone())
        close(worker)

    monkeypatch.setattr(PolicyWorker, "close", look)
    steps(precision="bfloat16")
    expected = model("deepseek-v3")[0].state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], expected)
