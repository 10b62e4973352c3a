"""One `with` times a stage for everybody who listens."""

import pytest

from nemorl.observe import timeline as stages_module
from nemorl.observe.timeline import Stage, Stages


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    perf_counter = time


class Listener:
    """Records every event."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def stage_started(self, stage: Stage) -> None:
        self.heard.append(("started", stage.name, stage.total))

    def stage_advanced(self, stage: Stage) -> None:
        self.heard.append(("advanced", stage.name, stage.done, stage.tokens))

    def stage_finished(self, stage: Stage) -> None:
        self.heard.append(("finished", stage.name, stage.seconds))

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        self.heard.append(("step", step, started, seconds))


def fail_after(clock: Clock, seconds: float) -> None:
    clock.now += seconds
    raise OSError("gone")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stages_module, "time", clock)
    return clock


def test_seconds_of_a_step_add_up_by_stage(clock):
    stages = Stages([])
    for seconds in (2.0, 3.0):
        with stages.stage("training"):
            clock.now += seconds
    clock.now += 1.0  # between the stages
    with stages.stage("refit"):
        clock.now += 0.5
    assert stages.finish_step(1) == {"time/training": 5.0, "time/refit": 0.5, "time/step": 6.5}

    with stages.stage("refit"):
        clock.now += 0.25
    assert stages.finish_step(2) == {"time/refit": 0.25, "time/step": 0.25}


def test_listeners_receive_what_happens_in_order(clock):
    listener = Listener()
    stages = Stages([listener])
    with stages.stage("generation", total=4, unit="trajectories") as stage:
        clock.now += 2.0
        stage.advance(3, tokens=90)
        stage.advance()
    stages.finish_step(1)
    assert listener.heard == [
        ("started", "generation", 4),
        ("advanced", "generation", 3, 90),
        ("advanced", "generation", 4, 90),
        ("finished", "generation", 2.0),
        ("step", 1, 100.0, 2.0),
    ]


def test_a_share_of_a_stage_goes_to_another_name(clock):
    stages = Stages([])
    with stages.stage("generation") as stage:
        clock.now += 10.0
        stage.share("environment", 0.2)
    assert stages.finish_step(1) == {"time/generation": 8.0, "time/environment": 2.0, "time/step": 10.0}


def test_shares_cannot_exceed_the_whole():
    with Stages([]).stage("generation") as stage:
        stage.share("environment", 0.75)
        with pytest.raises(ValueError, match=r"stage generation: 0\.5 is no fraction"):
            stage.share("rewards", 0.5)


def test_start_up_belongs_to_no_step(clock):
    stages = Stages([])
    with stages.stage("start", outside_step=True):
        clock.now += 60.0
    with stages.stage("training"):
        clock.now += 1.0
    assert stages.finish_step(1) == {"time/training": 1.0, "time/step": 1.0}


def test_a_stage_that_fails_is_timed_too(clock):
    listener = Listener()
    stages = Stages([listener])
    with pytest.raises(OSError, match="gone"), stages.stage("refit"):
        fail_after(clock, 3.0)
    assert listener.heard[-1] == ("finished", "refit", 3.0)


def test_stages_that_overlap_each_count_in_full(clock):
    stages = Stages([])
    with stages.stage("generation"):
        clock.now += 1.0
        with stages.stage("training"):
            clock.now += 2.0
    assert stages.finish_step(1) == {"time/training": 2.0, "time/generation": 3.0, "time/step": 3.0}
