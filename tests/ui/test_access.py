"""Who may ask the web app: tokens, hosts, origins, sites, paths."""

import re
from pathlib import Path

import pytest

from nemorl.ui.access import policy
from nemorl.ui.app import SCREENS, STATIC, application
from nemorl.ui.errors import UiError
from nemorl.ui.folders import Folders
from tests.ui.folders import make_run
from tests.ui.requests import KEY, TOKEN, Client, asked, get

DATA = "/api/runs/list"


def test_data_requires_the_token_of_this_server(tmp_path):
    assert get(tmp_path, DATA)[0] == 200
    for wrong in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer other"}, {"Cookie": TOKEN}):
        status, body = get(tmp_path, DATA, headers=wrong)
        assert (status, body["place"]) == (401, "Authorization")


def test_every_route_of_data_requires_it(tmp_path):
    app = application(Folders(tmp_path), TOKEN)
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    data = {(method, path) for method, path in routes if path.startswith("/api/")}
    assert {path for _, path in routes - data} == {"/", *(f"/{name}" for name in SCREENS), "/static"}
    assert len(data) > 10

    async def work(client: Client) -> None:
        for method, path in data:
            answer = await client.request(method, path)
            assert answer.status == 401, path

    asked(tmp_path, work)


@pytest.mark.parametrize(
    "host", ["example.com", "example.com:80", "127.0.0.1.example.com", "0.0.0.0", "[::]", ""]
)
def test_other_hosts_are_refused_whatever_the_path(tmp_path, host):
    for path in (DATA, "/", "/static/main.js", "/nothing"):
        status, body = get(tmp_path, path, headers=KEY | {"Host": host})
        assert (status, body["place"]) == (403, "Host")


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:9", "127.8.9.1", "[::1]:80"])
def test_loopback_names_with_any_port_are_answered(tmp_path, host):
    assert get(tmp_path, DATA, headers=KEY | {"Host": host})[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_are_refused(tmp_path, header):
    headers = KEY | {"Host": "localhost:2"} | header
    assert get(tmp_path, DATA, headers=headers)[0] == 403
    same = {"Origin": "http://localhost:2", "Sec-Fetch-Site": "same-origin"}
    assert get(tmp_path, DATA, headers=headers | same)[0] == 200


def test_a_browser_at_a_wrong_address_gets_a_page_and_other_clients_json(tmp_path):
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}

    async def work(client: Client) -> None:
        answer = await client.get("/nosuch/<b>&", headers=browser)
        page = await answer.text()
        assert (answer.status, answer.content_type) == (404, "text/html")
        assert "<b>GET /nosuch/&lt;b&gt;&amp;: Not Found</b>" in page
        assert '<a href="/">Start with the list of runs</a>' in page
        assert "script" not in page
        assert "style-src 'self'" in answer.headers["Content-Security-Policy"]
        elsewhere = await client.get("/", headers=browser | {"Host": "example.com"})
        page = await elsewhere.text()
        assert (elsewhere.status, "open the address that nemorl ui printed" in page) == (403, True)
        assert "<a " not in page
        for path, headers in (("/nosuch", {}), ("/api/nosuch", KEY | browser)):
            answer = await client.get(path, headers=headers)
            assert (answer.status, answer.content_type) == (404, "application/json")

    asked(tmp_path, work)


def test_headers_of_every_answer(tmp_path):
    async def work(client: Client) -> None:
        for path in ("/", "/static/main.js", DATA, "/nothing"):
            headers = (await client.get(path)).headers
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "'unsafe" not in headers["Content-Security-Policy"]
            assert "Access-Control-Allow-Origin" not in headers
            assert "Set-Cookie" not in headers

    asked(tmp_path, work)


def test_the_nonce_of_a_page_is_that_of_its_policy_and_of_no_other(tmp_path):
    async def work(client: Client) -> set[str]:
        seen = set()
        for _ in range(2):
            answer = await client.get("/watch")
            nonce = re.search(r'name="style-nonce" content="([^"]+)"', await answer.text())
            assert nonce is not None
            assert answer.headers["Content-Security-Policy"] == policy(nonce[1])
            seen.add(nonce[1])
        return seen

    assert len(asked(tmp_path, work)) == 2


def test_without_writing_there_are_no_routes_that_write(tmp_path):
    app = application(Folders(tmp_path), TOKEN, read_only=True)
    paths = {route.resource.canonical for route in app.router.routes() if route.resource}
    assert not [path for path in paths if path.startswith("/api/control/")]

    async def work(client: Client) -> int:
        return (await client.post("/api/control/stop", headers=KEY, json={"run": "a"})).status

    assert asked(tmp_path, work, read_only=True) == 404


@pytest.mark.parametrize("name", ["../other", "/etc", "a/../../other", "a\0b", "x" * 5000])
def test_paths_outside_of_the_folder_are_refused(tmp_path, name):
    root = tmp_path / "root"
    make_run(tmp_path / "other")
    root.mkdir()
    status, body = get(root, "/api/watch/state", run=name)
    assert status in (403, 404, 422)
    assert body["error"]


def test_links_that_lead_out_are_refused(tmp_path):
    root = tmp_path / "root"
    make_run(tmp_path / "other")
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    folders = Folders(root)
    assert list(folders.runs()) == []
    with pytest.raises(UiError, match="leads out of") as refused:
        folders.run("link")
    assert refused.value.status == 403
    assert get(root, "/static/../../app.py")[0] == 404


def test_one_run_is_shown_alone(tmp_path):
    make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    folders = Folders(tmp_path, "one")
    assert [name for name, _ in folders.runs()] == ["one"]
    with pytest.raises(UiError, match="not the run that is shown"):
        folders.run("two")


def test_a_large_body_is_refused(tmp_path):
    async def work(client: Client) -> int:
        body = b'{"run": "' + b"a" * (4 * 2**20) + b'"}'
        return (await client.post("/api/control/stop", headers=KEY, data=body)).status

    assert asked(tmp_path, work) == 413


@pytest.mark.parametrize("path", sorted(STATIC.rglob("*.js")), ids=lambda path: path.name)
def test_pages_write_no_markup_from_text(path: Path):
    """Model output is shown as text nodes. Bundled libraries are under the same policy of the browser."""
    if "vendor" in path.parts:
        return
    text = path.read_text(encoding="utf-8")
    words = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function|dangerously|srcdoc"
    assert not re.findall(words, text)
    assert not re.findall(r"(?:src|href)=\"?https?://(?!ui\.perfetto\.dev)", text)
