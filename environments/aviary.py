"""Environments of aviary, whose tools the policy calls.

    env      the first observations, and tools
    policy   calls of tools                        in the format of its family (docs/tools.md)
    env      a result for each call, a reward, and whether the episode is over

The dataset `aviary` names a task set of the library; the reward `aviary` is the sum of the environment's.
"""

from dataclasses import replace
from typing import Any

from aviary.core import Environment as AviaryEnv
from aviary.core import Message as AviaryMessage
from aviary.core import Tool, ToolCall, ToolCallFunction, ToolRequestMessage, ToolResponseMessage

from nemorl.config.library_datasets import aviary_tasks
from nemorl.config.library_environments import AviaryEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task
from nemorl.trajectories import ToolCall as Call

from .tools import with_errors


class AviaryEnvironment(Environment):
    """A call that names no argument of its tool right is answered by what is wrong with it.

    Other exceptions of the library are failures of the environment.
    """

    def __init__(self, config: AviaryEnvConfig) -> None:
        self._turns_left = config.max_turns
        self._env: AviaryEnv[Any] | None = None
        self._parameters: dict[str, dict[str, Any]] = {}  # by tool, as a JSON schema

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises ValueError for a task of another dataset."""
        if "aviary_index" not in task.columns:
            raise ValueError(f"task {task.index} is not of aviary: set `data` to an aviary dataset")
        columns = task.columns
        tasks = aviary_tasks(columns["aviary_dataset"], columns["aviary_options"])
        index = columns["aviary_index"]
        self._env = tasks.get_new_env() if index is None else tasks.get_new_env_by_idx(index)
        observations, tools = await self._env.reset()
        self.tools = [_schema_of(tool) for tool in tools]
        self._parameters = {one["function"]["name"]: one["function"]["parameters"] for one in self.tools}
        first, *others = map(_message, observations)
        *before, last = task.messages
        return (*before, replace(first, content=last.content + first.content), *others)

    async def step(self, action: Action) -> Step:
        assert self._env is not None, "step before reset"
        self._turns_left -= 1
        is_last = self._turns_left == 0
        wrong, right = [], []
        for call in action.tool_calls:
            if problem := self._problem(call):
                wrong.append(Message("tool", f"Error: {problem}", tool_call_id=call.id, name=call.name))
            else:
                right.append(call)
        if not right and (wrong or action.call_errors):
            return Step(() if is_last else with_errors(wrong, action.call_errors), done=is_last)
        said = AviaryMessage(role="assistant", content=action.content)
        if right:
            said = ToolRequestMessage(content=action.content, tool_calls=list(map(_as_request, right)))
        observations, reward, is_over, is_truncated = await self._env.step(said)
        rewards = {"aviary": float(reward)}
        if is_over or is_truncated or is_last:
            return Step(rewards=rewards)
        messages = with_errors([*wrong, *map(_message, observations)], action.call_errors)
        return Step(messages, rewards, done=False)

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()

    def _problem(self, call: Call) -> str | None:
        """What is wrong with the names of a call's arguments; unknown tools are left to the environment."""
        if (parameters := self._parameters.get(call.name)) is None:
            return None
        known = parameters.get("properties", {}).keys()
        missing = [name for name in parameters.get("required", ()) if name not in call.arguments]
        if not missing and call.arguments.keys() <= known:
            return None
        return f"the arguments of {call.name} are {', '.join(known) or 'none'}"


class AviaryFactory(EnvironmentFactory):
    def __init__(self, config: AviaryEnvConfig) -> None:
        self.reward_weights, self._config = config.reward_weights, config

    def create(self) -> AviaryEnvironment:
        return AviaryEnvironment(self._config)


def _schema_of(tool: Tool) -> dict[str, Any]:
    """In OpenAI's form."""
    return {"type": "function", "function": tool.info.model_dump(exclude_none=True)}


def _as_request(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=ToolCallFunction(name=call.name, arguments=call.arguments))


def _message(said: AviaryMessage) -> Message:
    if isinstance(said, ToolResponseMessage):
        return Message("tool", said.content or "", tool_call_id=said.tool_call_id, name=said.name)
    return Message("system" if said.role == "system" else "user", said.content or "")
