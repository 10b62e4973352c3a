"""A local stand-in for the hub's HTTP interface: list a revision, resolve a file, redirect to LFS."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = (".safetensors", ".parquet")  # files that a redirect leads to


class LocalServer(ThreadingHTTPServer):
    """Listens on loopback, and notes the requests."""

    daemon_threads = True

    def __init__(self, handler: "type[Handler]") -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Inside, it answers."""
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers without a log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def json(self, content: object, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class Hub(LocalServer):
    """Serves `folder/models/ORG/NAME/…` and `folder/datasets/ORG/NAME/…`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder, self.commit = folder, COMMIT  # of the branch main


class _Handler(Handler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "lfs":
            return self._content(self.server.folder / Path(*parts[1:]))
        if parts[0] == "api":
            repository = self.server.folder / Path(*parts[1:4])
            if not repository.is_dir():
                return self._error()
            files = sorted(path for path in repository.rglob("*") if path.is_file())
            if "tree" in parts:
                below = repository / Path(*parts[6:]) if len(parts) > 6 else repository
                recursive = "recursive=True" in self.path or "recursive=true" in self.path
                entries = files if recursive else sorted(below.iterdir()) if below.is_dir() else []
                return self.json([self._entry(repository, path) for path in entries])
            siblings = [{"rfilename": str(path.relative_to(repository))} for path in files]
            name = "/".join(parts[2:4])
            commit = self._commit(parts[5] if len(parts) > 5 else "main")
            about = {"id": name, "sha": commit, "siblings": siblings, "private": False, "gated": False}
            return self.json(about | {"tags": [], "downloads": 0, "disabled": False})
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        if len(parts) < 5 or parts[2] != "resolve":
            return self._error()
        path = self.server.folder / kind / parts[0] / parts[1] / Path(*parts[4:])
        if not path.is_file():
            return self._error("EntryNotFound")
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        headers = {"X-Repo-Commit": self._commit(parts[3]), "ETag": f'"{etag}"'}
        if path.suffix not in LFS:
            return self._content(path, headers)
        # As the hub does, another host: clients take the headers of this answer.
        place = f"http://localhost:{self.server.server_address[1]}/lfs/{path.relative_to(self.server.folder)}"
        linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(path.stat().st_size), "Location": place}
        return self.answer(302, b"", headers | linked)

    def _commit(self, revision: str) -> str:
        return self.server.commit if revision == "main" else revision

    def _entry(self, repository: Path, path: Path) -> dict[str, object]:
        name = str(path.relative_to(repository))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def _content(self, path: Path, headers: dict[str, str] | None = None) -> None:
        content, asked = path.read_bytes(), self.headers.get("Range")
        if asked is None:
            return self.answer(200, content, (headers or {}) | {"Accept-Ranges": "bytes"})
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        span = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
        self.answer(206, content[start : end + 1], (headers or {}) | span)

    def _error(self, code: str = "RepoNotFound") -> None:
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": "not found"})


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    with Hub(folder).serving() as hub:
        yield hub
