"""Answers to calls, as chat messages."""

from __future__ import annotations

import json

from rlkit.tools.types import Malformed, ToolCall

__all__ = ["error_message", "tool_message"]


def tool_message(call: ToolCall, result: object) -> dict[str, str]:
    """Return what a tool gave, as the message that follows the policy's turn.

    Args:
        call: what was called.
        result: text as it is; anything else as JSON, and what JSON cannot hold as its ``str``.

    >>> tool_message(ToolCall("add", {"x": 1}), {"sum": 3})["content"]
    '{"sum": 3}'
    """
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):  # keys that are no text, cycles
            result = str(result)
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": str(result)}


def error_message(error: Malformed) -> dict[str, str]:
    r"""Return what the policy is told about a call that was not made.

    >>> error_message(Malformed("there is no such tool", "one of: add", name="ad"))["content"]
    'The call of ad was not made: there is no such tool.\nExpected: one of: add.'
    """
    return {"role": "tool", "name": error.name or "error", "tool_call_id": error.id, "content": error.message}
