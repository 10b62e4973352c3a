"""Runs that are stopped by a signal in a stage that does not end, and continue as if nothing had been."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.load import load_experiment
from nemorl.errors import RunStopped
from nemorl.megatron.checkpoint_store import CheckpointStore
from nemorl.rollout.collector import Collector
from nemorl.run.recorder import RunRecorder
from nemorl.run.train import train
from nemorl.session.handles import ModelHandle, PolicySenders
from tests.run.runs import lines, timeless, tiny_model, write_experiment

DROPPED = "in a step that did not end in half of checkpointing.stop_seconds (2)"


def stop_in(patch: pytest.MonkeyPatch, owner: type, method: str, call: int, seconds: float) -> None:
    """Send SIGTERM in this call of a method of the driver, which lasts some seconds longer than before."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    async def longer(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return await original(*args, **options)
        if method == "write_copy":  # which has to end
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(seconds)
            return await original(*args, **options)
        await original(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.sleep(seconds)

    patch.setattr(owner, method, longer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("stops") / "model")


class Run:
    def __init__(
        self, model: Path, name: str, saving: Mapping[str, Any] | None = None, **algorithm: Any
    ) -> None:
        saving = {"period": 4, "save_hf": True, "stop_seconds": 2.0, **(saving or {})}
        changes = {"checkpointing": saving, "algorithm": algorithm}
        path = write_experiment(model.parent, model, name, **changes)
        self.experiment, self.folder = load_experiment(path), model.parent / name

    def train(self) -> None:
        train(self.experiment, resume=self.folder.exists())

    def stop_in(self, owner: type, method: str, call: int, seconds: float = 1e6) -> tuple[int, str]:
        """The step of the newest checkpoint of a start that is stopped in this call, and its message."""
        with pytest.MonkeyPatch.context() as patch:
            stop_in(patch, owner, method, call, seconds)
            with pytest.raises(RunStopped) as stop:
                self.train()
        return max(CheckpointStore(self.folder / "checkpoints").steps(), default=0), str(stop.value)


@pytest.mark.slow
def test_a_stop_costs_no_more_than_the_step_that_does_not_end(model: Path) -> None:
    undisturbed, run = (Run(model, name, validation={"period": 2}) for name in ("undisturbed", "run"))
    undisturbed.train()

    step, message = run.stop_in(ModelHandle, "train", 2)  # the weights are those of step 2 already
    assert (step, message) == (1, f"Stopped by SIGTERM {DROPPED}. Continue from step 1 with --resume.")
    step, message = run.stop_in(PolicySenders, "send", 3)  # first of step 1, which is restored
    assert step == 2
    assert DROPPED in message
    step, message = run.stop_in(RunRecorder, "_sample_validation", 1)  # of step 4
    assert step == 3
    assert DROPPED in message
    step, message = run.stop_in(ModelHandle, "write_copy", 1, seconds=1.5)
    assert (step, message) == (4, "Stopped by SIGTERM after step 4. Continue with --resume.")
    step, message = run.stop_in(Collector, "next_batch", 2)
    assert (step, message) == (5, "Stopped by SIGTERM after step 5. Continue with --resume.")
    run.train()

    for ours, theirs in zip(lines(run.folder), lines(undisturbed.folder), strict=True):
        assert timeless(ours) == timeless(theirs), f"step {ours.step}"
    file = Path("hf") / "model.safetensors"
    assert (run.folder / file).read_bytes() == (undisturbed.folder / file).read_bytes()


@pytest.mark.slow
def test_samples_in_progress_are_taken_again(model: Path) -> None:
    run = Run(model, "ahead", max_staleness=2, validation={"period": None})
    step, message = run.stop_in(ModelHandle, "train", 3)
    assert step == 2
    assert DROPPED in message
    run.train()
    assert [line.step for line in lines(run.folder)] == [1, 2, 3, 4, 5, 6]
    assert all(line.values["version/lag_max"] <= 2 for line in lines(run.folder))


@pytest.mark.slow
def test_a_checkpoint_that_is_in_memory_only_is_named(model: Path) -> None:
    memory = model.parent / "memory"
    memory.mkdir()
    saving = {"memory_period": 1, "memory_dir": str(memory)}
    run = Run(model, "held", saving, validation={"period": 2})

    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("of the driver")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "_sample_validation", fail)  # of step 2
        with pytest.raises(RuntimeError, match="of the driver"):
            run.train()
    step, message = run.stop_in(ModelHandle, "train", 1)
    assert step == 0
    assert message == f"Stopped by SIGTERM {DROPPED}. Continue from step 1 with --resume."
