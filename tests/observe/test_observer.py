"""The loop calls one object, and all files, the console and the report know."""

import io
import json
import logging
from pathlib import Path

import pytest

from nemorl.config.run import LoggerConfig
from nemorl.observe.files import WriteError
from nemorl.observe.metrics import Change, read_metrics, read_samples
from nemorl.observe.observer import Observer
from nemorl.observe.run_folder import RunFolder, read_header
from tests.full_disk import files_end_at
from tests.observe.examples import CONFIG, make_sample


def observe(folder: RunFolder, screen: io.StringIO, steps: range) -> Path:
    with Observer(folder, LoggerConfig(console="plain"), total_steps=3, stream=screen) as observer:
        observer.header({"model": "tiny"})
        with observer.stage("start", outside_step=True):
            pass
        for step in steps:
            with observer.stage("generation", total=4, unit="trajectories") as stage:
                stage.advance(4, tokens=40)
            with observer.stage("training"):
                logging.getLogger("nemorl.somewhere").info("a note for the file")
            observer.samples([make_sample(step)])
            values = {"reward/mean": step / 4, "tokens/trained": 60.0, "tokens/generated": 40.0}
            observer.step(step, version=step, values=values | observer.end_step(step))
        logging.getLogger("another.library").warning("look here")
        return observer.summary([Change("reward/mean", 0.25, 0.75)])


def test_the_rate_of_sampling_ahead_is_that_of_the_whole_step(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    with Observer(
        folder, LoggerConfig(), total_steps=1, samples_ahead=True, stream=io.StringIO()
    ) as observer:
        line = observer.step(1, version=1, values={"tokens/generated": 40.0, "time/step": 8.0})
    assert line.values["throughput/generated_tokens_per_second"] == 5.0


def test_one_run_from_start_to_report(run_dir):
    screen = io.StringIO()
    report = observe(RunFolder.create(run_dir, CONFIG), screen, range(1, 4))

    steps = read_metrics(run_dir / "metrics.jsonl")
    assert [(step.step, step.values["reward/mean"]) for step in steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    values = steps[0].values
    assert {key for key in values if key.startswith("time/")} == {
        "time/generation",
        "time/training",
        "time/step",
    }
    assert values["throughput/tokens_per_second"] == pytest.approx(60 / values["time/step"])
    assert values["throughput/generated_tokens_per_second"] == pytest.approx(40 / values["time/generation"])
    assert [sample.step for sample in read_samples(run_dir / "samples.jsonl")] == [1, 2, 3]

    timeline = json.loads((run_dir / "timeline.json").read_text())
    assert [event["name"] for event in timeline if event["ph"] == "X"][:4] == [
        "start", "generation", "training", "step 1",
    ]  # fmt: skip
    assert read_header(run_dir / "header.json")[0]["run"] == {"model": "tiny"}

    printed = screen.getvalue()
    assert printed.startswith("model  tiny\nstep 1/3: reward 0.25, ")
    assert "WARNING another.library: look here" in printed
    assert printed.endswith(f"reward/mean: 0.25 before, 0.75 after\nreport: {report}\n")
    log = (run_dir / "logs" / "driver.log").read_text()
    assert "INFO nemorl.somewhere: a note for the file" in log
    assert "a note for the file" not in printed
    assert report.stat().st_size > 1_000_000  # the plots' script is inside


def test_a_report_without_room_is_a_warning_and_a_log_without_room_is_silent(run_dir, capsys):
    screen = io.StringIO()
    with (
        Observer(
            RunFolder.create(run_dir, CONFIG), LoggerConfig(console="plain"), total_steps=1, stream=screen
        ) as observer,
        files_end_at(20_000),
    ):
        for _ in range(30):
            logging.getLogger("nemorl.somewhere").info("x" * 1000)
        assert observer.summary([Change("reward/mean", 0.25, 0.75)]) is None
    printed = screen.getvalue()
    assert "report.html could not be written: File too large" in printed
    assert f"`nemorl report {run_dir}` tries again" in printed
    assert "reward/mean: 0.25 before, 0.75 after" in printed
    assert capsys.readouterr().err == ""


def test_a_full_disk_names_the_file_also_where_the_log_does_not_fit(run_dir, capsys):
    folder, config = RunFolder.create(run_dir, CONFIG), LoggerConfig(console="plain")
    with files_end_at(20_000), Observer(folder, config, total_steps=1) as observer:
        for _ in range(30):  # the last of which stay in the buffer of the log
            logging.getLogger("nemorl.somewhere").info("x" * 1000)
        with pytest.raises(WriteError, match=r"samples.jsonl could not be written: File too large; .* MB"):
            observer.samples([make_sample(1, completion="x" * 30_000)])
    assert capsys.readouterr().err == ""


def test_a_warning_is_shown_once(run_dir):
    screen, before = io.StringIO(), io.StringIO()
    of_the_command_line = logging.StreamHandler(before)
    logging.getLogger().addHandler(of_the_command_line)
    try:
        folder = RunFolder.create(run_dir, CONFIG)
        with Observer(folder, LoggerConfig(console="plain"), total_steps=1, stream=screen):
            logging.getLogger("a.library").warning("look here")
        logging.getLogger("a.library").warning("afterwards")
    finally:
        logging.getLogger().removeHandler(of_the_command_line)
    assert screen.getvalue().count("look here") == 1
    assert before.getvalue() == "afterwards\n"


def test_logging_and_the_folder_are_free_afterwards(run_dir):
    before = list(logging.getLogger().handlers)
    with (
        pytest.raises(KeyboardInterrupt),
        Observer(RunFolder.create(run_dir, CONFIG), LoggerConfig(), total_steps=3, stream=io.StringIO()),
    ):
        raise KeyboardInterrupt
    assert logging.getLogger().handlers == before
    RunFolder.resume(run_dir, CONFIG, step=None).close()


def test_a_resumed_run_has_each_step_once(run_dir):
    screen = io.StringIO()
    observe(RunFolder.create(run_dir, CONFIG), screen, range(1, 3))
    observe(RunFolder.resume(run_dir, CONFIG, step=1), screen, range(2, 4))
    assert [step.step for step in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3]
