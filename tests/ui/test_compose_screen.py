"""The screen Compose in a browser: compose by form, break, fix, reward, save, and check by the command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.experiments import GRPO, write
from tests.plan.models import write_model
from tests.ui.browser import Page, page_of
from tests.ui.user_rewards import REWARDS


def verdict(page: Page, expected: str) -> None:
    page.page.wait_for_selector(f"#verdict:not(.muted):text-matches('^{expected}')")


@pytest.mark.ci
def test_compose_break_fix_score_and_save(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "arithmetic")
    text = GRPO.replace("  num_steps: 10\n", "  num_steps: 10   # few\n")
    file = write(tmp_path, text, "sums.yaml")
    write(tmp_path, REWARDS, "my_rewards.py")

    with page_of(tmp_path, width=1000) as page:
        at = page.page
        page.open("compose")
        at.get_by_role("link", name="sums.yaml").click()
        verdict(page, "OK")

        # By form: one line changes, and its comment stays.
        steps = at.get_by_label("num_steps", exact=True)
        steps.fill("12")
        steps.press("Enter")
        at.wait_for_selector(".source .cm-line:has-text('num_steps: 12   # few')")
        verdict(page, "OK")
        # Broken by form: the problem is at the field, at the line and in the list.
        steps.fill("none")
        steps.press("Enter")
        verdict(page, "1 problem")
        wrong = at.locator(".field.wrong")
        assert wrong.locator("label").inner_text() == "num_steps"
        assert "expected an integer" in wrong.inner_text()
        assert "line 17" in at.locator("ul.problems").inner_text()
        # Broken in the text: the form waits, and the text stays.
        at.locator(".source .cm-content").click()
        at.keyboard.press("Control+End")
        at.keyboard.type("[")
        at.wait_for_selector("#verdict:has-text('the text is broken; the form waits')")
        at.wait_for_selector("fieldset.waits:disabled")
        at.keyboard.press("Backspace")
        verdict(page, "1 problem")
        steps.fill("11")
        steps.press("Enter")
        verdict(page, "OK")

        # A search and a level.
        at.get_by_label("Find").fill("learning rate")
        at.wait_for_selector("label:text-is('lr')")
        assert at.locator("label:text-is('num_steps')").count() == 0
        at.get_by_label("Find").fill("")
        assert at.locator("label:text-is('eps')").count() == 0
        at.get_by_label("Level").select_option("expert")
        at.wait_for_selector("label:text-is('eps')", state="attached")

        # The picture and a layout.
        at.get_by_role("tab", name="Devices").click()
        at.wait_for_selector("g[role=button][aria-label^='actor']")
        at.get_by_label("Number of devices").fill("2")
        at.get_by_label("Number of devices").press("Enter")
        at.get_by_role("button", name=re.compile("^Use DP2")).first.click()
        at.wait_for_selector(".source .cm-line:has-text('data_parallel_size: 2')")
        verdict(page, "OK")

        # A reward that fails, then one that works; a slider moves the sum at once.
        at.get_by_role("tab", name="Rewards").click()
        own = "  - {function: 'my_rewards:raises', weight: 1}"
        at.locator(".cm-line:has-text('function: exact_match')").click()
        at.keyboard.press("End")
        at.keyboard.press("Enter")
        at.keyboard.press("Home")
        at.keyboard.press("Shift+End")
        at.keyboard.type(own)
        verdict(page, "1 problem")
        at.get_by_role("button", name="Score").click()
        at.wait_for_selector("pre:has-text('ZeroDivisionError')")
        at.locator(".cm-line:has-text('my_rewards:raises')").click()
        at.keyboard.press("End")
        at.keyboard.press("Shift+Home")
        at.keyboard.type(own.replace("raises", "right").lstrip())
        verdict(page, "OK")
        at.get_by_role("button", name="Score").click()
        sums = at.locator("tr:has(b:text-is('sum')) td").nth(5)
        at.wait_for_selector("text=0 of 1 groups (0 %) without spread")
        assert sums.inner_text() == "2"
        at.get_by_label("Weight of right", exact=True).focus()
        at.keyboard.press("ArrowRight")
        at.wait_for_selector(".cm-line:has-text('weight: 1.05')")

        # Save; the command accepts the file.
        at.get_by_role("button", name="Save", exact=True).click()
        at.wait_for_selector("text=not saved", state="detached")
        saved = file.read_text(encoding="utf-8")
        assert "num_steps: 11   # few" in saved
        done = subprocess.run(
            [sys.executable, "-m", "nemorl.cli", "check", "sums.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith("sums.yaml: OK"), done.stderr

        # Changed on disk meanwhile: both texts are shown, and nothing is overwritten.
        file.write_text("# theirs\n" + saved, encoding="utf-8")
        at.locator(".source .cm-content").click()
        at.keyboard.press("Control+End")
        at.keyboard.type("# mine")
        at.get_by_role("button", name="Save", exact=True).click()
        at.wait_for_selector("[role=alertdialog]:has-text('was changed by another program')")
        assert file.read_text(encoding="utf-8").startswith("# theirs\n")
        at.get_by_role("button", name="Take this").click()
        at.wait_for_selector(".cm-line:has-text('# theirs')")
        # A reload keeps the view and an unsaved text.
        at.locator(".source .cm-content").click()
        at.keyboard.press("Control+End")
        at.keyboard.type("# kept")
        at.wait_for_selector("text=not saved")
        at.reload()
        at.wait_for_selector(".cm-line:has-text('# kept')")
        page.has_no_problem()
