"""The page is right for whole, unfinished and odd runs, and shows what a model wrote as text only."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest

from nemorl.errors import UsageError
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.report import (
    metric_charts,
    reward_chart,
    stage_chart,
    stage_seconds,
    stage_totals,
    write_report,
)
from tests.observe.examples import make_sample
from tests.required import require_chromium

ATTACK = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)


def grpo_step(step: int) -> StepMetrics:
    return StepMetrics(
        step,
        step,
        {
            "reward/mean": 0.2 * step,
            "reward/std": 0.1,
            "loss/policy": -0.01 * step,
            "kl/reference": 0.001,
            "logprob_gap/mean": 1e-6,
            "logprob_gap/max": 1e-4,
            "grad_norm": math.inf if step == 2 else 0.5,
            "house/odd</script>": 1.0,
            "time/generation": 3.0,
            "time/training": 2.0,
            "time/step": 6.0,
            "validation/reward": 0.3,
        },
    )


def page_text(path: Path) -> str:
    """The page without the plots' script, which is most of it."""
    return re.sub(r"<script>/\*\*.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.S)


def test_time_that_no_stage_accounts_for_is_shown():
    assert stage_seconds(grpo_step(1)) == {"generation": 3.0, "training": 2.0, "other": 1.0}
    totals = stage_totals([grpo_step(1), grpo_step(2)])
    assert [(total.name, total.seconds) for total in totals] == [
        ("generation", 6.0), ("training", 4.0), ("other", 2.0),
    ]  # fmt: skip
    assert [total.fraction for total in totals] == pytest.approx([1 / 2, 1 / 3, 1 / 6])


def test_validation_lengths_are_not_drawn_among_shares():
    values = {"validation/reward": 0.3, "validation/pass@1": 0.2, "validation/length": 70.0}
    main, more = metric_charts(
        [StepMetrics(step, step, {**values, "validation/errors": 1.0}) for step in (1, 2)]
    )
    drawn = {chart.title: [line.name for line in chart.plot.data] for chart in (*main, *more)}
    assert drawn == {
        "Validation": ["reward", "pass@1"],
        "Sampled tokens in validation": ["length"],
        "validation/errors": ["errors"],
    }


def test_the_reward_has_its_band_and_the_validations():
    chart = reward_chart([grpo_step(1), grpo_step(2)])
    assert chart is not None
    band, training, validation = chart.plot.data
    assert list(band.x) == [1, 2, 2, 1]
    assert list(band.y) == pytest.approx([0.3, 0.5, 0.3, 0.1])
    assert list(training.y) == [0.2, 0.4]
    assert list(validation.y) == [0.3, 0.3]
    assert reward_chart([StepMetrics(1, 1, {"loss/sft": 2.0})]) is None


def test_every_metric_is_drawn_somewhere():
    main, more = metric_charts([grpo_step(1), grpo_step(2)])
    titles = [
        "Validation",
        "Loss",
        "Divergence from the reference",
        "Gradient norm",
        "Logprob gap between engine and trainer",
    ]
    assert [chart.title for chart in main] == titles
    assert [chart.title for chart in more] == ["house/odd</script>"]
    gap = main[-1].plot
    assert gap.layout.yaxis.type == "log"


def test_long_runs_average_their_bars():
    steps = [StepMetrics(n, n, {"time/training": float(n), "time/step": float(n)}) for n in range(1, 501)]
    chart = stage_chart(steps, stage_totals(steps))
    assert chart is not None
    (bars,) = chart.plot.data
    assert len(bars.x) == 167  # 500 steps in groups of 3
    assert list(bars.y)[:2] == [2.0, 5.0]
    assert list(bars.x)[:2] == [1, 4]


def test_what_a_model_wrote_is_text(write_run):
    sample = make_sample(1, prompt=ATTACK, completion=ATTACK, answer=ATTACK, error=ATTACK)
    page = page_text(write_report(write_run([grpo_step(1)], [sample], config=f"# {ATTACK}\n")))
    assert ATTACK not in page
    assert "<script>document" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;document.title=") == 5


def test_long_texts_are_cut_with_a_note(write_run):
    page = page_text(write_report(write_run([grpo_step(1)], [make_sample(1, completion="x" * 10_000)])))
    assert "6,000 more characters in samples.jsonl" in page


def test_what_each_reward_scores_highest_and_lowest_is_shown(write_run):
    """A judge that rewards begging shows in its highest scored answer, also in the middle of a run."""
    samples = [
        make_sample(step, completion=f"answer {step}", rewards={"math": 1.0, "judge": judge})
        for step, judge in enumerate((0.5, 0.1, 0.9, 0.1, 0.9, 0.4), 1)
    ]
    samples.append(make_sample(4, completion="lost", rewards={"judge": 2.0}, error="no score"))
    page = page_text(write_report(write_run([grpo_step(1)], samples)))

    _, judge = page.split("highest and lowest judge: 0.9 in step 5, 0.1 in step 4")
    assert judge.index("answer 5") < judge.index("answer 4")
    assert "highest and lowest math" not in page  # always the same
    assert "lost" not in judge


def test_every_reward_has_its_curve():
    names = ("reward/judge", "reward/math", "reward_std/judge", "reward_absent/judge", "reward_errors/judge")
    main, more = metric_charts([StepMetrics(step, step, dict.fromkeys(names, 0.5)) for step in (1, 2)])
    drawn = {chart.title: [line.name for line in chart.plot.data] for chart in main}
    assert drawn["Rewards by name"] == ["judge", "math"]
    assert drawn["Standard deviation of each reward"] == ["judge"]
    assert drawn["Trajectories lost to an error of a reward"] == ["judge"]
    assert not more


def test_samples_are_of_the_first_and_the_last_step(write_run):
    samples = [make_sample(step, completion=f"answer {step}.{n}") for step in (1, 2, 3) for n in range(5)]
    samples.append(make_sample(0, phase="validation", completion="answer 0"))
    page = page_text(write_report(write_run([grpo_step(1)], samples)))
    shown = re.findall(r"answer ([\d.]+)<", page)
    assert shown == ["1.0", "1.1", "1.2", "3.0", "3.1", "3.2", "0"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], "No step is done yet"),
        ([StepMetrics(0, 0, {"validation/reward": 0.5})], "not finished"),
        ([StepMetrics(1, 1, {})], "Metrics of step 1"),
        ([StepMetrics(n, n, {"loss/sft": 1 / n, "lr": 1e-4}) for n in (1, 2, 3)], "Learning rate"),
        ([grpo_step(n) for n in (1, 2, 3)], "grpo · models/tiny · finished"),
        ([StepMetrics(1, 1, {"reward/mean": math.nan, "reward/std": math.nan})], ">nan<"),
    ],
    ids=["no step", "validation only", "no figures", "sft", "whole", "nan"],
)
def test_any_run_has_a_page(write_run, steps, expected):
    page = page_text(write_report(write_run(steps)))
    assert expected in page
    for metric in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page):
        json.loads(metric)


@pytest.mark.parametrize(
    ("waited", "patience", "state"),
    [
        (2.0, 2, "finished early, as reward/mean got no better"),
        (1.0, 2, "not finished"),
        (2.0, 3, "not finished"),
    ],
)
def test_a_run_that_early_stop_ended_is_finished(write_run, waited, patience, state):
    stop = f"{{metric: reward/mean, patience: {patience}}}"
    config = f"algorithm: {{name: grpo, num_steps: 9, early_stop: {stop}}}\n"
    steps = [StepMetrics(1, 1, {"reward/mean": 0.5, "early_stop/waited": waited})]
    assert f"grpo · {state}" in page_text(write_report(write_run(steps, config=config)))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no run: neither config\.yaml nor metrics\.jsonl"):
        write_report(tmp_path)


def render(page: Path, profile: Path) -> str:
    """The page's elements after its scripts have run."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run "
        f"--virtual-time-budget=5000 --user-data-dir={profile} --dump-dom"
    )
    command = [require_chromium(), *flags.split(), page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_a_browser_draws_every_plot_and_runs_nothing_of_the_models(write_run, tmp_path):
    steps = [grpo_step(n) for n in range(1, 4)]
    run_dir = write_run(steps, [make_sample(1, completion=ATTACK)])
    drawn = render(write_report(run_dir), tmp_path / "profile")
    # Plotly has put its drawing into each place; `house/odd</script>` is one of the seven.
    plots = re.findall(r'<div class="plot js-plotly-plot" id="([a-z]+-\d)"', drawn)
    assert plots == ["lead-0", "main-0", "main-1", "main-2", "main-3", "main-4", "stages-0", "more-0"]
    assert "<title>run · nemorl</title>" in drawn
    assert len(re.findall(r'<g class="trace bars"', drawn)) == 3  # generation, training, other
