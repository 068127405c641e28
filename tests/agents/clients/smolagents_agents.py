"""smolagents: an agent that calls tools, and one that writes code; ``python smolagents_agents.py WAY``."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

QUESTION = "What is 2 + 3, what is 10 + 20, and what do both give together?"
TURNS = int(os.environ.get("TURNS", "6"))


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def run(way):
    """Run one agent."""
    model = OpenAIModel(
        os.environ["RLKIT_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        retry=False,
    )
    kind = CodeAgent if way.startswith("code") else ToolCallingAgent
    options = {"stream_outputs": True} if way.endswith("stream") else {}
    agent = kind(tools=[add], model=model, max_steps=TURNS, verbosity_level=0, **options)
    return str(agent.run(QUESTION))


if __name__ == "__main__":
    print(json.dumps({"result": run(sys.argv[1])}))
