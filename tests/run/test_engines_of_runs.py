"""Whole runs whose engines die, or are another user's."""

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.models.create import create_tiny_model
from tests.run.runs import finish, lines, served, start, write_experiment

ONE = {"layout": {}}  # one policy process


def ask(port: int, model: Path) -> list[int]:
    """The versions of the weights that sample a few tokens for any client over HTTP."""
    body = {"model": model.name, "prompt": "1+2=", "max_tokens": 4, "return_token_ids": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer for-tests-only"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        versions: list[int] = json.load(answer)["choices"][0]["weight_versions"]
    return versions


@pytest.mark.slow
def test_a_run_continues_when_an_engine_dies_and_answers_during_it(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_TEST_KEY", "for-tests-only")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = {"port": port, "api_key_env": "NEMORL_TEST_KEY"}
    config = write_experiment(
        folder, model, "lost", policy=ONE,
        generation={"replicas": 2, "threads": 1, "endpoint": endpoint},
        algorithm={"num_steps": 12, "validation": {}}, data={"validation": None},
        checkpointing={"period": 100}, cluster={"deadlines": {"health": 5}},
    )  # fmt: skip
    run = folder / "lost"
    driver = start("train", config)
    while not lines(run):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.05)
    engine = (run / "logs/generation-1.log").read_text().partition("process ")[2].split()[0]
    before = ask(port, model)
    os.kill(int(engine), signal.SIGKILL)
    after = [ask(port, model) for _ in range(4)]
    assert min(before) >= 1
    assert max(before) <= min(map(min, after))
    status, output = finish(driver)
    assert status == 0, output
    steps = lines(run)
    assert [s.step for s in steps] == list(range(1, 13))
    assert steps[0].values["generation/replicas"] == 2
    assert steps[-1].values["generation/replicas_lost"] == 1
    assert steps[-1].values["generation/requests_failed"] == 0
    assert "generation replica 1 is lost: generation rank 1 died" in output
    assert f"the engines answer at http://127.0.0.1:{port}/v1" in output
    assert "for-tests-only" not in output
    # Every batch is what the policy of its step says, whichever engine sampled it.
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-4
    assert all(s.values["errors"] == 0 for s in steps)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[dict[str, Any]]:
    """`nemorl serve` over the model: the `generation` section that samples from it."""
    with served(model, "NEMORL_TEST_KEY") as address:
        yield {"backend": "openai", "max_new_tokens": 6, **address}


def by_server(folder: Path, model: Path, name: str, server: dict[str, Any], **changes: Any) -> Path:
    """An experiment of two steps whose samples come from the server."""
    config = write_experiment(
        folder, model, name, policy=ONE | {"optimizer": {"name": "adam", "lr": 1e-6}},
        algorithm={"num_steps": 2, "validation": {}, **changes}, data={"validation": None},
        checkpointing={"period": 100},
    )  # fmt: skip
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**tree, "generation": server}))
    return config


@pytest.mark.slow
def test_a_server_of_the_same_model_trains(folder: Path, model: Path, server: dict[str, Any]) -> None:
    status, output = finish(start("train", by_server(folder, model, "served", server)))
    assert status == 0, output
    steps = lines(folder / "served")
    assert steps[0].values["logprob_gap/max"] < 1e-4
    # The server keeps its weights while the policy moves, if only by a rate of 1e-6.
    assert steps[1].values["logprob_gap/mean"] > steps[0].values["logprob_gap/mean"]
    assert steps[1].values["generation/retries"] == 0
    assert "refit/gigabytes" not in steps[1].values


@pytest.mark.slow
def test_a_server_of_another_model_is_stopped_before_anything_is_learned(
    model: Path, server: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    create_tiny_model(other, hidden=32, ffn=64, layers=2, heads=4, kv_heads=2, seed=9)
    config = by_server(tmp_path, other, "wrong", server, max_logprob_gap=0.001)
    status, output = finish(start("train", config))
    assert status == 1, output
    assert "engine and trainer disagree on the logprobs of the same tokens" in output
    assert "other weights, or another tokenizer" in output
    assert "this back end gets none from the run" in output
    assert "Traceback" not in output
    assert lines(tmp_path / "wrong") == []


@pytest.mark.slow
def test_engines_sample_with_the_rounded_weights_of_the_trainer(folder: Path, model: Path) -> None:
    """The gap is that of unquantized runs, though the weights change and are rounded to 8 bits."""
    rounding = {"format": "int8", "train": "fake"}
    config = write_experiment(
        folder, model, "rounded", policy=ONE | {"quantization": rounding}, data={"validation": None},
        algorithm={"num_steps": 3, "validation": {}}, checkpointing={"period": 100},
    )  # fmt: skip
    status, output = finish(start("train", config))
    assert status == 0, output
    steps = lines(folder / "rounded")
    assert len(steps) == 3
    assert max(s.values["logprob_gap/max"] for s in steps) < 1e-4
    assert all(s.values["updates/empty"] == 0 for s in steps)
