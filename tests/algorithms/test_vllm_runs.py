"""Whole runs that sample with vLLM, on processors of their own and on the policy's."""

from pathlib import Path

import pytest
import yaml

from nemorl.models.create import create_arithmetic_model
from tests.algorithms.runs import finish, lines, start, write_experiment
from tests.vllm_there import require_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny arithmetic model with heads that vLLM's attention takes."""
    require_vllm()
    folder = tmp_path_factory.mktemp("vllm") / "model"
    create_arithmetic_model(folder, hidden=64, ffn=128, layers=2, heads=2, kv_heads=2, seed=3)
    return folder


@pytest.mark.parametrize(
    ("ranks", "colocated"), [(1, False), (2, True)], ids=["separate", "time-shared, two ranks"]
)
def test_grpo_learns_from_what_vllm_samples(tmp_path: Path, model: Path, ranks: int, colocated: bool) -> None:
    config = write_experiment(
        tmp_path, model, "run", algorithm={"num_steps": 3, "validation": {}}, data={"validation": None},
        policy={"offload": {"weights": colocated, "optimizer": colocated}},
    )  # fmt: skip
    tree = yaml.safe_load(config.read_text())
    engine = {
        "backend": "vllm", "tensor_parallel_size": ranks, "colocated": colocated, "max_new_tokens": 6,
        "threads": 1,
    }  # fmt: skip
    config.write_text(yaml.safe_dump({**tree, "generation": engine, "checkpointing": {"enabled": False}}))
    status, output = finish(start("train", config), 500)
    assert status == 0, output
    steps = lines(tmp_path / "run")
    assert [s.step for s in steps] == [1, 2, 3]
    # Every batch is sampled by the weights of the step before it, in the policy's own distribution.
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-3
    assert all(s.values["refit/gigabytes"] > 0 for s in steps)
    assert all(s.values["version/lag"] == 0 for s in steps)
