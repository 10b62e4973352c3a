"""Read and Compare in a browser: by keyboard and mouse, with numbers of the files; text runs nothing."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.observe.examples import make_sample
from tests.ui.browser import TIMEOUT_MS, Page, page_of
from tests.ui.folders import make_run as make_watched_run
from tests.ui.folders import write_live
from tests.ui.stored_runs import make_run, write_config, write_samples

pytestmark = pytest.mark.ci

HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title=2</script>\x1b[31m\u202eevil\u202c\u200b'
)

# Keeps what charts write, which is drawn and not part of the page.
RECORD_TICKS = """
window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  window.drawn.push(text);
  return fill.call(this, text, ...rest);
};
"""
TICKS = "async (values) => (await import('/static/lib/chart.js')).ticks(values)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one", answer=HOSTILE + "{n}")
    make_run(root / "other", better=0.25)
    make_run(root / "one, too", better=0.25)
    make_watched_run(root / "away", pid=1, host="elsewhere")
    write_config(root / "old", root / "model")
    write_samples(
        root / "old", [make_sample(1, completion=HOSTILE), make_sample(2, completion="x" * 1_000_000)]
    )
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> Any:
    with page_of(root) as shown:
        shown.page.add_init_script(RECORD_TICKS)
        yield shown
        shown.has_no_problem()


def text_of(page: Page, selector: str) -> str:
    return str(page.page.locator(selector).first.inner_text())


def test_the_table_is_filtered_sorted_and_walked_by_keyboard(page: Page) -> None:
    page.open("read?run=one")
    p = page.page
    p.get_by_text("16 trajectories", exact=True).wait_for()
    p.get_by_label("Filter").fill("rewrd > 1")
    p.locator(".wrong mark").wait_for()
    assert text_of(page, ".wrong mark") == "rewrd"
    assert "did you mean `reward`?" in text_of(page, "#filter-says")
    assert p.get_by_role("row").count() > 10  # the rows of before stay

    p.get_by_label("Filter").fill('phase == "training"')
    p.get_by_text("12 of 16 trajectories").wait_for()
    p.get_by_role("group", name="stored").get_by_role("button", name="true").click()
    p.get_by_text("6 of 16 trajectories").wait_for()
    assert p.get_by_label("Filter").input_value() == 'phase == "training" and stored'
    p.get_by_role("group", name="Histogram of reward").get_by_role("button").last.click()
    p.get_by_text("3 of 16 trajectories").wait_for()
    p.get_by_role("columnheader", name="step").get_by_role("button").click()
    grid = p.get_by_role("grid")
    grid.focus()
    p.keyboard.press("ArrowDown")
    p.keyboard.press("ArrowDown")
    p.keyboard.press("Enter")
    p.get_by_role("heading", name="Trajectory 2/2/0").wait_for()
    assert re.search(r"at=2%2F2%2F0", p.url)


def test_a_token_has_the_numbers_of_the_file(page: Page) -> None:
    page.open("read?run=one&at=2/2/1")
    p = page.page
    p.locator(".t").first.wait_for()
    assert p.locator(".t").all_inner_texts()[:7] == [*"2+2=no", "<end>"]
    p.get_by_label("Tokens; arrow keys choose one").focus()
    for _ in range(6):
        p.keyboard.press("ArrowRight")
    p.locator("[data-about='position']").get_by_text("5", exact=True).wait_for()
    # The n-th token has the logprob -n / 100 of the engine, and 0.25 more of the trainer (stored_runs.py).
    assert text_of(page, "[data-about='engine logprob']") == "-0.05"
    assert text_of(page, "[data-about='trainer logprob']") == "0.2"
    assert text_of(page, "[data-about='trained']") == "yes"
    p.get_by_label("Color by").select_option("advantage")
    p.locator(".t.n9").first.wait_for()
    p.get_by_label("ids", exact=True).check()
    p.get_by_text("50", exact=True).first.wait_for()
    p.get_by_role("tab", name="Group").click()
    p.get_by_text("no<end>?né 💡<end>").wait_for()
    p.get_by_role("tab", name="Task over the steps").click()
    p.get_by_text("step 3 · sample 0").wait_for()
    p.get_by_label("every sample of a step").check()
    p.get_by_text("step 3 · sample 1").wait_for()
    p.reload()
    p.get_by_text("step 3 · sample 1").wait_for()  # the address holds the view


def test_a_search_opens_what_it_finds(page: Page) -> None:
    page.open("read?run=one")
    p = page.page
    p.get_by_label("Search").fill("né 💡")
    p.get_by_role("button", name="Search").click()
    p.get_by_text("looked at 8 of 8 stored").wait_for()
    p.locator(".match").first.click()
    p.get_by_role("heading", name="Trajectory 3/4/1").wait_for()
    p.locator(".t.here").wait_for()


@pytest.mark.parametrize(
    "view", ["read?run=one&at=1/0/0", "read?run=one&at=1/0/0&tab=group", "read?run=old&at=1/1/0"]
)
def test_text_of_models_runs_nothing_and_is_visible(page: Page, view: str) -> None:
    page.open(view)
    p = page.page
    p.locator(".t, .answer pre, .segment pre").first.wait_for()
    shown = "".join(p.locator(".t, .answer pre, .segment pre").all_inner_texts())
    assert '<img src=x onerror="document.title=1">' in shown
    # A token that is part of the character before is an ellipsis.
    named = ("\u241b[31m", "U+202E", "evil", "U+202C", "U+200B")
    assert re.search("\\W+".join(map(re.escape, named)), shown)
    assert p.locator("#main img, #main script").count() == 0
    assert "nemorl" in p.title()


def test_a_run_of_texts_with_a_long_line(page: Page) -> None:
    page.open("read?run=old&at=2/2/0")
    page.page.get_by_text("has no index of trajectories").first.wait_for()
    page.page.locator(".segment pre").nth(1).wait_for()
    assert len(page.page.locator(".segment pre").nth(1).inner_text()) == 1_000_000


@pytest.mark.parametrize("other", ["other", "one, too"])
def test_runs_are_compared(page: Page, other: str) -> None:
    page.open("runs?find=one" if "," in other else "runs?find=o")
    p = page.page
    for name in ("one", other):
        p.get_by_label(f"Compare {name}", exact=True).check()
    p.get_by_role("button", name="Compare 2").click()
    p.get_by_role("heading", name="reward/mean").wait_for()
    p.locator(".chart canvas").first.wait_for()
    p.get_by_role("tab", name="Configuration").click()
    p.get_by_text("0 fields differ").wait_for()
    p.get_by_role("tab", name="Same tasks").click()
    p.get_by_text("4 tasks in both").wait_for()
    # Differences of 0.5, 0.5, 0.5 and 0: 0.375 ± 3.18 · 0.25 / √4.
    assert text_of(page, "[data-interval]") == "+0.375 [-0.0223, 0.772]"
    p.get_by_role("button", name="easy 1", exact=True).click()
    p.get_by_text("2<end>", exact=True).nth(1).wait_for()


def test_a_histogram_is_one_stop_of_the_tab_key(page: Page) -> None:
    page.open("read?run=one")
    p = page.page
    bins = p.get_by_role("group", name="Histogram of reward").get_by_role("button")
    bins.first.wait_for()
    count = bins.count()
    assert count > 2
    assert p.locator(".histogram button[tabindex='0']").count() == 1
    bins.first.focus()
    p.keyboard.press("ArrowRight")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert p.evaluate(focused) == bins.nth(1).get_attribute("aria-label")
    p.keyboard.press("End")
    assert p.evaluate(focused) == bins.nth(count - 1).get_attribute("aria-label")
    p.keyboard.press("Enter")
    p.get_by_text(re.compile(r"^\d+ of 16 trajectories$")).wait_for()
    p.get_by_role("group", name="Histogram of reward").get_by_role("button").first.focus()
    p.keyboard.press("Tab")
    assert p.evaluate("document.activeElement.closest('.histogram')") is None


def drawn(page: Page, last: str) -> list[str]:
    """What charts have written once the text of the last tick is there."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while last not in (texts := page.page.evaluate("drawn")):
        assert time.monotonic() < deadline, texts
        time.sleep(0.1)
    return texts  # type: ignore[no-any-return]


def test_charts_by_position_and_step_have_whole_ticks_that_differ(page: Page) -> None:
    page.open("read?run=one&at=2/2/1")
    p = page.page
    p.locator(".chart canvas").wait_for()
    assert not [text for text in drawn(page, "6") if re.fullmatch(r"\d+\.5", text)]
    p.evaluate("drawn.length = 0")
    p.get_by_role("tab", name="Task over the steps").click()
    assert not [text for text in drawn(page, "3") if re.fullmatch(r"[12]\.\d", text)]
    assert p.evaluate(TICKS, [4, 4.001, 4.002]) == ["4", "4.001", "4.002"]
    assert p.evaluate(TICKS, [1000.2, 1000.4, None]) == ["1,000.2", "1,000.4", ""]
    assert p.evaluate(TICKS, [0, 0.1, 0.2, 0.30000000000000004]) == ["0", "0.1", "0.2", "0.3"]
    assert p.evaluate(TICKS, [1e-6, 2e-6, 12000]) == ["1e-6", "2e-6", "12,000"]


def test_leaving_a_table_that_loads_shows_no_error_and_back_closes_a_trajectory(page: Page) -> None:
    page.open("runs")
    p = page.page
    p.get_by_role("link", name="one", exact=True).click()
    p.locator("[data-plot=Reward] canvas").wait_for()
    p.route("**/api/read/*", lambda route: None)  # which is never answered
    with p.expect_request("**/api/read/table*"):
        p.get_by_role("link", name="Read", exact=True).click()
    p.get_by_role("link", name="Runs", exact=True).click()
    p.get_by_role("heading", name="Runs").wait_for()
    assert p.locator(".problem").count() == 0
    p.unroute("**/api/read/*")
    p.go_back()
    p.get_by_text("16 trajectories", exact=True).wait_for()
    assert p.locator(".problem").count() == 0
    p.get_by_role("grid").focus()
    p.keyboard.press("ArrowDown")
    p.keyboard.press("Enter")
    p.get_by_role("heading", name=re.compile("^Trajectory")).wait_for()
    p.go_back()
    p.get_by_role("heading", name=re.compile("^Trajectory")).wait_for(state="detached")
    assert p.url.endswith("/read?run=one")
    p.get_by_text("16 trajectories", exact=True).wait_for()


def test_a_run_of_another_host_has_no_stop_and_says_where_it_runs(page: Page, root: Path) -> None:
    write_live(root / "away", host="elsewhere")
    page.open("watch?run=away")
    p = page.page
    p.get_by_text("runs on elsewhere: stop it there").wait_for()
    assert p.get_by_role("button", name="Stop").count() == 0


def test_an_address_without_a_page_leads_to_the_start(page: Page) -> None:
    page.open("nosuch")
    p = page.page
    p.get_by_text("GET /nosuch: Not Found").wait_for()
    p.get_by_role("link", name="Start with the list of runs").click()
    p.get_by_role("columnheader", name="ran").get_by_role("button").click()
    assert p.locator("th[aria-sort]").inner_text().startswith("ran")
