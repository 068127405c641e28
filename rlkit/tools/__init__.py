"""Tools: their schemas for the prompt, the calls in what the policy wrote, and the answers it gets."""

from __future__ import annotations

from rlkit.tools.env import ToolEnv
from rlkit.tools.formats import formats, parse, read_calls
from rlkit.tools.functions import describe, schema
from rlkit.tools.messages import error_message, tool_message
from rlkit.tools.types import Malformed, Parsed, ToolCall
from rlkit.tools.validation import check_schema, problems

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
