"""Agents written with the anthropic SDK alone; ``python anthropic_sdk.py WAY`` prints what came out as JSON."""

import asyncio
import json
import os
import sys

from anthropic import Anthropic, AsyncAnthropic

QUESTION = "What is 2 + 3, what is 10 + 20, and what do both give together?"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": NUMBERS}]
MODEL = os.environ["RLKIT_MODEL"]
TURNS = int(os.environ.get("TURNS", "6"))
SYSTEM = [{"type": "text", "text": "You add.", "cache_control": {"type": "ephemeral"}}]


def results(message):
    """Run the tools that a message calls, and return what goes back."""
    blocks = []
    for block in message.content:
        if block.type == "tool_use":
            try:
                output, failed = str(block.input["a"] + block.input["b"]), False
            except (KeyError, TypeError) as error:
                output, failed = repr(error), True
            blocks.append({"type": "tool_result", "tool_use_id": block.id, "content": output, "is_error": failed})
    return blocks


def said(message):
    """Return a message's text."""
    return "".join(block.text for block in message.content if block.type == "text")


def sync():
    """Messages."""
    client = Anthropic()
    messages = [{"role": "user", "content": QUESTION}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS, system=SYSTEM)
    for i in range(TURNS):
        message = client.messages.create(model=MODEL, messages=messages, tools=TOOLS, system=SYSTEM, max_tokens=1024)
        assert i or message.usage.input_tokens == counted.input_tokens
        blocks = results(message)
        assert message.stop_reason == ("tool_use" if blocks else message.stop_reason)
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": blocks}]
        if not blocks:
            return said(message)
    return None


async def _asynchronous():
    async with AsyncAnthropic() as client:
        messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        for _ in range(TURNS):
            async with client.messages.stream(
                model=MODEL, messages=messages, tools=TOOLS, system="You add.", max_tokens=1024
            ) as events:
                async for event in events:
                    assert event.type
                message = await events.get_final_message()
            blocks = results(message)
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": blocks}]
            if not blocks:
                return said(message)
    return None


def asynchronous():
    """Messages, streamed, without waiting."""
    return asyncio.run(_asynchronous())


def runner():
    """The SDK's own loop of tools."""
    from anthropic import beta_tool

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return str(a + b)

    client = Anthropic()
    messages = [{"role": "user", "content": QUESTION}]
    loop = client.beta.messages.tool_runner(model=MODEL, messages=messages, tools=[add], max_tokens=1024)
    return said(loop.until_done())


if __name__ == "__main__":
    print(json.dumps({"result": globals()[sys.argv[1]]()}))
