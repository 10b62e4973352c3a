"""Whole runs that sample with vLLM: on processors of their own, on the policy's, and by its server."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nemorl.config.policy import LoraConfig
from nemorl.models.adapters import adapter_tensors
from nemorl.models.create import create_tiny_model
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.observe.metrics import StepMetrics
from tests.required import require_vllm
from tests.run.runs import finish, lines, start, worker_pid, write_experiment
from tests.selection import in_all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny arithmetic model with heads that vLLM's attention takes."""
    require_vllm()
    folder = tmp_path_factory.mktemp("vllm") / "model"
    create_tiny_model(folder, hidden=64, ffn=128, layers=2, heads=2, kv_heads=2, seed=3)
    return folder


def configured(
    folder: Path, model: Path, generation: dict[str, Any], policy: dict[str, Any], **algorithm: Any
) -> Path:
    """An experiment of three steps, whose run is `folder/run`."""
    config = write_experiment(
        folder, model, "run", algorithm={"num_steps": 3, "validation": {}, **algorithm},
        data={"validation": None}, policy=policy, rewards=[{"function": "tests.run.rewards:differs"}],
    )  # fmt: skip
    tree = yaml.safe_load(config.read_text())
    tree |= {"generation": {"max_new_tokens": 6, **generation}, "checkpointing": {"enabled": False}}
    config.write_text(yaml.safe_dump(tree))
    return config


def run(
    folder: Path, model: Path, generation: dict[str, Any], policy: dict[str, Any], **algorithm: Any
) -> list[StepMetrics]:
    """The steps of a run of three."""
    config = configured(folder, model, generation, policy, **algorithm)
    status, output = finish(start("train", config), 500)
    assert status == 0, output
    steps = lines(folder / "run")
    assert [s.step for s in steps] == [1, 2, 3]
    assert all(s.values["updates/empty"] == 0 for s in steps)
    return steps


@pytest.mark.slow
def test_changes_alone_go_from_two_policy_ranks_to_two_of_vllm(tmp_path: Path, model: Path) -> None:
    """In bfloat16, by real optimizer steps; all that an engine then has is compared with what was sent."""
    engine = {"backend": "vllm", "tensor_parallel_size": 2, "threads": 1, "delta": True}
    policy = {"precision": "bfloat16", "optimizer": {"name": "adam", "lr": 1e-6}}
    steps = run(tmp_path, model, engine, policy)
    sizes = {name: math.prod(size) for name, size in hf_tensors(load_shape(model)).items()}
    on_both = sum(size for name, size in sizes.items() if name.endswith("norm.weight"))
    whole = 2 * (sum(sizes.values()) + on_both) / 1e9
    assert steps[0].values["refit/gigabytes"] == whole
    assert all(0 < s.values["refit/gigabytes"] < 0.03 * whole for s in steps[1:])
    assert max(s.values["logprob_gap/mean"] for s in steps) < 0.02  # of rounding
    assert all(s.values["version/lag"] == 0 for s in steps)
    assert "EngineDeadError" not in (tmp_path / "run/logs/generation-0.log").read_text()


@pytest.mark.slow
def test_adapters_alone_go_to_engines_that_share_the_policys_time(tmp_path: Path, model: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    engine = {
        "backend": "vllm", "tensor_parallel_size": 2, "threads": 1, "colocated": True, "adapters": "separate"
    }  # fmt: skip
    policy = {
        "offload": {"weights": True, "optimizer": True}, "lora": lora.model_dump(),
        "optimizer": {"name": "adam", "lr": 1e-2},
    }  # fmt: skip
    steps = run(tmp_path, model, engine, policy)
    # Every batch is sampled by the weights of the step before it, in the policy's own distribution.
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-3
    sent = adapter_tensors(load_shape(model), lora)
    num_bytes = 4 * 2 * sum(map(math.prod, sent.values()))  # to each rank all of them
    assert all(s.values["refit/gigabytes"] == num_bytes / 1e9 for s in steps)
    assert all(s.values["version/lag"] == 0 for s in steps)


@pytest.mark.slow
def test_engines_sample_in_int8_while_the_policy_trains_in_float32(tmp_path: Path, model: Path) -> None:
    policy = {"layout": {}, "optimizer": {"name": "adam", "lr": 1e-3}}
    engine = {"backend": "vllm", "threads": 1}
    for name in ("plain", "rounded"):
        (tmp_path / name).mkdir()
    steps = run(tmp_path / "plain", model, engine, policy | {"quantization": {"format": "int8"}})
    # More than rounding of float32, 1e-6, and less than what would be refused as wrong weights.
    assert all(1e-4 < s.values["logprob_gap/mean"] < 0.05 for s in steps)
    # A trainer that rounds weights and inputs, too, differs where an input is at the border of two values.
    both = {"format": "int8", "train": "fake", "activations": True}
    rounded = run(tmp_path / "rounded", model, engine, policy | {"quantization": both})
    gaps = [[s.values["logprob_gap/mean"] for s in found] for found in (steps, rounded)]
    assert sum(gaps[1]) < 0.2 * sum(gaps[0])
    whole = 4 * sum(math.prod(size) for size in hf_tensors(load_shape(model)).values()) / 1e9
    assert all(s.values["refit/gigabytes"] == whole for s in steps)
    assert all(s.values["version/lag"] == 0 for s in steps)


@pytest.mark.parametrize("placement", ["apart", *in_all("colocated")])
def test_samples_of_an_asynchronous_run_have_the_logprobs_of_their_versions(
    tmp_path: Path, model: Path, placement: str
) -> None:
    """Sequences run over the updates, after which the KV cache is recomputed.

    Colocated, they wait outside of the engine while the policy trains.
    """
    engine = {"backend": "vllm", "threads": 1, "max_num_seqs": 1, "max_new_tokens": 112}
    engine |= {"colocated": placement == "colocated"}
    policy = {"layout": {}, "max_sequence_length": 128, "micro_batch_tokens": 1024,
              "optimizer": {"name": "adam", "lr": 1e-2}}  # fmt: skip
    stale = {"max_staleness": 1, "num_prompts_per_step": 2, "num_generations_per_prompt": 32,
             "max_logprob_gap": 9.0}  # fmt: skip
    steps = run(tmp_path, model, engine, policy, **stale)
    assert max(s.values["version/lag_max"] for s in steps) == 1
    assert max(s.values["version/spread"] for s in steps) > 0
    assert max(s.values["staleness/gap_max_0"] for s in steps) < 1e-3  # tokens of the trained version


@pytest.mark.slow
def test_an_asynchronous_run_outlives_the_engine_core_of_its_only_replica(
    tmp_path: Path, model: Path
) -> None:
    policy = {"layout": {}, "optimizer": {"name": "adam", "lr": 1e-3}}
    engine = {"backend": "vllm", "threads": 1}
    config = configured(tmp_path, model, engine, policy, max_staleness=2, num_steps=8)
    driver = start("train", config)
    try:
        while len(lines(tmp_path / "run")) < 2:
            assert driver.poll() is None, driver.communicate()[0]
            time.sleep(0.05)
        host = psutil.Process(worker_pid(tmp_path / "run/logs/generation-0.log"))
        (core,) = (one for one in host.children() if "resource_tracker" not in " ".join(one.cmdline()))
        core.kill()
        status, output = finish(driver, 500)
    finally:
        driver.kill()
    assert status == 0, output
    steps = lines(tmp_path / "run")
    assert [s.step for s in steps] == [*range(1, 9)]
    last = steps[-1].values
    assert last["generation/replicas_lost"] == last["generation/replicas_restarted"] == 1
    log = (tmp_path / "run/logs/driver.log").read_text()
    assert f"generation engine 0 has ended: EngineCore (process {core.pid}) ended" in log
    assert all(s.values["errors"] == 0 for s in steps)
    assert max(s.values["version/lag_max"] for s in steps) <= 2
    # Tokens of the trained version, before and after the engine has received the weights in use.
    gaps = [s.values["staleness/gap_max_0"] for s in steps if "staleness/gap_max_0" in s.values]
    assert gaps
    assert max(gaps) < 1e-3


@contextmanager
def vllm_server(
    model: Path, log: Path, *further: str, dtype: str = "float32", **variables: str
) -> Iterator[str]:
    """Its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--model", model, "--host", "127.0.0.1", "--port", port, "--served-model-name", "policy",
        "--dtype", dtype, "--max-model-len", "64", "--enforce-eager", "--no-enable-chunked-prefill",
        "--logprobs-mode", "processed_logprobs", *further,
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    with log.open("w") as told:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)], stdout=told,
            stderr=subprocess.STDOUT, env=os.environ | environment,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            assert server.poll() is None, log.read_text()
            asked = urllib.request.Request(f"{address}/v1/models")
            asked.add_header("Authorization", f"Bearer {os.environ.get('VLLM_API_KEY')}")
            with suppress(OSError), urllib.request.urlopen(asked, timeout=10) as answer:
                assert json.load(answer)["data"][0]["id"] == "policy"
                break
            time.sleep(0.2)
        yield f"{address}/v1"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("uvicorn") is None, reason="vLLM is here without its server's packages")
def test_samples_of_a_vllm_server_are_learned_from(tmp_path: Path, model: Path) -> None:
    """At a temperature, of whose distribution the server reports the logprobs."""
    with vllm_server(model, tmp_path / "server.log") as address:
        engine = {
            "backend": "openai",
            "base_url": address,
            "model": "policy",
            "sampling": {"temperature": 0.7},
        }
        steps = run(tmp_path, model, engine, {"layout": {}, "optimizer": {"name": "adam", "lr": 1e-5}})
    assert steps[0].values["logprob_gap/max"] < 1e-4
    # The server keeps its weights while the policy moves.
    assert steps[2].values["logprob_gap/mean"] > 1e-4
    assert all("refit/gigabytes" not in s.values and s.values["generation/retries"] == 0 for s in steps)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("watchfiles") is None, reason="vLLM is here without its server's packages")
def test_a_vllm_server_samples_with_the_weights_of_the_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, by changes after the first version, which it has before the first step."""
    monkeypatch.setenv("VLLM_API_KEY", "a key of this test")
    plug_in, weights = "nemorl.generation.vllm_engine", tmp_path / "weights"
    words = ["--enable-scale-out", "--worker-extension-cls", f"{plug_in}.served_worker.ServedWorker"]
    words += ["--middleware", f"{plug_in}.served.WeightRoutes"]
    log = tmp_path / "server.log"
    with vllm_server(model, log, *words, dtype="bfloat16", NEMORL_WEIGHTS_URL=str(weights)) as address:
        engine = {
            "backend": "vllm_server",
            "base_urls": [address.removesuffix("/v1")],
            "files_url": str(weights),
            "delta": True,
        }
        policy = {"layout": {}, "precision": "bfloat16", "optimizer": {"name": "adam", "lr": 1e-6}}
        steps = run(tmp_path, model, engine, policy)
    whole = 2 * sum(map(math.prod, hf_tensors(load_shape(model)).values())) / 1e9
    assert all(0 < s.values["refit/gigabytes"] < 0.05 * whole for s in steps)
    assert max(s.values["logprob_gap/mean"] for s in steps) < 0.02  # of rounding
    assert all(s.values["version/lag"] == 0 for s in steps)
    assert len(json.loads((weights / "v00000003.json").read_text())["folders"]) == 4
