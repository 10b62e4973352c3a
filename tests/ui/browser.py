"""The web app in a real browser: `nemorl ui` as a command, and Chromium on its address."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.required import require_chromium, require_module

TIMEOUT_MS = 60_000  # of a busy machine


@dataclass
class Page:
    """A page, and everything that it must not do."""

    page: Any  # of playwright
    url: str  # of the server
    token: str
    problems: list[str] = field(default_factory=list)  # messages of the console, errors, requests elsewhere

    def open(self, view: str) -> None:
        self.page.goto(f"{self.url}/{view}#{self.token}")

    def has_no_problem(self) -> None:
        assert self.problems == [], self.problems


@contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[str, str, "subprocess.Popen[str]"]]:
    """Address, token and process of `nemorl ui` in a folder."""
    command = [sys.executable, "-m", "nemorl.cli", "ui", "--no-browser", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\S*#(\S+)\n", process.stdout.readline())
        assert found is not None
        yield found[1], found[2], process
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def browser_of(url: str, token: str, *, width: int = 1400, theme: str = "light") -> Iterator[Page]:
    """A browser that reports what goes wrong in it."""
    sync_api = require_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": require_chromium(), "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        context.set_default_timeout(TIMEOUT_MS)
        shown = Page(context.new_page(), url, token)
        page, problems = shown.page, shown.problems
        # Chromium's own report of a refused request is part of the refusals that a test makes.
        page.on("console", lambda m: problems.append(m.text) if _is_problem(m) else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if _is_own(r.url, url) else problems.append(f"request of {r.url}"))
        try:
            yield shown
        finally:
            browser.close()


@contextmanager
def page_of(folder: Path, *words: str, **options: Any) -> Iterator[Page]:
    """`nemorl ui` in a folder and a browser on it."""
    require_chromium()
    with served(folder, *words) as (url, token, _), browser_of(url, token, **options) as page:
        yield page


def _is_problem(message: Any) -> bool:
    refusals = "Failed to load resource: the server responded with a status of"
    return message.type in ("error", "warning") and not message.text.startswith(refusals)


def _is_own(address: str, url: str) -> bool:
    return address.startswith((f"{url}/", "blob:", "data:"))
