"""Servers of NeMo-Gym for tests, in one process: the agent at `PORT`, then its resources, model and head.

They are the classes that `ng_run` starts, with its configuration, without a virtual environment for each and
without Ray. Run by an interpreter that has the package `nemo_gym`.
"""

# ruff: noqa: E402  the library reads its configuration when it is imported

import asyncio
import json
import os
import sys
from pathlib import Path

port = int(sys.argv[1])
CONFIG = {
    "head_server": {"host": "127.0.0.1", "port": port + 3},
    "agent": {
        "responses_api_agents": {
            "simple_agent": {
                "host": "127.0.0.1", "port": port, "entrypoint": "app.py", "max_steps": 3,
                "resources_server": {"type": "resources_servers", "name": "weather"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
        }
    },
    "weather": {
        "resources_servers": {
            "weather": {"host": "127.0.0.1", "port": port + 1, "entrypoint": "app.py", "domain": "agent"}
        }
    },
    "policy_model": {
        "responses_api_models": {
            "nemorl_model": {"host": "127.0.0.1", "port": port + 2, "entrypoint": "app.py"}
        }
    },
}  # fmt: skip
os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(CONFIG)

import uvicorn
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import HeadServer, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
from responses_api_agents.simple_agent.app import SimpleAgent

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemo_gym" / "responses_api_models" / "nemorl_model"
sys.path.insert(0, str(EXAMPLE))
from app import NemorlModel


class Weather(SimpleWeatherResourcesServer):
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """The share of calls of the tool among the outputs, which the library's example rewards with 1."""
        verified = await super().verify(body)
        kinds = [item.type for item in body.response.output]
        verified.reward = kinds.count("function_call") / len(kinds)
        return verified


async def serve() -> None:
    client = ServerClient(
        head_server_config=BaseServerConfig(**CONFIG["head_server"]),
        global_config_dict=OmegaConf.create(CONFIG),
    )
    servers = []
    for name, kind in (("agent", SimpleAgent), ("weather", Weather), ("policy_model", NemorlModel)):
        ((section,),) = [sections.values() for sections in CONFIG[name].values()]
        config = kind.model_fields["config"].annotation.model_validate(section | {"name": name})
        server = kind(config=config, server_client=client)
        app = server.setup_webserver()
        server.setup_liveness(app)
        options = {"host": "127.0.0.1", "port": section["port"], "log_level": "warning"}
        servers.append(uvicorn.Server(uvicorn.Config(app, **options)))
    head = HeadServer(config=client.head_server_config)
    options = {**CONFIG["head_server"], "log_level": "warning"}
    servers.append(uvicorn.Server(uvicorn.Config(head.setup_webserver(), **options)))
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve())
