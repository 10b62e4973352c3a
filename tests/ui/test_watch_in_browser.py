"""The list of runs and a run that is watched, in a browser."""

import json
import time
from urllib.parse import urlencode

import pytest

from tests.ui.browser import page_of
from tests.ui.folders import append_steps, make_run, step_metrics, write_live

ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
ODD = "\x1b[31mred\x1b[0m \u202eabc\u202c \x00 "

pytestmark = pytest.mark.ci


def test_runs_are_found_marked_and_compared_by_keyboard(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, end={"outcome": "complete", "error": "", "time": ""})
    make_run(tmp_path / "three", steps=0, end={"outcome": "failed", "error": ATTACK, "time": ""})
    with page_of(tmp_path, theme="dark") as shown:
        shown.open("")
        page = shown.page
        page.get_by_role("link", name="two").wait_for()
        assert page.locator("tbody tr").count() == 3
        assert "#" not in page.url  # the token does not stay in the address
        page.get_by_label("Find").fill("fail")
        page.get_by_role("link", name="three").wait_for()
        assert page.locator("tbody tr").count() == 1
        page.get_by_label("Find").fill("")
        for name in ("one", "two"):
            page.get_by_label(f"Compare {name}").focus()
            page.keyboard.press("Space")
        page.reload()
        assert page.get_by_label("Compare one").is_checked()
        page.get_by_role("button", name="step").press("Enter")
        assert page.locator("th[aria-sort]").inner_text().startswith("step")
        page.get_by_role("button", name="Compare 2").click()
        page.wait_for_url("**/compare?runs=one%2Ctwo")
        page.go_back()
        page.get_by_role("link", name="three").click()
        page.locator("[data-state=failed]").wait_for()
        assert page.get_by_text(ATTACK).first.is_visible()
        assert page.title() != "owned"
        shown.has_no_problem()


def test_a_run_moves_on_the_screen_as_it_writes(tmp_path):
    folder = make_run(tmp_path / "run", steps=30, live={"step": 30, "total_steps": 100})
    (folder / "logs" / "driver.log").write_text(
        f"2026-01-01 10:00:00,000 WARNING nemorl.x: {ATTACK}{ODD}\n{'y' * 1_000_000}\n", encoding="utf-8"
    )
    with page_of(tmp_path) as shown:
        shown.open("watch?run=run")
        page = shown.page
        page.locator("[data-plot=Reward] canvas").wait_for()
        facts = page.locator(".facts")
        assert "30" in facts.inner_text()
        stages = page.locator(".stage").all_inner_texts()
        assert [text.split()[0] for text in stages] == ["generation", "training", "refit"]
        assert "bottleneck" in stages[0]
        append_steps(folder, [step_metrics(31, **{"stop/length": 2.0})])
        page.get_by_text("answers are truncated").wait_for()
        page.get_by_text("31 / 100").wait_for()
        engine = {"name": "generation replica 0", "state": "up"}
        write_live(folder, step=31, total_steps=100, engines=[engine], written=time.time())
        page.get_by_label("Smoothing").select_option("0.9")
        page.get_by_label("Axis").select_option("tokens")
        assert "smoothing=0.9" in page.url
        page.reload()
        page.locator("[data-plot=Reward] canvas").wait_for()
        assert page.get_by_label("Axis").input_value() == "tokens"
        page.get_by_role("tab", name="Charts").press("ArrowLeft")
        page.get_by_role("tab", name="Logs", selected=True).wait_for()
        page.get_by_text("document.title='owned'").first.wait_for()
        assert page.title() != "owned"
        page.get_by_label("Find").fill("zzz")
        page.get_by_text("No such line").wait_for()
        shown.has_no_problem()


def test_a_wrong_token_and_a_server_that_is_gone_are_sentences(tmp_path):
    make_run(tmp_path / "run")
    with page_of(tmp_path) as shown:
        page = shown.page
        page.goto(f"{shown.url}/#wrong")
        page.get_by_text("the token of this server is required").wait_for()
        page.goto(f"{shown.url}/watch?run=other#{shown.token}")
        page.get_by_text("no run in").wait_for()
        page.goto(f"{shown.url}/nothing")
        shown.has_no_problem()


def test_long_names_and_long_errors_are_readable_at_1000_pixels(tmp_path):
    error = f"OutOfMemoryError: rank 3 of policy\n  hint: lower micro_batch_tokens {ODD}"
    name = f"experiments/{'a_long_folder_' * 6}/grpo-{'qwen3' * 20} <b>"
    make_run(tmp_path / name, end={"outcome": "failed", "error": error, "time": ""})
    make_run(tmp_path / "none", steps=0, end={"outcome": "failed", "error": "no model", "time": ""})
    with page_of(tmp_path, width=1000) as shown:
        page = shown.page
        for view in (
            "runs",
            f"watch?{urlencode({'run': name})}",
            f"compare?{urlencode({'runs': f'{name},none'})}",
        ):
            shown.open(view)
            page.get_by_text("grpo-qwen3").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 1000
        shown.open(f"watch?{urlencode({'run': name})}")
        words = page.locator(".alarm .words").first
        words.wait_for()
        assert words.inner_text().splitlines()[1].startswith("  hint: lower micro_batch_tokens ␛[31mred")
        assert "U+202E" in words.inner_text()
        assert "5 / 10" in page.locator(".facts").inner_text()
        shown.open("watch?run=none")
        page.get_by_text("No step has ended.").wait_for()
        shown.has_no_problem()


def test_stages_after_the_last_step_are_drawn(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    spans = [(0, "step 1", 10, 1), (0, "step 2", 11, 1), (1, "training", 11, 1), (2, "export", 12.5, 1.5)]
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("steps", "training", "export"))
    ]
    events += [
        {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": start * 1e6, "dur": long * 1e6}
        for tid, name, start, long in spans
    ]
    lines = "\n,".join(map(json.dumps, events))
    (folder / "timeline.json").write_text(f"[\n{lines}\n", encoding="utf-8")
    with page_of(tmp_path) as shown:
        shown.open("watch?run=run&tab=lanes")
        page = shown.page
        page.get_by_text("the last 2 steps, 4.0 s").wait_for()
        last = page.locator("i[title='export: 1.5 s']").bounding_box()
        lane = page.locator(".lane").last.locator("div").bounding_box()
        assert last is not None
        assert lane is not None
        assert last["width"] == pytest.approx(lane["width"] * 1.5 / 4, rel=0.02)
        shown.has_no_problem()
