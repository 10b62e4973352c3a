"""When a run recovers from an error and when it ends, with stand-ins for processes and files."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.cluster.errors import GroupEnded, NodeNotReplaced, ObjectsLost
from nemorl.errors import RunError
from nemorl.observe.timeline import Stages
from nemorl.rollout.schedule import DataPlace
from nemorl.rollout.versions import UNBROKEN
from nemorl.run.checkpoints import Progress, SavedState
from nemorl.run.recovery import Recovery
from nemorl.session.handles import TooManySkippedSteps


class Run:
    """A run whose checkpoint is of step 2; `lost` says which models miss a process."""

    def __init__(self, max_restarts: int = 2, max_rollbacks: int = 0, on_lost_node: str = "wait") -> None:
        self.lost = ["policy"]
        self.events: list[Any] = []
        self.lineage, self.policy_samples = UNBROKEN, False
        self.recorder: Any = SimpleNamespace(
            done=4, done_before_row=3, rollbacks=0, rewind=self.rewind, settle=self.settle
        )
        self.recorder.progress = Progress(4, position=16)
        self.failures = 0  # of the next restarts
        self.node_is_lost = False
        self.no_node: NodeNotReplaced | None = None
        self.nodes = {"node second": "policy rank 0"}
        self.steps = [2]  # of the checkpoints
        guards = SimpleNamespace(max_rollbacks=max_rollbacks)
        experiment: Any = SimpleNamespace(
            cluster=SimpleNamespace(max_model_restarts=max_restarts, on_lost_node=on_lost_node),
            policy=SimpleNamespace(guards=guards),
        )
        observer: Any = SimpleNamespace(stage=Stages([]).stage)
        algorithm: Any = SimpleNamespace(
            place=DataPlace(20),
            rewind=lambda step, place: self.events.append(f"data {place.position} of {step}"),
        )
        session: Any = self
        self.checkpoints: Any = SimpleNamespace(
            newest_state=self.newest_state, remove_after=self.remove_after
        )
        self.recovery = Recovery(experiment, session, observer, self.checkpoints, self.recorder, algorithm)

    async def settle(self) -> None:
        """The line of the last step is written."""

    def rewind(self, progress: Progress) -> None:
        self.recorder.done, self.recorder.rollbacks = progress.step, progress.rollbacks

    async def remove_after(self, step: int) -> None:
        self.events.append(f"remove after {step}")

    async def lost_models(self) -> list[str]:
        return self.lost

    def lost_node(self, lost: list[str]) -> bool:
        return self.node_is_lost

    async def await_places(self, lost: list[str]) -> None:
        if self.no_node is not None:
            raise self.no_node
        self.events.append(f"places for {' '.join(lost)}")

    async def restart_models(self, lost: list[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise RunError("lost again")
        self.events.append(f"restart {' '.join(lost)}")

    async def newest_state(self, before: float = math.inf) -> SavedState | None:
        step = max((step for step in self.steps if step < before), default=None)
        if step is None:
            return None
        return SavedState(Progress(step, position=4 * step), Path("checkpoint"))

    @property
    def trained(self) -> Any:
        async def restore(folder: Path) -> None:
            self.events.append(f"restore {folder}")

        return SimpleNamespace(restore=restore)

    def recover(self, number: int, error: RunError | None = None) -> None:
        asyncio.run(self.recovery.recover(number, error or RunError("the first error")))


def test_all_parts_return_to_the_checkpoint() -> None:
    run = Run()
    run.recover(5)
    assert run.events == ["restart policy", "restore checkpoint", "data 8 of 2"]
    assert run.recorder.done == 2
    assert run.lineage.version(2) == 6  # 5 may have been in use already


def test_an_error_without_a_loss_ends_the_run() -> None:
    run = Run()
    run.lost = []
    with pytest.raises(RunError, match="the first error"):
        run.recover(5)
    assert run.events == []


def test_samples_that_were_lost_with_a_node_are_sampled_again_and_no_weights_change() -> None:
    run = Run(max_restarts=2)
    run.lost = []
    error = ObjectsLost("policy", 0, "loading a batch", "ray.exceptions.ObjectLostError", "", Path("log"))
    for _ in range(2):
        run.recover(5, error)
    assert run.events == ["data 16 of 4"] * 2
    assert (run.recorder.done, run.lineage) == (4, UNBROKEN)
    with pytest.raises(ObjectsLost):
        run.recover(5, error)


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
    assert run.events == ["restart policy", "restore checkpoint", "data 8 of 2"]
    run = Run()
    run.failures = 2
    with pytest.raises(RunError, match="lost again"):
        run.recover(5)


def test_models_of_a_lost_node_wait_for_places_before_they_restart() -> None:
    run = Run()
    run.node_is_lost = True
    run.recover(5)
    assert run.events == ["places for policy", "restart policy", "restore checkpoint", "data 8 of 2"]


def test_a_lost_node_ends_the_run_if_it_is_not_replaced_or_the_config_says_so() -> None:
    run = Run(on_lost_node="fail")
    run.recover(5)  # a process was lost, its node was not
    run.node_is_lost = True
    with pytest.raises(RunError, match="the first error") as caught:
        run.recover(5)
    assert "cluster.on_lost_node = fail" in caught.value.__notes__[0]
    run = Run()
    run.node_is_lost, run.no_node = True, NodeNotReplaced("no node has room")
    with pytest.raises(NodeNotReplaced):  # without waiting again
        run.recover(5)
    assert run.events == []


def test_skipped_updates_return_to_an_earlier_checkpoint_with_other_data() -> None:
    run = Run(max_rollbacks=2)
    run.lost, run.steps = [], [1, 2, 3]
    run.recover(5, TooManySkippedSteps("skipped"))
    # That of step 3 has the weights whose updates were skipped.
    assert run.events == ["restore checkpoint", "remove after 2", "data 20 of 2"]
    assert (run.recorder.done, run.recorder.rollbacks) == (2, 1)
    assert run.lineage.version(2) == 6
    run.events, run.recorder.done, run.recorder.done_before_row, run.steps = [], 3, 2, [2]
    run.recover(4, TooManySkippedSteps("skipped"))  # no other is left
    assert run.events == ["restore checkpoint", "remove after 2", "data 20 of 2"]
    assert run.lineage.version(2) == 9
    with pytest.raises(TooManySkippedSteps, match="skipped") as caught:
        run.recover(4, TooManySkippedSteps("skipped"))
    assert "returned to a checkpoint 2 times (policy.guards.max_rollbacks)" in caught.value.__notes__[0]


def test_without_a_checkpoint_or_a_rollback_skipped_updates_end_the_run() -> None:
    for run in (Run(max_rollbacks=2), Run()):
        run.lost, run.steps = [], []
        with pytest.raises(TooManySkippedSteps):
            run.recover(5, TooManySkippedSteps("skipped"))
        assert run.events == []


def test_a_rank_that_is_lost_in_a_rollback_is_restarted() -> None:
    run = Run(max_rollbacks=1)

    async def lose(before: float = math.inf) -> SavedState | None:
        run.checkpoints.newest_state = run.newest_state
        raise GroupEnded("the policy has ended")

    run.checkpoints.newest_state = lose
    run.recover(5, TooManySkippedSteps("skipped"))
    assert run.events == ["restart policy", "restore checkpoint", "data 8 of 2"]
