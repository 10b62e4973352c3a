"""Two OpenEnv servers for tests, in one process: `PORT` counts down by an action, `PORT + 1` by MCP tools.

    openenv_server.py PORT [SESSIONS]

Run by an interpreter that has the package `openenv`.
"""

import sys
import threading

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Take(Action):
    """Take some of the coins; who takes the last one has won."""

    count: int


class Coins(Observation):
    left: int
    note: str = ""


class CoinsEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, coins=10, **_):
        self.left = coins + (seed or 0)
        return Coins(left=self.left)

    def step(self, action):
        if action.count == 13:
            raise RuntimeError("unlucky")
        self.left -= action.count
        done = self.left <= 0
        return Coins(
            left=self.left, note="é", done=done, reward=1.0 if self.left == 0 else 0.25 * action.count
        )

    @property
    def state(self):
        return State()


class ToolsEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server, self.total = FastMCP("adder"), 0

        @server.tool
        def add(number: int) -> str:
            """Add a number to the total."""
            self.total += number
            return f"total {self.total}"

        super().__init__(server)

    def reset(self, **_):
        self.total = 0
        return Observation()

    async def step_async(self, action, **options):
        observation = await super().step_async(action, **options)
        observation.reward = float(self.total)
        observation.done = self.total >= 5
        return observation

    def _step_impl(self, action, **_):
        raise ValueError("only tools")

    @property
    def state(self):
        return State()


def serve(port, *parts):
    app = create_app(*parts, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    port, sessions = (*map(int, sys.argv[1:]), 2)[:2]
    tools = (port + 1, ToolsEnvironment, CallToolAction, CallToolObservation)
    threading.Thread(target=serve, args=tools, daemon=True).start()
    serve(port, CoinsEnvironment, Take, Coins)
