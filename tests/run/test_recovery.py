"""When a run recovers from an error and when it ends, with stand-ins for processes and files."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.errors import RunError
from nemorl.observe.timeline import Stages
from nemorl.rollout.versions import UNBROKEN
from nemorl.run.checkpoints import Progress, SavedState
from nemorl.run.recovery import Recovery


class Run:
    """A run whose checkpoint is of step 2; `lost` says which models miss a process."""

    def __init__(self, max_restarts: int = 2) -> None:
        self.lost = ["policy"]
        self.events: list[Any] = []
        self.lineage, self.policy_samples = UNBROKEN, False
        self.recorder: Any = SimpleNamespace(done=4, rewind=self.rewind, settle=self.settle)
        self.failures = 0  # of the next restarts
        experiment: Any = SimpleNamespace(cluster=SimpleNamespace(max_model_restarts=max_restarts))
        observer: Any = SimpleNamespace(stage=Stages([]).stage)
        algorithm: Any = SimpleNamespace(rewind=lambda step, place: self.events.append(f"data of {step}"))
        session: Any = self
        checkpoints: Any = self
        self.recovery = Recovery(experiment, session, observer, checkpoints, self.recorder, algorithm)

    async def settle(self) -> None:
        """The line of the last step is written."""

    def rewind(self, progress: Progress) -> None:
        self.recorder.done = progress.step

    async def lost_models(self) -> list[str]:
        return self.lost

    async def restart_models(self, lost: list[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise RunError("lost again")
        self.events.append(f"restart {' '.join(lost)}")

    async def newest_state(self) -> SavedState:
        return SavedState(Progress(step=2), Path("checkpoint"), in_memory=False)

    @property
    def trained(self) -> Any:
        async def restore(folder: Path) -> None:
            self.events.append(f"restore {folder}")

        return SimpleNamespace(restore=restore)

    def recover(self, number: int) -> None:
        asyncio.run(self.recovery.recover(number, RunError("the first error")))


def test_all_parts_return_to_the_checkpoint() -> None:
    run = Run()
    run.recover(5)
    assert run.events == ["restart policy", "restore checkpoint", "data of 2"]
    assert run.recorder.done == 2
    assert run.lineage.version(2) == 6  # 5 may have been in use already


def test_an_error_without_a_loss_ends_the_run() -> None:
    run = Run()
    run.lost = []
    with pytest.raises(RunError, match="the first error"):
        run.recover(5)
    assert run.events == []


def test_a_policy_that_samples_and_a_limit_of_0_end_the_run() -> None:
    for run in (Run(max_restarts=0), Run()):
        run.policy_samples = True
        with pytest.raises(RunError, match="the first error"):
            run.recover(5)


def test_restarts_count_until_a_step_is_reached_for_the_first_time() -> None:
    run = Run()
    for _ in range(2):
        run.recover(5)
        run.recorder.done = 4  # steps 3 and 4 again
    with pytest.raises(RunError, match="the first error") as caught:
        run.recover(5)
    assert "policy restarted 2 times without a further step" in caught.value.__notes__[0]
    run = Run()
    run.recover(5)
    run.recorder.done = 5
    for _ in range(2):
        run.recover(6)


def test_a_restart_that_fails_is_tried_again() -> None:
    run = Run(max_restarts=3)
    run.failures = 2
    run.recover(5)
    assert run.events == ["restart policy", "restore checkpoint", "data of 2"]
    run = Run()
    run.failures = 2
    with pytest.raises(RunError, match="lost again"):
        run.recover(5)
