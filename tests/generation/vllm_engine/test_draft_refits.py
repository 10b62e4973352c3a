"""Updates that bring what vLLM drafts by, layers (MTP) or a head, in a process of vLLM's own worker."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.generation.vllm_engine.rank_refits import TRANSPORTS

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.ci


# Of what drafts by each method: parameters that training changes.
TRAINED = {
    "mtp": [f"mtp_layers.2.{name}" for name in ("input_proj", "mtp_block.self_attn.qkv_proj")],
    "eagle3": [f"layers.0.{name}" for name in ("self_attn.qkv_proj", "mlp.down_proj")],
}


@pytest.fixture(scope="module", params=TRAINED)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def report(method: str, model_folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.generation.vllm_engine.draft_refits", method]
    command.append(str(model_folder / method / "model"))
    # Hosts of other tests leave variables of theirs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    return dict(json.loads(line.removeprefix("REPORT ")))


@pytest.mark.parametrize("update", ["staged", "in_place"])
def test_an_update_brings_model_and_drafts_to_the_bit(
    method: str, report: dict[str, Any], update: str
) -> None:
    """Whole, then what changed, twice, by each transport; the reference is what vLLM loads from a folder."""
    assert {f"drafts.model.{name}.weight" for name in TRAINED[method]} <= set(report["changed"])
    assert ("drafts.lm_head.weight" in report["changed"]) is (method == "eagle3")
    for transport in TRANSPORTS:
        found = report[update][transport]
        assert found["different"] == []
        assert all(share < 0.03 for share in found["shares"][1:])
    assert report[update]["without base"]["different"] == []


def test_a_policy_of_any_layout_brings_them(report: dict[str, Any]) -> None:
    """Of two stages the last has the layers, with a copy of the embedding; all ranks have a head."""
    assert report["staged"]["layouts"] == {"one process": [], "PP2": [], "DP2": []}


@pytest.mark.parametrize("update", ["staged", "in_place"])
def test_drafts_compute_with_the_weights_of_the_last_update(report: dict[str, Any], update: str) -> None:
    errors = report[update]["product_errors"]
    assert len([name for name in errors if re.search("self_attn|mlp", name)]) == 4
    assert max(errors.values()) < 4e-3  # bfloat16's 2^-8


def test_loaders_of_both_models_take_a_stream(report: dict[str, Any]) -> None:
    assert report["reload"] == []


def test_a_head_with_the_policys_output_matrix_is_refused(method: str, report: dict[str, Any]) -> None:
    """vLLM then has one matrix for both."""
    if method == "eagle3":
        assert "has no lm_head of its own, or has the policy's" in report["shared"]
