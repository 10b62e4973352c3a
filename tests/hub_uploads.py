"""A local stand-in for the hub's HTTP interface for uploads: repositories, branches, LFS and commits.

Not the hub's xet storage: clients set HF_HUB_DISABLE_XET, or lack the package hf_xet.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from tests.hub import Handler, LocalServer

TOKEN = "hf_stand_in_token_of_the_tests"
LFS = (".safetensors",)


class UploadHub(LocalServer):
    """Keeps what is committed. With `read_only` the token may not write."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.private: dict[str, bool] = {}  # by repository
        self.branches: dict[tuple[str, str], dict[str, bytes]] = {}  # files by repository and branch
        self.objects: dict[str, bytes] = {}  # large files by SHA-256
        self.read_only = False


class _Handler(Handler):
    server: UploadHub

    def do_PUT(self) -> None:
        """A large file, at an address of its own to which no token is sent."""
        self._answer_any()

    def do_POST(self) -> None:
        self._answer_any()

    def do_GET(self) -> None:
        self._answer_any()

    def _answer_any(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = self._chunks()
        hub.requests.append(f"{self.command} {path}")
        if path.startswith("/lfs/"):
            assert "Authorization" not in self.headers
            digest = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == digest
            hub.objects[digest] = body
            return self.json({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.json({"error": "Invalid credentials"}, 401)
        if hub.read_only and self.command == "POST":
            return self.json({"error": "You don't have the rights to create a model"}, 403)
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if path == "/verify":
            return self.json({}, 200 if json.loads(body)["oid"] in hub.objects else 404)
        if len(parts) < 5:
            return self.json({"error": "Repository not found"}, 404)
        repository, action = "/".join(parts[2:4]), parts[4]
        branch = "/".join(parts[5:])
        if action == "branch":
            hub.branches.setdefault((repository, branch), dict(hub.branches[repository, "main"]))
            return self.json({})
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.json({"files": files})
        if action == "commit":
            return self._commit(repository, branch, body)
        return self.json({"error": f"{self.command} {path} is not in the stand-in"}, 404)

    def _create(self, asked: dict[str, object]) -> None:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else str(asked["name"])
        if name in self.server.private:
            return self.json({"error": "You already created this model repo", "url": self._url(name)}, 409)
        self.server.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
        self.server.branches[name, "main"] = {}
        return self.json({"url": self._url(name), "id": name})

    def _url(self, name: str) -> str:
        return f"{self.server.url}/{name}"

    def _batch(self, asked: dict[str, list[dict[str, object]]]) -> None:
        objects = []
        for each in asked["objects"]:
            entry: dict[str, object] = dict(each)
            if each["oid"] not in self.server.objects:
                upload, verify = f"{self.server.url}/lfs/{each['oid']}", f"{self.server.url}/verify"
                entry["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(entry)
        self.json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, branch: str, body: bytes) -> None:
        files = self.server.branches[repository, branch]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        commit = hashlib.sha1(body).hexdigest()
        url = f"{self._url(repository)}/commit/{commit}"
        self.json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


@contextmanager
def taking_uploads() -> Iterator[UploadHub]:
    with UploadHub().serving() as hub:
        yield hub
