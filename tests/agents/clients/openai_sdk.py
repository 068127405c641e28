"""Agents written with the openai SDK alone; ``python openai_sdk.py WAY`` prints what came out as JSON."""

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI, OpenAI

QUESTION = "What is 2 + 3, what is 10 + 20, and what do both give together?"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS = [{"type": "function", **FUNCTION, "strict": False}]
MODEL = os.environ["RLKIT_MODEL"]
TURNS = int(os.environ.get("TURNS", "6"))


def add(arguments):
    """Run the tool."""
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


def answered(messages, message):
    """Append a turn and what its calls gave; whether there were any."""
    messages.append(message)
    for call in message.tool_calls or ():
        output = add(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return bool(message.tool_calls)


def sync():
    """Chat completions."""
    client = OpenAI()
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "system", "content": "You add."}, {"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        completion = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, logprobs=True)
        choice = completion.choices[0]
        assert choice.logprobs is not None
        assert len(choice.logprobs.content) == completion.usage.completion_tokens
        if not answered(messages, choice.message):
            return choice.message.content
    return None


async def _asynchronous():
    async with AsyncOpenAI() as client:
        messages = [{"role": "developer", "content": "You add."}, {"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            completion = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=CHAT_TOOLS, max_completion_tokens=256, tool_choice="auto"
            )
            message = completion.choices[0].message
            calls = [call.model_dump() for call in message.tool_calls or ()]
            messages.append(
                {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
            )
            for call in calls:
                output = [{"type": "text", "text": add(call["function"]["arguments"])}]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
            if not calls:
                return message.content
    return None


def asynchronous():
    """The same without waiting, and without the fields that are None."""
    return asyncio.run(_asynchronous())


def stream():
    """Chat completions, read delta by delta by the SDK's own helper."""
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
        ) as events:
            kinds = [event.type for event in events]
            completion = events.get_final_completion()
        assert "chunk" in kinds
        assert completion.usage.total_tokens > 0
        if not answered(messages, completion.choices[0].message):
            return completion.choices[0].message.content
    return None


def several():
    """Several completions of one prompt, of which one is taken further, and a seed."""
    client = OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, n=3, seed=7)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    answered(messages, first.choices[1].message)
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, n=2, seed=7)
    return second.choices[0].message.content


def responses():
    """The responses API, the whole history sent each time."""
    client = OpenAI()
    items = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        response = client.responses.create(model=MODEL, input=items, tools=RESPONSE_TOOLS, instructions="You add.")
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)})
        if not calls:
            return response.output_text
    return None


def continued():
    """The responses API, streamed, with the history remembered by the server."""
    client = OpenAI()
    items, before = QUESTION, None
    for _ in range(TURNS):
        with client.responses.stream(
            model=MODEL, input=items, tools=RESPONSE_TOOLS, **({"previous_response_id": before} if before else {})
        ) as events:
            for event in events:
                assert event.type.startswith("response."), event
            response = events.get_final_response()
        before = response.id
        calls = [item for item in response.output if item.type == "function_call"]
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)} for call in calls
        ]
        if not calls:
            return response.output_text
    return None


def text():
    """Completions: a text that is continued twice."""
    client = OpenAI()
    prompt = "1, 2, 3,"
    for _ in range(2):
        completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, logprobs=1)
        prompt += completion.choices[0].text + "\n"
    return prompt


if __name__ == "__main__":
    print(json.dumps({"result": globals()[sys.argv[1]]()}))
