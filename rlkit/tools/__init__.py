"""Tools: their schemas for the prompt, the calls in the policy's text, and the answers to them."""

from __future__ import annotations

from rlkit.tools._functions import check_schema, describe, problems, schema
from rlkit.tools.env import ToolEnv
from rlkit.tools.formats import formats, parse, read_calls
from rlkit.tools.types import Malformed, Parsed, ToolCall, error_message, tool_message

__all__ = [
    "Malformed",
    "Parsed",
    "ToolCall",
    "ToolEnv",
    "check_schema",
    "describe",
    "error_message",
    "formats",
    "parse",
    "problems",
    "read_calls",
    "schema",
    "tool_message",
]
