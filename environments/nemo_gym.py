"""Agents of NeMo-Gym (https://github.com/NVIDIA-NeMo/Gym), whose servers run the episode over HTTP.

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
COLUMN = "nemo_gym_row"
_PARAMETERS = "responses_create_params"
_SAMPLING = ("model", "temperature", "top_p")  # which the run decides
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
            yield {"prompt": "\n\n".join(text for text in texts if text), COLUMN: row}


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
        verified = await self._factory.post("/run", {**row, _PARAMETERS: parameters})
        reward = verified.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise AgentFailed(f"the agent at {self._config.url} gives the reward {reward!r}, not a number")
        return Episode(rewards={REWARD: float(reward)})


class NemoGymFactory(EnvironmentFactory):
    def __init__(self, config: NemoGymEnvConfig) -> None:
        self.reward_weights, self._config = config.reward_weights, config
        self._client: aiohttp.ClientSession | None = None

    def create(self) -> NemoGymEnvironment:
        return NemoGymEnvironment(self._config, self)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the agent's server. Raises EnvironmentLost, AgentFailed and TimeoutError."""
        if self._client is None:  # made where a loop runs
            # An agent has a session for each episode, which no cookie of another one may take over.
            self._client = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        url, limit = self._config.url.rstrip("/") + path, self._config.time_limit_seconds
        try:
            timeout = aiohttp.ClientTimeout(total=limit)
            async with self._client.post(url, json=body, timeout=timeout) as answer:
                text = await answer.text()
        except TimeoutError:
            raise TimeoutError(f"{url} has not answered within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"the agent's server does not answer at {url}: {error}") from error
        if answer.status != 200:
            raise AgentFailed(f"{url} answered with status {answer.status}: {text[:_SHOWN_CHARACTERS]}")
        found = json.loads(text)
        return found if isinstance(found, dict) else {}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
