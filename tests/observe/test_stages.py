"""One `with` times a stage for everybody who listens."""

from random import Random

import pytest

from nemorl.observe import timeline as stages_module
from nemorl.observe.timeline import Stage, Stages, Work, merge_spans


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


def test_what_the_driver_waits_for_and_who_is_idle(clock):
    """Ten seconds: 4 of sampling (1 of it environments), 1 of the driver, critic and policy, a refit."""
    stages = Stages([])
    with stages.stage("generation", waits_for="generation") as stage:
        clock.now += 4.0
        stage.share("environment", 0.25)
    clock.now += 6.0
    work = {
        # The second call overlaps with the critic's, which ends later: that one is waited for.
        "policy": Work([[(105.0, 106.0), (106.0, 107.0), (108.0, 109.5)]]),
        "critic": Work([[(105.5, 108.0)]]),
        "generation": Work([[(108.5, 110.0)]], has_all=False),
        "reward": Work([[(101.0, 102.0)], [(109.0, 110.0)]], is_awaited=False),
    }
    assert stages.finish_step(1, lambda now: work) == {
        "time/generation": 3.0,
        "time/environment": 1.0,
        "time/step": 10.0,
        "idle/policy": pytest.approx(0.65),
        "idle/critic": pytest.approx(0.75),
        "idle/reward": pytest.approx(0.9),
        "critical/policy": 0.0,
        "critical/critic": pytest.approx(0.25),
        "critical/generation": pytest.approx(0.45),
        "critical/environment": pytest.approx(0.1),
        # 4.0 to 5.5 and 8.0 to 8.5: the policy did not end last.
        "critical/driver": pytest.approx(0.2),
    }


def test_work_on_both_sides_of_a_step_counts_inside():
    spans = [(-5.0, 2.0), (1.0, 3.0), (3.5, 4.0), (8.0, 99.0), (-9.0, -8.0)]
    assert merge_spans(spans, 0.0, 10.0) == [(0.0, 3.0), (3.5, 4.0), (8.0, 10.0)]
    assert merge_spans(spans, 0.0, 10.0, gap=1.0) == [(0.0, 4.0), (8.0, 10.0)]


@pytest.mark.parametrize("seed", range(50))
def test_shares_of_the_critical_path_add_up_and_lie_in_the_work(seed, clock):
    draw, stages = Random(seed), Stages([])

    def spans():
        begins = [draw.uniform(90, 115) for _ in range(draw.randrange(6))]
        return [(begin, begin + draw.uniform(0, 8)) for begin in begins]

    clock.now += 10.0
    work = {kind: Work([spans()]) for kind in ("policy", "critic", "generation")}
    metrics = stages.finish_step(1, lambda now: work)
    assert sum(metrics[name] for name in metrics if name.startswith("critical/")) == pytest.approx(1)
    for kind in work:
        assert metrics[f"critical/{kind}"] >= 0
        assert metrics[f"critical/{kind}"] + metrics[f"idle/{kind}"] <= 1 + 1e-9
