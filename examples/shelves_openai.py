"""An agent that owns its loop, with OpenAI's client: the task of examples/shelves.py.

    user        0417
    assistant   shelf(part="0417")
    tool        63
    assistant   63

Its calls go to the recording endpoint and train (docs/agents.md).
"""

import json
from typing import Any

from openai import AsyncOpenAI

from nemorl.trajectories import EnvironmentFactory, Episode, EpisodeEnvironment, Model, Task

from .shelves import shelf

MAX_CALLS = 2  # of the model
SHELF: Any = {
    "type": "function",
    "function": {
        "name": "shelf",
        "description": "Look up the shelf of a part.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "description": "The number of the part, four digits."}},
            "required": ["part"],
        },
    },
}


class Agent(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        """Call the tool as the model says. The reward is 1 for the right shelf."""
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        messages: list[Any] = [message.as_dict() for message in task.messages]
        async with client:
            for _ in range(MAX_CALLS):
                answer = await client.chat.completions.create(
                    model=model.name, messages=messages, tools=[SHELF]
                )
                said = answer.choices[0].message
                if not said.tool_calls:
                    return Episode(rewards={"right": float(said.content == task.answer)})
                messages.append(said.model_dump(exclude_none=True))
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": result_of(call.function)}
                    for call in said.tool_calls
                ]
        return Episode(rewards={"right": 0.0})


def result_of(call: Any) -> str:
    """What the tool answers; what is wrong with a call is for the model to read."""
    try:
        return shelf(**json.loads(call.arguments))
    except (TypeError, AttributeError) as error:
        return f"Error: {error}"


class Factory(EnvironmentFactory):
    def __init__(self) -> None:
        self.reward_weights = {"right": 1.0}

    def create(self) -> Agent:
        return Agent()
