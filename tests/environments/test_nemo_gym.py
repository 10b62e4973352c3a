"""The environment `nemo_gym` with stand-ins for its servers; those of tests/rollout/ are real."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from nemorl.config.server_environments import NemoGymEnvConfig
from nemorl.environments.nemo_gym import COLUMN, AgentFailed, NemoGymFactory
from nemorl.trajectories import EnvironmentLost, Episode, Model
from tests.environments.episodes import task


class Address:
    """What the environment reads of a model."""

    base_url, api_key = "http://127.0.0.1:1/v1", "key"


MODEL: Model = Address()  # type: ignore[assignment]


@asynccontextmanager
async def agent(answer: dict[str, Any]) -> AsyncIterator[TestServer]:
    """An agent that gives this answer."""

    async def run(request: web.Request) -> web.Response:
        row = await request.json()
        assert row["responses_create_params"]["metadata"]["nemorl_base_url"] == MODEL.base_url
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/run", run)
    async with TestServer(app) as server:
        yield server


@asynccontextmanager
async def head(agents: dict[str, TestServer]) -> AsyncIterator[TestServer]:
    """A head server: the configuration of all servers as YAML in JSON. `agents` may change."""

    async def config(request: web.Request) -> web.Response:
        servers: dict[str, Any] = {"head_server": {"host": "127.0.0.1", "port": 1}, "use_absolute_ip": False}
        servers["weather"] = {"resources_servers": {"weather": {"host": "127.0.0.1", "port": 2}}}
        for name, server in agents.items():
            servers[name] = {
                "responses_api_agents": {"simple_agent": {"host": server.host, "port": server.port}}
            }
        return web.json_response(yaml.safe_dump(servers))

    app = web.Application()
    app.router.add_get("/global_config_dict_yaml", config)
    async with TestServer(app) as server:
        yield server


def row_of(name: str | None) -> Any:
    reference = {} if name is None else {"agent_ref": {"type": "responses_api_agents", "name": name}}
    return task(**{COLUMN: {"responses_create_params": {"input": "12?"}, **reference}})


async def episode(factory: NemoGymFactory, name: str | None = None) -> Episode:
    return await factory.create().run(row_of(name), MODEL)


def settings(server: TestServer, **fields: Any) -> NemoGymEnvConfig:
    return NemoGymEnvConfig(name="nemo_gym", url=f"http://{server.host}:{server.port}", **fields)


def in_loop(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def test_each_row_goes_to_the_agent_that_it_names() -> None:
    async def main() -> None:
        async with agent({"reward": 1}) as one, agent({"reward": 0.25}) as two:
            agents = {"one": one}
            async with head(agents) as server:
                factory = NemoGymFactory(settings(server, url_of="head"))
                assert (await episode(factory, "one")).rewards == {"nemo_gym": 1.0}
                for name in ("two", None):
                    with pytest.raises(ValueError, match=f"names {name!r}; the agents of http.* are: one$"):
                        await episode(factory, name)
                agents["two"] = two  # started later
                assert (await episode(factory, "two")).rewards == {"nemo_gym": 0.25}
                # One that ended and was started again elsewhere is asked for once more.
                await one.close()
                async with agent({"reward": 0.5}) as again:
                    agents["one"] = again
                    with pytest.raises(EnvironmentLost, match="does not answer"):
                        await episode(factory, "one")
                    assert (await episode(factory, "one")).rewards == {"nemo_gym": 0.5}
                await factory.close()

    in_loop(main)


def test_a_server_that_is_no_head_is_named() -> None:
    async def main() -> None:
        async def config(request: web.Request) -> web.Response:
            return web.json_response("- a list")

        app = web.Application()
        app.router.add_get("/global_config_dict_yaml", config)
        async with agent({"reward": 1}) as server, TestServer(app) as odd:
            for one, error, words in (
                (server, AgentFailed, "global_config_dict_yaml answered with status 404"),
                (odd, EnvironmentLost, "the head server's configuration cannot be read"),
            ):
                factory = NemoGymFactory(settings(one, url_of="head"))
                with pytest.raises(error, match=words):
                    await episode(factory, "one")
                await factory.close()

    in_loop(main)


def test_components_are_rewards_of_their_own() -> None:
    async def main() -> None:
        answer = {"reward": 1.5, "reward_components": {"format": 0.5, "correct": 1, "other": 7}}
        async with agent(answer) as server:
            config = settings(server, components={"correct": 1.0, "format": 0.5, "missing": 2.0})
            assert config.reward_weights == {"correct": 1.0, "format": 0.5, "missing": 2.0}
            factory = NemoGymFactory(config)
            assert (await episode(factory)).rewards == {"correct": 1.0, "format": 0.5, "missing": 0.0}
            await factory.close()
        async with agent({"reward": 1.5}) as server:
            factory = NemoGymFactory(settings(server, components={"correct": 1.0}))
            with pytest.raises(AgentFailed, match=r"gives no reward_components; remove env\.components"):
                await episode(factory)
            await factory.close()

    in_loop(main)


def test_a_flagged_sample_has_failed_unless_it_is_to_be_trained_on() -> None:
    async def main() -> None:
        async with agent({"reward": 1, "mask_sample": True}) as server:
            factory = NemoGymFactory(settings(server))
            with pytest.raises(AgentFailed, match="flags the sample as one not to train on"):
                await episode(factory)
            await factory.close()
            factory = NemoGymFactory(settings(server, skip_flagged=False))
            assert (await episode(factory)).rewards == {"nemo_gym": 1.0}
            await factory.close()

    in_loop(main)


@pytest.mark.parametrize("reward", [None, "1", True])
def test_a_reward_that_is_no_number_is_named(reward: object) -> None:
    async def main() -> None:
        async with agent({"reward": reward}) as server:
            factory = NemoGymFactory(settings(server))
            with pytest.raises(AgentFailed, match=f"gives the reward {reward!r}, not a number"):
                await episode(factory)
            await factory.close()

    in_loop(main)
