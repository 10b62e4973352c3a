"""Environments behind an OpenEnv server, over its WebSocket protocol (https://github.com/meta-pytorch/OpenEnv).

    reset   {"type": "reset", "data": {"seed": 3}}       a session of the server is a connection
    step    {"type": "step", "data": {…action…}}
    answer  {"type": "observation", "data": {"observation": {…}, "reward": 0.5, "done": false}}
            {"type": "error", "data": {"message": "…", "code": "VALIDATION_ERROR"}}

A turn is an action: its text fills a field of it, or the policy calls tools. Servers whose actions are calls
of MCP tools list these; for others the tool `act` has the fields of an action.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from nemorl.config.server_environments import OpenEnvConfig
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    Task,
)

from .openings import opened
from .tags import last_tagged
from .tools import Tool, ToolFailed, answer_calls

REWARD = "openenv"
MAX_MESSAGE_BYTES = 100 << 20  # as in OpenEnv's own client
_BUSY = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # of a server that has no session for us


class ActionRefused(Exception):
    """The server does not accept an action; the message is for the policy."""


class OpenEnvironment(Environment):
    def __init__(self, config: OpenEnvConfig, factory: "OpenEnvFactory") -> None:
        self._config, self._factory = config, factory
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turns_left, self._reward, self._done = config.max_turns, 0.0, False
        self._tools: dict[str, Tool] = {}
        self._turn = asyncio.Lock()  # a session takes one action at a time

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's opening with the first observation. Raises EnvironmentLost."""
        self._socket = await self._factory.connect()
        columns = {key: task.columns[key] for key in self._config.reset_keys if key in task.columns}
        observation = await self._ask("reset", self._config.reset | columns)
        if self._config.action_field is None:
            self._tools = {tool.name: tool for tool in await self._offered()}
            self.tools = [tool.schema for tool in self._tools.values()]
        return opened(task, self.shown(observation))

    async def step(self, action: Action) -> Step:
        self._turns_left -= 1
        self._reward = 0.0
        if (field := self._config.action_field) is not None:
            messages: tuple[Message, ...] = (Message("user", await self._say(field, action.text)),)
        elif action.tool_calls or action.call_errors:
            messages = await answer_calls(action, self._tools, self._config.max_result_characters)
        else:  # no action is left to take
            self._done, messages = True, ()
        rewards = {REWARD: self._reward}
        return Step(rewards=rewards) if self._done or not self._turns_left else Step(messages, rewards, False)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _say(self, field: str, text: str) -> str:
        if (tag := self._config.action_tag) is not None:
            if (tagged := last_tagged(text, tag)) is None:
                return f"Error: there is no action in <{tag}>…</{tag}>"
            text = tagged
        try:
            return await self.act({field: text})
        except ActionRefused as error:
            return f"Error: {error}"

    async def act(self, action: Mapping[str, Any]) -> str:
        """What the policy sees of the answer to an action. Raises ActionRefused and EnvironmentLost."""
        async with self._turn:
            if self._done:
                raise ActionRefused("the episode has ended")
            data = await self._ask("step", action)
            reward = data.get("reward")
            self._reward += 0.0 if reward is None else float(reward)
            self._done = bool(data.get("done"))
            observation = data.get("observation", {})
            return _result_of(observation) if "tool_name" in observation else self.shown(data)

    def shown(self, data: Mapping[str, Any]) -> str:
        """The observation as text. Raises ValueError if it lacks the field that is shown."""
        observation, field = data.get("observation", {}), self._config.observation_field
        if field is None:
            kept = {
                key: value for key, value in observation.items() if key != "metadata" and value is not None
            }
            return json.dumps(kept, ensure_ascii=False)
        if field not in observation:
            known = ", ".join(sorted(observation)) or "none"
            raise ValueError(f"the observation has no `{field}`: set env.observation_field to one of {known}")
        value = observation[field]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text[: self._config.max_result_characters]

    async def _offered(self) -> "list[_CallTool]":
        schema = await self._factory.action_schema()
        properties = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
        if properties and "tool_name" not in properties:
            required = [key for key in schema.get("required", ()) if key in properties]
            parameters = {"type": "object", "properties": properties, "required": required}
            if definitions := schema.get("$defs"):
                parameters["$defs"] = definitions
            text = schema.get("description") or "Act in the environment."
            return [_CallTool(self, "act", text, parameters, is_mcp=False)]
        data = await self._ask("step", {"type": "list_tools"})
        return [
            _CallTool(self, one["name"], one.get("description", ""), one["input_schema"], is_mcp=True)
            for one in data["observation"]["tools"]
        ]

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ActionRefused for what the server does not accept, EnvironmentLost, and RuntimeError for an
        environment that failed."""
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            message = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"the server {self._config.url} is gone: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"the server {self._config.url} has ended the session")
        answer = json.loads(message.data)
        content: dict[str, Any] = answer.get("data", {})
        if answer.get("type") != "error":
            return content
        code, text = content.get("code"), content.get("message", "unknown error")
        if code in _BUSY:
            raise EnvironmentLost(f"the server {self._config.url} has no session: {text}")
        if code == "VALIDATION_ERROR" and kind == "step":
            problems = (
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in content.get("errors", ())
            )
            raise ActionRefused("; ".join(problems) or text)
        raise RuntimeError(f"the server {self._config.url} answers to {kind}: {text} ({code})")


def _result_of(observation: Mapping[str, Any]) -> str:
    """The text of the answer to a call of an MCP tool. Raises ActionRefused."""
    if (error := observation.get("error")) is not None:
        raise ActionRefused(error.get("message", "the call failed"))
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(parts := result.get("content"), list):
        return "\n".join(part.get("text", f"({part.get('type')})") for part in parts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


class _CallTool(Tool):
    """An action with the arguments of a call."""

    def __init__(
        self,
        environment: OpenEnvironment,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        *,
        is_mcp: bool,
    ) -> None:
        self._environment, self.name, self._is_mcp = environment, name, is_mcp
        function = {"name": name, "description": description, "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        action = dict(arguments)
        if self._is_mcp:
            action = {"type": "call_tool", "tool_name": self.name, "arguments": action}
        try:
            return await self._environment.act(action)
        except ActionRefused as error:
            raise ToolFailed(str(error)) from error


class OpenEnvFactory(EnvironmentFactory):
    def __init__(self, config: OpenEnvConfig) -> None:
        self.reward_weights, self._config = config.reward_weights, config
        self._client: aiohttp.ClientSession | None = None
        self._schema: dict[str, Any] | None = None

    def create(self) -> OpenEnvironment:
        return OpenEnvironment(self._config, self)

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """A session of the server. Raises EnvironmentLost."""
        url = f"{self._config.url.rstrip('/')}/ws"
        try:
            return await self._http().ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"the server {url} does not answer: {error}") from error

    async def action_schema(self) -> dict[str, Any]:
        """JSON schema of the server's actions. Raises EnvironmentLost."""
        if self._schema is None:
            url = f"{self._config.url.rstrip('/')}/schema"
            try:
                async with self._http().get(url) as answer:
                    answer.raise_for_status()
                    self._schema = (await answer.json())["action"]
            except (aiohttp.ClientError, OSError) as error:
                raise EnvironmentLost(f"the server does not answer at {url}: {error}") from error
        return self._schema

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:  # made where a loop runs
            self._client = aiohttp.ClientSession()
        return self._client
