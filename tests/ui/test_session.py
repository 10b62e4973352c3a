"""A session with the web app: experiments that are started, watched, stopped, resumed and read, for real."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.observe.live import read_live
from nemorl.observe.metrics import read_metrics
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles
from tests.run.runs import tiny_model, write_experiment
from tests.ui.browser import browser_of, served

STEPS = 400
RUN_MS = 180_000  # in which a run starts on a slow and busy machine
FROZEN = re.compile("longer than usual|does not answer|makes no progress")
pytestmark = pytest.mark.ci


def prepare(folder: Path) -> None:
    """Two experiments of a tiny model: a short one, and one that is stopped."""
    model = tiny_model(folder / "model")
    validation = {"period": None, "at_start": False, "at_end": False}
    common = {
        "policy": {"layout": {"tensor_parallel_size": 1}, "micro_batch_tokens": 512},
        "checkpointing": {"period": 1000},
        "generation": {"max_new_tokens": 6},
        "rewards": [{"function": "starts_right:starts_right"}],
    }
    for name, steps in (("short", 3), ("long", STEPS)):
        algorithm = {"num_steps": steps, "kl": {"coefficient": 0.0}, "validation": validation}
        path = write_experiment(folder, model, name, algorithm=algorithm, **common)
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        tree["run_dir"] = f"runs/{name}"
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    source = Path(__file__).parents[1] / "run" / "rewards.py"
    (folder / "starts_right.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def steps_of(folder: Path) -> int:
    path = RunPaths(folder).metrics
    return len(read_metrics(path)) if path.exists() else 0


def until(reached: object, seconds: float = RUN_MS / 1000) -> None:
    assert callable(reached)
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_from_an_experiment_to_a_resumed_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    run = tmp_path / "runs" / "long"
    with served(tmp_path) as (url, token, server):
        with browser_of(url, token) as shown:
            page = shown.page
            page.set_default_timeout(RUN_MS)
            for name in ("short", "long"):  # started from Compose, in sequence
                shown.open(f"compose?file={name}.yaml")
                page.locator("#verdict", has_text=re.compile("^OK")).wait_for()
                page.get_by_role("button", name="Start", exact=True).dblclick()
                page.wait_for_url(f"**/watch?run=runs%2F{name}")
                if name == "short":
                    page.locator("[data-state=complete]").wait_for()
            # Stages and curves move.
            page.locator(".stage.open").first.wait_for()
            page.locator("[data-plot=Reward] canvas").wait_for()
            page.get_by_text(re.compile(rf"^[3-9] / {STEPS}|^\d\d+ / {STEPS}")).wait_for()
            page.reload()
            page.locator("[data-plot=Reward] canvas").wait_for()
            live = read_live(RunPaths(run).live)
            assert live is not None
            assert f"{live.pid}" not in page.content()  # shown are the workers
            page.get_by_role("tab", name="Processes").click()
            engine = int(page.get_by_role("row", name="generation-0").locator("td").nth(2).inner_text())

            # An engine that is frozen raises an alarm, which goes when it continues.
            frozen = page.get_by_role("alert").filter(has_text=FROZEN).first
            assert frozen.count() == 0
            os.kill(engine, signal.SIGSTOP)
            try:
                frozen.wait_for()
            finally:
                os.kill(engine, signal.SIGCONT)
            frozen.wait_for(state="detached")

            # A token's logprob is that of the file.
            files = RolloutFiles(RunPaths(run).trajectories)
            step, group = next(iter(files.summaries()))
            stored = files.group(step, 0).sequences[0]
            place = stored.loss_mask.nonzero()[0][0].item()
            shown.open(f"read?run=runs/long&at={step}/{group.group}/0")
            page.get_by_label("Tokens; arrow keys choose one").focus()
            for _ in range(place + 1):
                page.keyboard.press("ArrowRight")
            logprob = page.locator("[data-about='engine logprob']").inner_text()
            assert float(logprob) == pytest.approx(stored.logprobs[place].item(), rel=1e-3)

            # Stop saves the last step; resume continues from it.
            shown.open("watch?run=runs/long")
            page.get_by_role("button", name="Stop").click()
            page.locator("[data-state=stopped]").wait_for()
            stopped_after = steps_of(run)
            assert 0 < stopped_after < STEPS
            page.get_by_role("button", name="Resume").click()
            page.locator("[data-state=running]").wait_for()
            until(lambda: steps_of(run) > stopped_after)
            shown.open("compare?runs=runs/short,runs/long")
            page.locator("canvas").first.wait_for()
            shown.has_no_problem()

        # The run does not need the server.
        resumed = read_live(RunPaths(run).live)
        assert resumed is not None
        server.kill()
        server.wait()
        reached = steps_of(run)
        until(lambda: steps_of(run) > reached + 1)
        assert psutil.pid_exists(resumed.pid)
    with served(tmp_path) as (url, token, server), browser_of(url, token, theme="dark") as shown:
        page = shown.page
        page.set_default_timeout(RUN_MS)
        shown.open("watch?run=runs/long")
        page.get_by_role("button", name="Stop").click()
        page.locator("[data-state=stopped]").wait_for()
        shown.has_no_problem()
    steps = [step.step for step in read_metrics(RunPaths(run).metrics)]
    assert steps == [*range(1, steps[-1] + 1)]
    assert load_experiment(RunPaths(run).config).algorithm.num_steps == STEPS
