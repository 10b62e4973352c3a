"""The agent of examples/shelves_openai.py as a graph of LangGraph: `pip install langgraph langchain-openai`.

    model ──calls──▶ tools
      ▲                │
      └────results─────┘      until the model calls no tool

LangChain's client sends the calls of the model to the recording endpoint, so they train (docs/agents.md).
"""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from nemorl.trajectories import EnvironmentFactory, Episode, EpisodeEnvironment, Model, Task

from .shelves import shelf

MAX_STEPS = 4  # of the graph: the model, the tool, the model, and one more


class Agent(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        """Run the graph. The reward is 1 for the right shelf."""
        chat = ChatOpenAI(
            model=model.name,
            base_url=model.base_url,
            api_key=model.api_key,  # type: ignore[arg-type]
            max_retries=0,
        ).bind_tools([shelf])

        async def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", answer)
        graph.add_node("tools", ToolNode([shelf], handle_tool_errors="Error: wrong arguments"))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        opening = [(message.role, message.content) for message in task.messages]
        try:
            ended = await graph.compile().ainvoke({"messages": opening}, {"recursion_limit": MAX_STEPS})
        except GraphRecursionError:
            return Episode(rewards={"right": 0.0})
        return Episode(rewards={"right": float(ended["messages"][-1].content == task.answer)})


class Factory(EnvironmentFactory):
    def __init__(self) -> None:
        self.reward_weights = {"right": 1.0}

    def create(self) -> Agent:
        return Agent()
