"""Agents of NeMo-Gym (https://github.com/NVIDIA-NeMo/Gym), whose servers run the episode over HTTP.

nemorl   asks the head server for the agent of the row, where `url_of` is `head`
nemorl   POST {url}/run      a row, with the address of the episode's endpoint in its metadata
agent    seeds the session of its resources server, calls the model and the server's tools
model    examples/nemo_gym: each call goes to the endpoint of its episode, which records the tokens
agent    asks its resources server to verify, and answers with the reward
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from nemorl.config.server_environments import NemoGymEnvConfig
from nemorl.trajectories import (
    EnvironmentFactory,
    EnvironmentLost,
    Episode,
    EpisodeEnvironment,
    Model,
    Task,
)

REWARD = "nemo_gym"
COLUMN, AGENT = "nemo_gym_row", "agent"  # of a task: the row, and the name in its agent_ref
_PARAMETERS = "responses_create_params"
_SAMPLING = ("model", "temperature", "top_p")  # which the run decides
_CONFIG = "/global_config_dict_yaml"  # of the head server
_SHOWN_CHARACTERS = 500  # of an answer in an error


class AgentFailed(RuntimeError):
    """The agent's server answered with an error, or without a reward."""


def rows(path: str) -> Iterator[dict[str, Any]]:
    """Tasks from a JSON lines file of NeMo-Gym, for a dataset `generator`. Raises ValueError."""
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line)
            given = row.get(_PARAMETERS, {}).get("input")
            if not given:
                raise ValueError(f"{path}, line {number}: there is no {_PARAMETERS}.input")
            texts = [given] if isinstance(given, str) else [_text_of(one) for one in given]
            prompt, agent = "\n\n".join(text for text in texts if text), _agent(row)
            yield {"prompt": prompt, COLUMN: row} | ({} if agent is None else {AGENT: agent})


def _agent(row: dict[str, Any]) -> str | None:
    return (row.get("agent_ref") or {}).get("name")


def _text_of(item: dict[str, Any]) -> str:
    content = item.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


class NemoGymEnvironment(EpisodeEnvironment):
    def __init__(self, config: NemoGymEnvConfig, factory: "NemoGymFactory") -> None:
        self._config, self._factory = config, factory

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises EnvironmentLost, AgentFailed, TimeoutError, and ValueError for a task without a row."""
        row = task.columns.get(COLUMN)
        if not isinstance(row, dict):
            fix = "read them with the function nemorl.environments.nemo_gym:rows"
            raise ValueError(f"task {task.index} has no row of NeMo-Gym in its column `{COLUMN}`; {fix}")
        parameters = {key: value for key, value in row[_PARAMETERS].items() if key not in _SAMPLING}
        address = {"nemorl_base_url": model.base_url, "nemorl_api_key": model.api_key}
        parameters["metadata"] = {**(parameters.get("metadata") or {}), **address}
        url = await self._factory.address_of(row)
        verified = await self._factory.post(url, {**row, _PARAMETERS: parameters})
        if self._config.skip_flagged and verified.get("mask_sample"):
            raise AgentFailed(f"the agent at {url} flags the sample as one not to train on")
        if not self._config.components:
            return Episode(rewards={REWARD: _number(url, "reward", verified.get("reward"))})
        found = verified.get("reward_components")
        if not isinstance(found, dict):
            raise AgentFailed(f"the agent at {url} gives no reward_components; remove env.components")
        rewards = {name: _number(url, name, found.get(name, 0.0)) for name in self._config.components}
        return Episode(rewards=rewards)


def _number(url: str, name: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise AgentFailed(f"the agent at {url} gives the {name} {given!r}, not a number")
    return float(given)


def _agents(config: str) -> dict[str, str]:
    """Addresses of agents by name, of a head server's answer: NeMo-Gym's configuration as YAML in JSON."""
    try:
        servers = yaml.safe_load(json.loads(config))
        return {
            name: f"http://{agent['host']}:{agent['port']}"
            for name, server in servers.items()
            if isinstance(server, dict)
            for agent in (server.get("responses_api_agents") or {}).values()
        }
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EnvironmentLost(f"the head server's configuration cannot be read: {error}") from error


class NemoGymFactory(EnvironmentFactory):
    def __init__(self, config: NemoGymEnvConfig) -> None:
        self.reward_weights, self._config = config.reward_weights, config
        self._client: aiohttp.ClientSession | None = None
        self._agents: dict[str, str] = {}  # addresses by name, as the head server said

    def create(self) -> NemoGymEnvironment:
        return NemoGymEnvironment(self._config, self)

    async def address_of(self, row: dict[str, Any]) -> str:
        """Where the row's episode is run.

        Raises EnvironmentLost, TimeoutError, and ValueError if the head server does not have the row's agent.
        """
        url = self._config.url.rstrip("/")
        if self._config.url_of == "agent":
            return f"{url}/run"
        name = _agent(row)
        if name not in self._agents:  # or its server was started since
            self._agents = _agents(await self._answer("GET", f"{url}{_CONFIG}"))
        if name not in self._agents:
            known = ", ".join(sorted(self._agents)) or "none"
            raise ValueError(f"agent_ref of a row names {name!r}; the agents of {url} are: {known}")
        return f"{self._agents[name]}/run"

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the agent's server. Raises EnvironmentLost, AgentFailed and TimeoutError."""
        try:
            found = json.loads(await self._answer("POST", url, body))
        except EnvironmentLost:
            self._agents = {}  # it may be started again elsewhere
            raise
        return found if isinstance(found, dict) else {}

    async def _answer(self, method: str, url: str, body: dict[str, Any] | None = None) -> str:
        if self._client is None:  # made where a loop runs
            # An agent has a session for each episode, which no cookie of another one may take over.
            self._client = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        limit = self._config.time_limit_seconds
        try:
            timeout = aiohttp.ClientTimeout(total=limit)
            async with self._client.request(method, url, json=body, timeout=timeout) as answer:
                text = await answer.text()
        except TimeoutError:
            raise TimeoutError(f"{url} has not answered within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"the server does not answer at {url}: {error}") from error
        if answer.status != 200:
            raise AgentFailed(f"{url} answered with status {answer.status}: {text[:_SHOWN_CHARACTERS]}")
        return text

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
