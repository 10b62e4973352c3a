"""The files of the pages: complete, small, and as they were bundled."""

import gzip
import hashlib
import re

from nemorl.ui.app import SCREENS, STATIC
from tests.ui.requests import Client, asked

VENDOR = STATIC / "vendor"


def test_bundled_libraries_are_those_of_the_checksums():
    listed = dict(line.split()[::-1] for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["SHA256SUMS"]
    assert found == listed


def test_every_bundled_library_has_its_license():
    text = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    for name in ("preact", "@preact/signals", "htm", "uplot", "@codemirror/view", "@codemirror/lang-yaml"):
        assert re.search(rf"^{name} \d", text, re.MULTILINE), name


def imported(name: str, seen: set[str]) -> set[str]:
    """The script and all that it imports at once."""
    if name not in seen:
        seen.add(name)
        folder = (STATIC / name).parent
        text = (STATIC / name).read_text(encoding="utf-8")
        for other in re.findall(r'from"?\s*"(\.[^"]+)"', text):
            path = (folder / other).resolve()
            assert path.is_file(), f"{name} imports {other}"
            imported(path.relative_to(STATIC.resolve()).as_posix(), seen)
    return seen


def size(names: set[str]) -> int:
    return sum(len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in names)


def test_scripts_are_sent_compressed(tmp_path):
    async def work(client: Client) -> tuple[str, int, int, bytes]:
        path = "/static/vendor/codemirror.js"
        answer = await client.get(path, auto_decompress=False)
        length = len(await answer.read())
        known = {"If-None-Match": answer.headers["ETag"]}
        again = await client.get(path, headers=known, auto_decompress=False)
        return answer.headers["Content-Encoding"], length, again.status, await again.read()

    encoding, length, status, body = asked(tmp_path, work)
    assert encoding == "gzip"
    assert length < 160_000
    assert (status, body) == (304, b"")


def test_scripts_are_small():
    watch_and_read: set[str] = set()
    for name in ("main.js", "screens/watch.js", "screens/read.js"):
        imported(name, watch_and_read)
    assert size(watch_and_read) < 100_000
    scripts = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")}
    assert size(scripts) < 300_000


def test_every_screen_has_its_script_and_its_style():
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    for name in SCREENS:
        assert (STATIC / "screens" / f"{name}.js").is_file()
        assert f"/static/screens/{name}.css" in page
    for path in re.findall(r'(?:href|src)="/static/([^"]+)"', page):
        assert (STATIC / path).is_file(), path
