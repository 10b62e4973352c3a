"""The routes by which a run gives weights to a server of vLLM, over a stand-in for its engine."""

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.required import require_module

served: Any = require_module("nemorl.generation.vllm_engine.served")  # of starlette, which vLLM requires

SESSION = {"version": 3, "transport": "files", "place": "/etc", "deadline_seconds": 5.0}


class Engine:
    """What the routes call of vLLM's `AsyncLLM`, with one worker."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.session: dict[str, Any] = {}
        self.reports = [None, '{"rank": 0, "report": {}}']
        self.corruption: str | None = None
        self.broken = ""  # a call that raises

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self._note(method)
        if method == "nemorl_begin":
            self.session = json.loads(args[0])
        answers = {
            "nemorl_describe": '{"layout": 1}',
            "nemorl_report": self.reports.pop(0) if method == "nemorl_report" else None,
            "nemorl_abandon": self.corruption,
        }
        return [answers.get(method)]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note(f"pause {mode}")

    async def resume_generation(self) -> None:
        self._note("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self._note(f"reset {reset_running_requests}")

    async def update_weight_version(self, version: str) -> None:
        self._note(f"version {version}")

    async def get_weight_version(self) -> str:
        return "default"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.broken:
            raise RuntimeError(f"{call} failed")


class Server:
    """The middleware over an application that answers 200 to everything."""

    def __init__(self) -> None:
        self.engine = Engine()
        self._routes = served.WeightRoutes(self._application)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        key: str = "Bearer secret",
        method: str = "POST",
    ) -> tuple[int, Any]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"authorization", key.encode())] if key else [],
            "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.engine)),
        }
        asyncio.run(self._routes(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"of vLLM"'})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("NEMORL_WEIGHTS_URL", "s3://bucket/run")
    return Server()


@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "NEMORL_WEIGHTS_URL"])
def test_a_server_without_key_or_address_does_not_start(
    server: Server, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, " ")
    with pytest.raises(ValueError, match=f"{variable} is not set"):
        Server()


@pytest.mark.parametrize("key", ["", "secret", "Bearer other", "Bearer ", "Basic secret"])
@pytest.mark.parametrize("route", ["describe", "receive", "commit", "nowhere"])
def test_requests_without_the_key_reach_no_worker(server: Server, key: str, route: str) -> None:
    status, answer = server.post(f"/nemorl/{route}", {"version": 1}, key)
    assert (status, answer["error"]["message"]) == (401, "the key is missing or wrong")
    assert server.engine.calls == []


def test_other_paths_are_those_of_vllm(server: Server) -> None:
    assert server.post("/inference/v1/generate", key="") == (200, "of vLLM")
    assert server.post("/nemorl/nowhere")[0] == 404
    assert server.post("/nemorl/abandon", method="GET")[0] == 404


def test_weights_are_read_from_the_address_of_the_server_alone(server: Server) -> None:
    server.post("/nemorl/describe", {"update": "staged"})
    status, answer = server.post("/nemorl/receive", {"session": SESSION})
    assert (status, answer) == (200, {"answers": [{"rank": 0, "report": {}}]})
    assert server.engine.session == {**SESSION, "place": "s3://bucket/run"}
    assert server.engine.calls == ["nemorl_describe", "nemorl_begin", "nemorl_report", "nemorl_report"]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_commit_pauses_the_engine_and_names_its_version(server: Server, recompute: bool) -> None:
    assert server.post("/nemorl/commit", {"version": 3, "recompute": recompute}) == (200, {})
    calls = ["pause keep", "nemorl_commit", f"reset {recompute}", "version 3", "resume"]
    assert server.engine.calls == calls


def test_an_update_in_place_pauses_the_engine_until_one_succeeds(server: Server) -> None:
    server.post("/nemorl/describe", {"update": "in_place"})
    server.post("/nemorl/receive", {"session": SESSION})
    server.engine.corruption = "its weights are of two versions"
    assert server.post("/nemorl/abandon") == (200, {"corruption": "its weights are of two versions"})
    assert "resume" not in server.engine.calls
    server.engine.reports = ['{"rank": 0, "report": {}}']
    server.post("/nemorl/receive", {"session": SESSION})
    server.post("/nemorl/commit", {"version": 4, "recompute": True})
    assert server.engine.calls.count("pause keep") == server.engine.calls.count("resume") == 1


def test_a_commit_that_fails_leaves_the_engine_paused_and_an_abandoned_one_does_not(server: Server) -> None:
    server.engine.broken = "nemorl_commit"
    status, answer = server.post("/nemorl/commit", {"version": 3, "recompute": True})
    assert (status, answer["error"]["message"]) == (422, "RuntimeError: nemorl_commit failed")
    assert "resume" not in server.engine.calls
    assert server.post("/nemorl/abandon") == (200, {"corruption": None})
    assert server.engine.calls[-1] == "resume"


@pytest.mark.parametrize(
    ("route", "body"),
    [("commit", {}), ("commit", {"version": "x", "recompute": 1}), ("receive", {"session": 3})],
)
def test_an_invalid_body_is_refused(server: Server, route: str, body: dict[str, Any]) -> None:
    assert server.post(f"/nemorl/{route}", body)[0] == 400
    assert server.engine.calls == []
