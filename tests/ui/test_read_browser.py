"""Read and Compare in a browser: by keyboard and mouse, with numbers of the files; text runs nothing."""

import re
from typing import Any

import pytest

from tests.observe.examples import make_sample
from tests.ui.browser import Page, page_of
from tests.ui.stored_runs import make_run, write_config, write_samples

pytestmark = pytest.mark.ci

HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title=2</script>\x1b[31m\u202eevil\u202c\u200b'
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one", answer=HOSTILE + "{n}")
    make_run(root / "other", better=0.25)
    write_config(root / "old", root / "model")
    write_samples(
        root / "old", [make_sample(1, completion=HOSTILE), make_sample(2, completion="x" * 1_000_000)]
    )
    with page_of(root) as shown:
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


def test_runs_are_compared(page: Page) -> None:
    page.open("compare?runs=one,other")
    p = page.page
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
