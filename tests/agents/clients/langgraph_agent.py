"""A ReAct agent of langgraph, which speaks through langchain-openai; ``python langgraph_agent.py WAY``."""

import asyncio
import json
import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is 2 + 3, what is 10 + 20, and what do both give together?"
TURNS = int(os.environ.get("TURNS", "6"))


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent(way):
    """Return the compiled graph."""
    model = ChatOpenAI(model=os.environ["RLKIT_MODEL"], use_responses_api="responses" in way, streaming="stream" in way)
    return create_agent(model, [add], system_prompt="You add.")


async def run(way):
    """Run one agent."""
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    config = {"recursion_limit": 2 * TURNS}
    messages = []
    async for state in agent(way).astream(question, config, stream_mode="values"):
        messages = state["messages"]
    return messages[-1].text if isinstance(messages[-1].text, str) else messages[-1].text()


if __name__ == "__main__":
    print(json.dumps({"result": asyncio.run(run(sys.argv[1]))}))
