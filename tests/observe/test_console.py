"""What is printed, on a terminal and elsewhere."""

import asyncio
import io
import logging
import math
import re
import time

import pytest
from rich.console import Console as RichConsole

from nemorl.config.run import LoggerConfig
from nemorl.observe.metrics import Change, StepMetrics, format_number
from nemorl.observe.observer import BarConsole, PlainConsole, choose_columns, open_console
from nemorl.observe.timeline import Stages, format_seconds

STEP = StepMetrics(
    3, 3, {"reward/mean": 0.51234, "loss/policy": -0.0125, "time/step": 8.25, "validation/pass@1": 0.5}
)


@pytest.fixture
def screen():
    return io.StringIO()


def terminal(screen: io.StringIO, width: int = 100) -> RichConsole:
    return RichConsole(file=screen, force_terminal=True, width=width, color_system=None)


def text_of(screen: io.StringIO) -> str:
    """What was printed, without the control codes that move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


def test_a_step_is_a_line_that_explains_itself(screen):
    PlainConsole(screen, total_steps=20).step(STEP)
    assert screen.getvalue().splitlines() == [
        "step 3/20: reward 0.512, loss -0.0125, seconds 8.25",
        "step 3/20, validation: pass@1 0.5",
    ]


LOST = StepMetrics(
    3,
    3,
    {
        "reward/mean": 0.5,
        "errors": 2.0,
        "reward_errors/judge": 1.0,
        "reward_errors/format": 0.0,
        "guards/loss": 0.0,
        "guards/grad_norm": 1.0,
        "guards/rollbacks": 2.0,
        "updates/all": 4.0,
        "updates/skipped": 1.0,
        "updates/empty": 2.0,
        "critic/skipped_updates": 0.0,
    },
)
LOSSES = (
    "errors 2, reward_errors/judge 1 (why: logs/rollout-*.log), "
    "updates beyond limits: grad_norm 1, skipped 1 of 4 updates, "
    "nothing to learn in 2 of 4 updates"
)


def test_what_a_step_lost_is_on_its_line(screen):
    PlainConsole(screen, total_steps=20).step(LOST)
    assert screen.getvalue().splitlines() == [f"step 3/20: reward 0.5, {LOSSES}"]


def test_what_a_step_lost_is_below_its_row(screen):
    console = BarConsole(terminal(screen), total_steps=20)
    console.step(LOST)
    console.close()
    assert f"3/20  lost: {LOSSES}" in text_of(screen)


def test_quick_stages_are_silent_and_slow_ones_are_mentioned_less_and_less(screen):
    console = PlainConsole(screen, total_steps=1, slow_seconds=0.05)
    stages = Stages([console])
    with stages.stage("logprobs"):
        pass
    assert screen.getvalue() == ""

    with stages.stage("generation", total=128, unit="trajectories") as stage:
        stage.advance(34, tokens=10)
        begun = time.monotonic()
        while len(screen.getvalue().splitlines()) < 2:  # mentions are due after 0.05, 0.15, 0.35 … seconds
            assert time.monotonic() - begun < 30
            time.sleep(0.01)
    elapsed = time.monotonic() - begun + 0.01
    lines = screen.getvalue().splitlines()
    assert 2 <= len(lines) - 1 <= math.log2(elapsed / 0.05 + 1)
    assert re.fullmatch(r"generation: \d+\.\d s so far \(34/128 trajectories, .* tokens/s\)", lines[0])
    assert re.fullmatch(r"generation: done after \d+\.\d s \(34/128 trajectories, .* tokens/s\)", lines[-1])

    time.sleep(0.3)
    assert screen.getvalue().splitlines() == lines  # no clock continues behind our back


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError, "failed"), (KeyboardInterrupt, "interrupted"), (asyncio.CancelledError, "interrupted")],
)
def test_a_stage_says_how_it_ended(screen, error, told):
    stages = Stages([PlainConsole(screen, total_steps=1, slow_seconds=0)])
    with pytest.raises(error), stages.stage("generation"):
        raise error
    assert re.search(rf"generation: {told} after \d+\.\d s\n", screen.getvalue())
    assert "done" not in screen.getvalue()


def test_a_validation_before_the_first_step_does_not_choose_the_columns(screen):
    console = BarConsole(terminal(screen), total_steps=20)
    console.step(StepMetrics(0, 0, {"validation/accuracy": 0.25, "time/step": 2.0}))
    console.step(StepMetrics(1, 1, STEP.values))
    console.close()
    printed = text_of(screen)
    assert "0/20  validation: accuracy 0.25" in printed
    assert "reward" in printed
    assert "0.512" in printed


def test_the_table_has_one_heading_and_a_row_a_step(screen):
    console = BarConsole(terminal(screen), total_steps=20)
    for step in (3, 4):
        console.step(StepMetrics(step, step, STEP.values))
    console.close()
    printed = text_of(screen)
    assert len(re.findall(r"step +reward +loss +seconds", printed)) == 1
    assert re.search(r" 3/20 +0\.512 +-0\.0125 +8\.25", printed)
    assert re.search(r" 4/20 +0\.512 +-0\.0125 +8\.25", printed)
    assert "3/20  validation: pass@1 0.5" in printed


def test_bars_show_stage_progress_and_rate(screen):
    console = BarConsole(terminal(screen), total_steps=20, first_step=5)
    with Stages([console]).stage("generation", total=8, unit="trajectories") as stage:
        time.sleep(0.1)
        stage.advance(2, tokens=50)
        console._progress.refresh()
    console.close()
    printed = text_of(screen)
    assert "5/20" in printed
    assert re.search(r"generation .*2/8 trajectories, \d+ tokens/s", printed)


def test_warnings_appear_among_the_lines(screen):
    for console in (PlainConsole(screen, total_steps=1), BarConsole(terminal(screen), total_steps=1)):
        logger = logging.Logger("nemorl.test")
        logger.addHandler(console.logging_handler())
        logger.warning("one step was skipped [nan]")
        console.close()
    assert text_of(screen).count("one step was skipped [nan]") == 2


def test_model_names_are_not_markup(screen):
    console = BarConsole(terminal(screen), total_steps=1)
    console.header({"model": "models/[bold]tiny[/]"})
    console.summary([Change("validation/[red]x", 0.25, 0.75)], None)
    console.close()
    assert "models/[bold]tiny[/]" in text_of(screen)
    assert re.search(r"validation/\[red\]x +│ +0\.25 │ +0\.75 │ +\+0\.5", text_of(screen))


def test_the_summary_shows_before_and_after(screen, tmp_path):
    console = PlainConsole(screen, total_steps=1)
    console.summary([Change("validation/reward", None, 0.75)], tmp_path / "report.html")
    assert screen.getvalue().splitlines() == [
        "validation/reward: not measured before, 0.75 after",
        f"report: {tmp_path / 'report.html'}",
    ]


def test_bars_are_for_terminals_unless_asked_for(screen):
    def kind(mode: str) -> type:
        console = open_console(LoggerConfig.model_validate({"console": mode}), total_steps=1, stream=screen)
        console.close()
        return type(console)

    assert [kind(mode) for mode in ("auto", "plain", "rich")] == [PlainConsole, PlainConsole, BarConsole]


def test_a_narrow_terminal_keeps_the_important_columns():
    values = dict.fromkeys(["reward/mean", "reward/std", "loss/policy", "lr", "time/step"], 1.0)
    assert [c.column for c in choose_columns(values, 100)] == ["reward", "spread", "loss", "lr", "seconds"]
    assert [c.column for c in choose_columns(values, 30)] == ["reward", "loss", "seconds"]
    assert [c.column for c in choose_columns({"loss/sft": 1.0}, 100)] == ["loss"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (12345.0, "12,345"),
        (1234.56, "1,235"),
        (0.123456, "0.1235"),
        (2.5e-7, "2.5e-07"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value, written):
    assert format_number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (250, "4 min 10 s"), (7500, "2 h 05 min")],
)
def test_durations_are_read_at_a_glance(seconds, written):
    assert format_seconds(seconds) == written
