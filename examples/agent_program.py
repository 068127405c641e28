"""An ordinary agent for OpenAI's API, without code for training: it looks for a key in ten drawers.

    echo '{"prompt": "Find the key."}' | OPENAI_API_KEY=... python examples/agent_program.py

``agent.py`` in the same folder trains the model that it calls.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI

KEY = 7  # the drawer with the key; the model is not told
TOOL = {
    "name": "open_drawer",
    "description": "Opens one of ten drawers, 0 to 9, and says what is in it.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


def find_key(client: OpenAI, prompt: str, *, model: str, most: int = 3) -> dict[str, Any]:
    """Open at most ``most`` drawers; return those opened, and whether the key was found."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools: Any = [{"type": "function", "function": TOOL}]
    opened: list[int] = []
    while len(opened) < most and KEY not in opened:
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            number = json.loads(call.function.arguments).get("number", -1)  # models sometimes omit arguments
            opened.append(number)
            told = "The key!" if number == KEY else "Nothing."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        if not answer.tool_calls:
            break  # the model answered without a call
    return {"found": KEY in opened, "opened": opened}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(find_key(OpenAI(), task["prompt"], model=os.environ.get("MODEL", "gpt-5-mini"))))
