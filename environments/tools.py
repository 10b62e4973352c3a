"""Tools to call before the answer: Python functions, MCP servers, code in a sandbox, retrieval.

    policy   calls of tools         in the format of its family (docs/tools.md)
    tool     a result for each call
    policy   an answer

A turn without a call is the answer. What is wrong with a call is its result, for the policy to read; a server
that is gone ends the trajectory, which is sampled again.
"""

import asyncio
import inspect
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from pydantic import ConfigDict, PydanticUserError, ValidationError, validate_call

from nemorl.config.base import call_within, function_at
from nemorl.config.environment import McpServerConfig, RetrievalConfig, ToolsEnvConfig
from nemorl.errors import Problem
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    Task,
    ToolCall,
)

from .calculator import same_answer
from .sandbox import Sandbox, SandboxError, SandboxSession, make_sandbox
from .tags import last_tagged

REWARD = "tools"


class ToolFailed(Exception):
    """A call without a result; the message is for the policy."""


class Tool(Protocol):
    schema: Mapping[str, Any]  # in OpenAI's form

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text. Raises ToolFailed."""


class FunctionTool(Tool):
    """A Python function, sync or async. Its signature and docstring describe it to the model."""

    def __init__(self, function: Callable[..., Any], seconds: float | None) -> None:
        """`seconds` bound a call. Raises ValueError for a function that lacks types or descriptions."""
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            schema = get_json_schema(function)
        except Exception as error:  # several classes that transformers does not export
            raise ValueError(f"{error}; describe the function and each parameter in its docstring") from error
        schema["function"].pop("return", None)
        self.schema = schema
        self._function, self._seconds = function, seconds
        try:
            self._checked = validate_call(config=ConfigDict(coerce_numbers_to_str=True))(function)
        except PydanticUserError as error:
            problem = str(error).partition(". ")[0].splitlines()[0]
            raise ValueError(f"{problem}; give parameters types of JSON, such as str, int or list") from error

    async def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            if inspect.iscoroutinefunction(self._function):
                async with asyncio.timeout(self._seconds):
                    value = await self._checked(**arguments)
            else:
                call = partial(self._checked, **arguments)
                value = await asyncio.to_thread(call_within, self._seconds or 0.0, call)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolFailed("; ".join(wrong)) from error
        except TimeoutError as error:
            raise ToolFailed(f"no result within {self._seconds:g} s") from error
        except (EnvironmentLost, SandboxError, ToolFailed):
            raise
        except Exception as error:
            raise ToolFailed(f"{type(error).__name__}: {error}") from error
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class McpServer:
    """A session with an MCP server. It is opened at first use, and again after it was lost."""

    def __init__(self, config: McpServerConfig, seconds: float, log: TextIO | None = None) -> None:
        """`seconds` bound the start and each call; `log` takes the stderr of a program (ours by default)."""
        self._config, self._seconds, self._log = config, seconds, log
        self._opened: asyncio.Future[Any] | None = None
        self._owner: asyncio.Task[None] | None = None

    async def tools(self) -> list["McpTool"]:
        """Raises EnvironmentLost where no server answers."""
        listed = await self._ask(lambda client: client.list_tools())
        return [McpTool(self, one.name, one.description or "", one.input_schema) for one in listed.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises ToolFailed, or EnvironmentLost where the server is gone."""
        try:
            result = await self._ask(lambda client: client.call_tool(name, dict(arguments)))
        except TimeoutError as error:
            raise ToolFailed(f"no result within {self._seconds:g} s") from error
        parts = (getattr(part, "text", f"({part.type})") for part in result.content)
        text = "\n".join(parts)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.gather(self._owner, return_exceptions=True)
        self._opened = self._owner = None

    async def _ask(self, question: Callable[[Any], Awaitable[Any]]) -> Any:
        """Raises TimeoutError, ToolFailed for what the server refuses, and EnvironmentLost."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(self._opened))
        opened = self._opened
        async with asyncio.timeout(self._seconds):
            client = await asyncio.shield(opened)
            try:
                return await question(client)
            except MCPError as error:
                if error.error.code != CONNECTION_CLOSED:
                    raise ToolFailed(str(error)) from error
                lost: Exception = error
            except (OSError, RuntimeError) as error:
                lost = error
        if self._opened is opened:
            await self.close()
        raise EnvironmentLost(f"the MCP server {self._config.label} is gone: {lost}") from lost

    async def _own(self, opened: asyncio.Future[Any]) -> None:
        """Hold the session open: it must end in the task that opened it."""
        from mcp import Client, StdioServerParameters, stdio_client

        server: Any = self._config.url
        if self._config.command:
            program, *arguments = self._config.command
            parameters = StdioServerParameters(command=program, args=arguments)
            server = stdio_client(parameters, self._log or sys.stderr)
        try:
            async with Client(server) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001  raised where the session is awaited
            if not opened.done():
                self._opened = None  # the next use tries again
                while isinstance(error, ExceptionGroup):  # of the library's tasks
                    error = error.exceptions[0]
                opened.set_exception(
                    EnvironmentLost(f"the MCP server {self._config.label} does not answer: {error}")
                )


class McpTool(Tool):
    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self._server, self._name = server, name
        function = {"name": name, "description": description, "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self._name, arguments)


def python_tool(session: SandboxSession, seconds: float) -> FunctionTool:
    """Python code in an interpreter with its own limits; `seconds` bound the wait for earlier calls."""
    turn = asyncio.Lock()

    async def python(code: str) -> str:
        """Run Python code. Variables and files are kept between calls.

        Args:
            code: The code; the value of a last expression is printed.
        """
        try:
            async with asyncio.timeout(seconds):
                await turn.acquire()
        except TimeoutError:
            raise ToolFailed("other calls of the same turn take too long") from None
        try:
            ended = await session.run(code)
        finally:
            turn.release()
        limit = f"(ended at its limit: {ended.ended_by})" if ended.ended_by else ""
        return "\n".join(part for part in (ended.stdout, ended.stderr, limit) if part) or "(no output)"

    return FunctionTool(python, None)


def retrieval_tool(config: RetrievalConfig, seconds: float) -> FunctionTool:
    """Documents by BM25. Raises ValueError for a file without documents."""
    import bm25s

    documents = list(documents_in(config.path, config.text_key))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(documents, show_progress=False), show_progress=False)

    def search(query: str) -> str:
        """Search documents by words.

        Args:
            query: The words to look for.
        """
        count = min(config.num_results, len(documents))
        words = bm25s.tokenize(query, show_progress=False)
        places, scores = index.retrieve(words, k=count, show_progress=False)
        found = [documents[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        numbered = (f"[{number}] {text}" for number, text in enumerate(found, start=1))
        return "\n\n".join(numbered) or "no document has these words"

    return FunctionTool(search, seconds)


def documents_in(path: Path, key: str) -> Iterator[str]:
    """The texts of a file of JSON lines. Raises ValueError for a line without one, and if there is none."""
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                document = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(document, dict) or not isinstance(document.get(key), str):
                raise ValueError(f"{path}, line {number}: there is no text in {key!r}")
            yield document[key]
    if not number:
        raise ValueError(f"{path} has no documents")


async def answer_calls(action: Action, tools: Mapping[str, Tool], max_characters: int) -> tuple[Message, ...]:
    """The results of a turn's calls, which run at the same time; what is wrong with a call is its result."""
    results = await asyncio.gather(*(_result(call, tools, max_characters) for call in action.tool_calls))
    return with_errors(results, action.call_errors)


async def _result(call: ToolCall, tools: Mapping[str, Tool], max_characters: int) -> Message:
    if (tool := tools.get(call.name)) is None:
        text = f"Error: there is no tool `{call.name}`; the tools are {', '.join(tools)}"
    else:
        try:
            text = await tool.call(call.arguments)
        except ToolFailed as failure:
            text = f"Error: {failure}"
    if (rest := len(text) - max_characters) > 0:
        text = f"{text[:max_characters]}… ({rest} more characters)"
    return Message("tool", text, tool_call_id=call.id, name=call.name)


class ToolsEnvironment(Environment):
    def __init__(
        self,
        config: ToolsEnvConfig,
        tools: Sequence[Tool],
        servers: Sequence[McpServer],
        sandbox: Sandbox | None,
    ) -> None:
        self._config, self._shared, self._servers = config, tools, servers
        self._session = None if sandbox is None else sandbox.session()
        self._turns_left = config.max_turns
        self._by_name: dict[str, Tool] = {}
        self._answer: str | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a missing answer, or for two tools of one name."""
        if self._config.compares_answers and task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._answer = task.answer
        tools = list(self._shared)
        if self._session is not None:
            tools.append(python_tool(self._session, self._config.call_seconds))
        for server in self._servers:
            tools += await server.tools()
        for tool in tools:
            name = tool.schema["function"]["name"]
            if name in self._by_name:
                raise ValueError(f"two tools have the name `{name}`; rename one of them")
            self._by_name[name] = tool
        self.tools = [tool.schema for tool in tools]
        return task.messages

    async def step(self, action: Action) -> Step:
        self._turns_left -= 1
        is_answer = not (action.tool_calls or action.call_errors)
        if is_answer or self._turns_left == 0:
            return Step(rewards=self._rewards(action.content if is_answer else None))
        most = self._config.max_result_characters
        return Step(await answer_calls(action, self._by_name, most), done=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _rewards(self, content: str | None) -> dict[str, float]:
        if not self._config.compares_answers:
            return {}
        answer = None if content is None else answer_in(content, self._config.answer_tag)
        return {REWARD: float(answer is not None and same_answer(answer, self._answer or ""))}


def with_errors(results: Sequence[Message], errors: Sequence[str]) -> tuple[Message, ...]:
    """Results of a turn's calls, and what is wrong with calls that cannot be read."""
    text = "\n".join(errors)
    if not results:  # templates refuse a result without a call
        return (Message("user", text),)
    *others, last = results
    return (*others, replace(last, content=f"{last.content}\n\n{text}" if text else last.content))


def answer_in(text: str, tag: str | None) -> str | None:
    return text.strip() if tag is None else last_tagged(text, tag)


async def mcp_problems(config: ToolsEnvConfig) -> tuple[list[Problem], list[Problem]]:
    """Tools of MCP servers whose names others have, and servers that list no tools; fields are relative."""
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in config.mcp]
        sections = zip(config.mcp, logs, strict=True)
        servers = [McpServer(section, config.call_seconds, log) for section, log in sections]
        answers = await asyncio.gather(*(server.tools() for server in servers), return_exceptions=True)
        for server in servers:
            await server.close()
        said = [_last_line(log) for log in logs]
    fields = dict(config.built_in_tools)
    fields |= {function_at(path).__name__: f"tools.{index}" for index, path in enumerate(config.tools)}
    same, lost = [], []
    for index, (section, answer, last) in enumerate(zip(config.mcp, answers, said, strict=True)):
        field = f"mcp.{index}.{'url' if section.url else 'command'}"
        if isinstance(answer, BaseException):
            late = f"it lists no tools within {config.call_seconds:g} s (call_seconds)"
            problem = late if isinstance(answer, TimeoutError) else str(answer)
            lost.append(Problem(field, section.label, f"{problem}{last}; start or correct the server"))
            continue
        for name in [tool.schema["function"]["name"] for tool in answer]:
            if (other := fields.setdefault(name, field)) != field:
                fix = f"the tool of {other} is named `{name}`, too; rename or remove one of them"
                same.append(Problem(field, section.label, fix))
    return same, lost


def _last_line(log: TextIO) -> str:
    """What a program has written last, to put behind a problem."""
    log.seek(0)
    lines = log.read().split("\n")
    return next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")


class ToolsFactory(EnvironmentFactory):
    def __init__(self, config: ToolsEnvConfig) -> None:
        """Raises NotImported, ValueError, or SandboxUnavailable where no code can be isolated."""
        self._config, self.reward_weights = config, config.reward_weights
        seconds = config.call_seconds
        self._tools: list[Tool] = [FunctionTool(function_at(path), seconds) for path in config.tools]
        if config.retrieval is not None:
            self._tools.append(retrieval_tool(config.retrieval, seconds))
        self._servers = [McpServer(server, seconds) for server in config.mcp]
        self._sandbox = None if config.python is None else make_sandbox(config.python)

    def create(self) -> ToolsEnvironment:
        return ToolsEnvironment(self._config, self._tools, self._servers, self._sandbox)

    async def answer_in(self, text: str) -> str | None:
        return answer_in(text, self._config.answer_tag)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()
        if self._sandbox is not None:
            await self._sandbox.close()
