"""The GPU benchmark on a CPU and on the pretended accelerator: its code runs, with none of the packages that
it does not require."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_training
import pytest
import torch
from torch.autograd import DeviceType

from tests.benchmarks import pretended
from tests.rehearsal.processes import alone
from tests.selection import in_all

ROOT = Path(__file__).parents[2]
# What is not on a machine that has torch and the wheels of tools/gpu_wheels.sh.
MISSING = (
    *("ray", "vllm", "aiohttp", "plotly", "pebble", "math_verify", "reasoning_gym", "transformers"),
    *("huggingface_hub", "psutil", "modelopt", "datasets"),
)
WITHOUT = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "benchmarks/gpu.py", *arguments, "--out", folder]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == gpu.NO_GPU
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("No NVIDIA GPU was found by torch")
    assert not ended.stdout


@pytest.mark.ci
@pytest.mark.parametrize("part", ["training", *in_all(*(part for part in gpu.PARTS if part != "training"))])
def test_every_part_runs_without_ray_vllm_and_transformers(tmp_path: Path, part: str) -> None:
    ended = run(tmp_path, "--device", "cpu", "--small", "--parts", part, "--minutes", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))[part]
    assert found["rows"]
    if part != "training":  # the memory of a process on a CPU is not what the plan counts on a GPU
        assert not [row for row in found["rows"] if "NO" in row.values()]
    assert not [name for name, value in found["details"].items() if value is False]


@pytest.mark.ci
@pytest.mark.parametrize("part", ["training", "engine", *in_all("parity", "memory", "quantization")])
def test_the_code_for_a_gpu_runs_on_the_pretended_accelerator(part: str) -> None:
    """No exception, and no operator with tensors of the host and of the device; values mean nothing.

    Not reached: `refit`, which refuses weights whose checksums differ (tensors have no values here), the
    profiler's records of kernels, CUDA's counts of memory and torch's own detection of waits (`pretended`
    answers for these).
    """
    found = alone(pretended.measured, part)

    assert found["rows"]
    # Of parity; what the project refuses to compute is no failure.
    assert not [row["note"] for row in found["rows"] if row.get("note") and row["equal"] != "refused"]
    assert not [name for name, value in found["details"].items() if value is False]
    assert found["gpu"]["nccl"] == "2.27.5"
    if part == "engine":  # the sampled tokens alone, which the policy's network leaves on the device
        waits = {row["generator, batch"]: row["host_waits_per_step"] for row in found["rows"]}
        assert waits == {
            "embedded, 1": 1, "embedded, 4": 1, "embedded, 4 ragged": 0, "policy, 4": 0,
        }  # fmt: skip
    if part == "training":
        assert all(row["mfu"] > 0 and row["planned_gigabytes"] > 0 for row in found["rows"])


def test_a_profile_counts_a_kernel_once() -> None:
    """Its time is also that of the operator which launched it, and of annotations around it."""
    rows = [
        ("aten::mm", DeviceType.CPU, False, 30.0),
        ("gemm", DeviceType.CUDA, False, 30.0),
        ("relu", DeviceType.CUDA, False, 10.0),
        ("step", DeviceType.CUDA, True, 40.0),
    ]
    events = [
        SimpleNamespace(
            key=key, count=1, device_type=kind, is_user_annotation=annotates, self_device_time_total=time
        )
        for key, kind, annotates, time in rows
    ]
    assert gpu_training.longest(events, "cuda") == [
        {"kernel": "gemm", "calls": 1, "share": 0.75},
        {"kernel": "relu", "calls": 1, "share": 0.25},
    ]


def test_a_part_that_fails_says_why_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"parity": ("no_such_module", 1.0)})
    arguments = ["gpu.py", "--device", "cpu", "--small", "--parts", "parity", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(gpu, "run_part", lambda part, *_: {"problem": f"{part} is broken"})
    assert gpu.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["parity"]["problem"] == "parity is broken"


def test_a_late_part_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    parser_result = type("Arguments", (), {"device": "cpu", "small": True})
    found = gpu.run_part("quantization", parser_result, seconds=0.05)  # type: ignore[arg-type]
    assert found == {"problem": "not done after 0 s"}
