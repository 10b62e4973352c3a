"""The site of the documentation: it builds strictly, its links lead somewhere, and it requests nothing."""

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from nemorl.config.schema import describe

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.ci


class Html(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "object") and "src" in values:
            self.loads.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """Without what is copied from other folders."""
    files = [path for path in site.rglob("*.html") if "source" not in path.relative_to(site).parts]
    return {p.relative_to(site).as_posix(): Html(p.read_text(encoding="utf-8")) for p in files}


def nav_pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from nav_pages(below)


def test_every_page_is_in_the_navigation_and_built(pages: dict[str, Html]) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = list(nav_pages(yaml.safe_load(text)))
    assert len(listed) == len(set(listed))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    generated = {"reference/index.md", "defaults.md", "contributing.md", "changelog.md"}
    assert set(listed) == docs | generated
    names = {re.sub(r"README\.html$", "index.html", uri.replace(".md", ".html")) for uri in listed}
    assert names <= pages.keys()


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[str, Html]) -> None:
    broken = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
            target = name if not parts.path else target
            anchor = unquote(parts.fragment)
            if not (site / target).is_file():
                broken.append(f"{name}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{name}: {link} (no such anchor)")
    assert not broken


def test_nothing_is_requested_from_other_servers(site: Path, pages: dict[str, Html]) -> None:
    outside = [
        f"{name}: {load}" for name, page in pages.items() for load in page.loads if urlsplit(load).netloc
    ]
    styles = list(site.rglob("*.css"))
    assert styles
    outside += [
        f"{path.name}: {found}"
        for path in styles
        for found in re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']+", path.read_text("utf-8"))
    ]
    assert not outside


def test_the_reference_has_every_field(pages: dict[str, Html], site: Path) -> None:
    text = (site / "reference" / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r"<tr>\s*<td><code>", text)
    assert len(shown) == len(describe())
    assert "policy.optimizer" in (site / "defaults.html").read_text(encoding="utf-8")
