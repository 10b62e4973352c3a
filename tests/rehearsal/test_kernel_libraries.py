"""A policy on the kernels of Transformer Engine, apex and flash-attn, by stand-ins for these libraries."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nemorl.rehearsal.ranks import compare, faults, hollow
from tests.rehearsal.experiments import LLAMA_8B, QWEN3_MOE, VLLM, experiment
from tests.rehearsal.kernel_libraries import APEX, TRANSFORMER_ENGINE, rehearse_with
from tests.selection import in_all

MODELS = {"dense": LLAMA_8B, "experts": QWEN3_MOE}
DENSE_LAYOUT = {"data_parallel_size": 8}
LAYOUTS = {"dense": DENSE_LAYOUT, "experts": DENSE_LAYOUT | {"expert_parallel_size": 4}}
OF_ENGINE = {
    "layer kernels": "transformer_engine 2.18.0",
    "optimizer kernel": "FusedAdam of transformer_engine 2.18.0",
}
OF_APEX = {
    "optimizer kernel": "FusedAdam of apex",
    "gradient accumulation": "fused (fused_weight_gradient_mlp_cuda)",
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "stand_in", "header"),
    [
        ("experts", TRANSFORMER_ENGINE, OF_ENGINE),
        ("dense", APEX, OF_APEX),
        *in_all(("dense", TRANSFORMER_ENGINE, OF_ENGINE), ("experts", APEX, OF_APEX)),
    ],
)
def test_a_policy_runs_on_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, stand_in: Path, header: Mapping[str, Any]
) -> None:
    sound = experiment(
        tmp_path,
        MODELS[model],
        generation=VLLM,
        layout=LAYOUTS[model],
        max_sequence_length=4096,
        micro_batch_tokens=8192,
    )
    monkeypatch.setitem(os.environ, "TORCHDYNAMO_DISABLE", "1")

    with hollow(sound) as placed, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        report = pool.submit(rehearse_with, stand_in, placed, 1).result()

    assert report.header["attention kernel"] == "flash_attn 2.8.3 (flash_attn_varlen_func)"
    assert header.items() <= report.header.items()
    assert faults(report) == []
    assert abs(compare(report, sound, "train").difference) < 0.1
