"""The list of runs and a run that is watched, in a browser."""

import time

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
