"""openai-agents with functions, an agent as a tool, and a handoff; ``python openai_agents.py WAY``."""

import asyncio
import json
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

QUESTION = "What is 2 + 3, what is 10 + 20, and what do both give together?"
TURNS = int(os.environ.get("TURNS", "6"))
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def model(way):
    """Return the model that a way speaks to."""
    kind = OpenAIChatCompletionsModel if "chat" in way else OpenAIResponsesModel
    return kind(model=os.environ["RLKIT_MODEL"], openai_client=AsyncOpenAI())


async def run(way):
    """Run one agent."""
    spoken = model(way)
    agent = Agent(name="adder", instructions="You add.", tools=[add], model=spoken)
    if "team" in way:
        helper = Agent(name="helper", instructions="You help to add.", tools=[add], model=spoken)
        tool = helper.as_tool(tool_name="ask_helper", tool_description="Ask the helper.")
        last = Agent(name="writer", instructions="You write the answer.", model=spoken)
        agent = Agent(name="chief", instructions="You lead.", tools=[tool], handoffs=[last], model=spoken)
    if "stream" in way:
        streamed = Runner.run_streamed(agent, QUESTION, max_turns=TURNS)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds
        return streamed.final_output
    return (await Runner.run(agent, QUESTION, max_turns=TURNS)).final_output


if __name__ == "__main__":
    print(json.dumps({"result": asyncio.run(run(sys.argv[1]))}))
