"""Whole runs that sample with vLLM, on processors of their own and on the policy's."""

import math
from pathlib import Path

import pytest
import yaml

from nemorl.config.policy import LoraConfig
from nemorl.models.adapters import adapter_tensors
from nemorl.models.create import create_arithmetic_model
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape
from tests.algorithms.runs import finish, lines, start, write_experiment
from tests.vllm_there import require_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny arithmetic model with heads that vLLM's attention takes."""
    require_vllm()
    folder = tmp_path_factory.mktemp("vllm") / "model"
    create_arithmetic_model(folder, hidden=64, ffn=128, layers=2, heads=2, kv_heads=2, seed=3)
    return folder


LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.mark.parametrize(
    ("ranks", "colocated", "lora"),
    [(1, False, None), (2, True, LORA)],
    ids=["separate", "time-shared, two ranks, adapters alone"],
)
def test_grpo_learns_from_what_vllm_samples(
    tmp_path: Path, model: Path, ranks: int, colocated: bool, lora: LoraConfig | None
) -> None:
    policy = {"offload": {"weights": colocated, "optimizer": colocated}}
    adapters = {} if lora is None else {"lora": lora.model_dump(), "optimizer": {"name": "adam", "lr": 1e-2}}
    config = write_experiment(
        tmp_path, model, "run", algorithm={"num_steps": 3, "validation": {}}, data={"validation": None},
        policy=policy | adapters,
    )  # fmt: skip
    tree = yaml.safe_load(config.read_text())
    engine = {
        "backend": "vllm", "tensor_parallel_size": ranks, "colocated": colocated, "max_new_tokens": 6,
        "threads": 1, "adapters": "separate" if lora else "merged",
    }  # fmt: skip
    config.write_text(yaml.safe_dump({**tree, "generation": engine, "checkpointing": {"enabled": False}}))
    status, output = finish(start("train", config), 500)
    assert status == 0, output
    steps = lines(tmp_path / "run")
    assert [s.step for s in steps] == [1, 2, 3]
    # Every batch is sampled by the weights of the step before it, in the policy's own distribution.
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-3
    shape = ModelShape.load(model)
    sent = hf_tensors(shape) if lora is None else adapter_tensors(shape, lora)
    num_bytes = 4 * ranks * sum(map(math.prod, sent.values()))  # to each rank all of the adapters
    assert all(s.values["refit/gigabytes"] == num_bytes / 1e9 for s in steps)
    assert all(s.values["version/lag"] == 0 for s in steps)
