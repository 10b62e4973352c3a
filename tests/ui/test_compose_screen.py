"""The screen Compose in a browser: compose by form, break, fix, reward, save, and check by the command."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.experiments import GRPO, write
from tests.plan.models import write_model
from tests.ui.browser import Page, page_of
from tests.ui.folders import make_run
from tests.ui.user_rewards import REWARDS

DPO = """\
run_dir: runs/pairs
policy: {model_path: models/arithmetic, precision: float32, max_sequence_length: 64, micro_batch_tokens: 512}
data: {train: {name: arithmetic, digits: 2, size: 100}, chat: false}
algorithm: {name: dpo, num_steps: 3, batch_size: 8}
"""
SAMPLES = """\
{"step": 1, "phase": "training", "task": 3, "prompt": "1+1=", "completion": "2", "answer": "2"}
{"step": 1, "phase": "training", "task": 4, "prompt": "1+2=", "completion": "4", "answer": "3"}
"""


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

        assert "devices=2" in at.url

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


@pytest.mark.ci
def test_new_files_other_machines_and_own_functions(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "arithmetic")
    write(tmp_path, GRPO, "sums.yaml")
    write(tmp_path, DPO, "pairs.yaml")
    write(tmp_path, "# theirs\nalgorithm: {}\n", "grpo.yaml")
    make_run(tmp_path / "runs" / "sums")
    (tmp_path / "runs" / "sums" / "samples.jsonl").write_text(SAMPLES, encoding="utf-8")

    with page_of(tmp_path) as page:
        at = page.page
        # A recipe whose name a file has.
        page.open("compose")
        at.get_by_label("Find").fill("quickstart/grpo")
        at.get_by_role("link", name="quickstart/grpo", exact=True).click()
        at.wait_for_selector("text=grpo.yaml is another file of this folder, and stays as it is")
        assert at.get_by_label("File name").input_value() == "grpo-2.yaml"
        at.wait_for_selector("text=not saved")
        at.get_by_label("File name").fill("grpo.yaml")
        at.get_by_role("button", name="Save", exact=True).click()
        at.wait_for_selector("[role=alertdialog]:has-text('was changed by another program')")
        assert (tmp_path / "grpo.yaml").read_text(encoding="utf-8").startswith("# theirs\n")
        at.get_by_role("button", name="Take this").click()
        at.wait_for_selector(".cm-line:has-text('# theirs')")
        at.wait_for_url("**/compose?file=grpo.yaml")
        # It is the recipe again, and not the text of the disk, when it is opened again.
        at.get_by_role("button", name="Other file").click()
        at.get_by_label("Find").fill("quickstart/grpo")
        at.get_by_role("link", name="quickstart/grpo", exact=True).click()
        at.wait_for_selector("text=not saved")
        at.wait_for_selector(".cm-line:has-text('Second half')")

        # A file that is renamed is not saved under the new name.
        page.open("compose?file=sums.yaml")
        at.wait_for_selector("#verdict:text-is('OK, but run_dir contains a run')")
        assert "line 1" in at.locator("ul.problems li:has-text('run_dir')").inner_text()
        at.wait_for_selector(".field .notice:has-text('continue it with --resume, or set another folder')")
        assert at.locator(".field.wrong").count() == 0
        assert at.locator("text=not saved").count() == 0
        at.get_by_label("File name").fill("copy.yaml")
        at.wait_for_selector("text=not saved")
        at.get_by_role("button", name="Save", exact=True).click()
        at.wait_for_url("**/compose?file=copy.yaml")
        assert (tmp_path / "copy.yaml").read_text(encoding="utf-8") == GRPO

        # A preset is another machine for the planner; whole runs are those of algorithms that sample.
        ranking = at.get_by_label("whole runs by seconds of a step")
        page.open("compose?file=sums.yaml&tab=plan&preset=8x80")
        at.wait_for_selector("text=Start runs on this machine")
        at.wait_for_selector("text=The experiment uses no GPU (cluster.gpus_per_node is 0)")
        ranking.wait_for()
        page.open("compose?file=pairs.yaml&tab=plan&preset=8x80")
        at.wait_for_selector("h2:text-is('Layouts')")
        assert ranking.count() == 0

        # An own function: the signature, an error at its line, and a file whose change is a new verdict.
        page.open("compose?file=sums.yaml&tab=rewards")
        at.get_by_text("Own function").click()
        editor = at.locator(".python .cm-content")
        at.locator(".python .cm-line:has-text('def my_reward(completions')").wait_for()

        def own_file(text: str, button: str = "Save file") -> None:
            editor.click()
            at.keyboard.press("Control+a")
            at.keyboard.type(text)
            at.get_by_role("button", name=button).click()

        own_file("def broken(:")
        at.wait_for_selector(".problem:has-text('is no Python')")
        at.locator(".python .cm-lint-marker-error").wait_for()
        own_file("def mine(completions): return [1.0 for _ in completions]", "Save and add the last function")
        at.wait_for_selector(".source .cm-line:has-text('my_rewards:mine')")
        verdict(page, "OK")
        own_file("def other(completions): return [1.0 for _ in completions]")
        verdict(page, "1 problem")  # the file has no `mine`
        own_file("def mine(completions): return [float(len(c)) for c in completions]")
        verdict(page, "OK")

        # A preview of samples says what they do not show; results of before are marked.
        at.get_by_role("tab", name="Answers of a run").click()
        assert at.locator("[aria-label=Preview] select").input_value() == "runs/sums"
        at.get_by_role("button", name="Score").click()
        unknown = at.locator("p[role=status]:has-text('the share of groups without spread is unknown')")
        unknown.wait_for()
        assert "logger.trajectories: sampled or all" in unknown.inner_text()
        assert at.locator(".outdated").count() == 0
        at.get_by_label("Weight of mine", exact=True).focus()
        at.keyboard.press("ArrowRight")
        at.wait_for_selector(".source .cm-line:has-text('weight: 1.05')")
        assert at.locator(".outdated").count() == 0  # sums follow the sliders
        at.get_by_role("tab", name="Typed").click()
        at.wait_for_selector(".outdated")
        at.wait_for_selector("text=what follows is the result of before. Score again.")
        held: list[Any] = []
        at.route("**/api/compose/score", lambda route: held.append(route))
        at.get_by_role("button", name="Score").click()
        at.wait_for_selector("text=Scoring: what follows is the result of before")
        at.locator(".outdated").wait_for()
        held[0].continue_()
        at.locator(".outdated").wait_for(state="detached")
        at.wait_for_selector("text=groups (0 %) without spread")
        page.has_no_problem()

        # Rewards have names, and are of other kinds, too; the address has the source of the answers.
        at.get_by_label("Name of mine").fill("length")
        at.get_by_label("Name of mine").press("Enter")
        at.wait_for_selector(".source .cm-line:has-text('name: length')")
        at.get_by_role("tab", name="File of JSON lines").click()
        at.get_by_placeholder("answers.jsonl").fill("answers.jsonl")
        at.reload()
        at.get_by_placeholder("answers.jsonl").wait_for()
        assert at.get_by_placeholder("answers.jsonl").input_value() == "answers.jsonl"
        at.get_by_label("Reward to add").select_option("judge")
        at.get_by_role("button", name="Add", exact=True).click()
        at.wait_for_selector(".source .cm-line:has-text('kind: judge')")
        at.get_by_role("tab", name="Form", selected=True).wait_for()
        at.wait_for_selector(".problem:has-text('this field is required')")
        page.has_no_problem()
