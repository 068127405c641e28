"""From what was drawn to what a client is told: text, reasoning, calls of tools, and why it ended."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import attrs

from rlkit._interaction import Action, Message
from rlkit.chat import Chat
from rlkit.gateway.types import Choice, Finish
from rlkit.tools import Parsed, ToolCall
from rlkit.tools.formats import formats
from rlkit.types import Sample

__all__ = ["read"]

_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def read(
    chat: Chat, sample: Sample, tools: Sequence[Message], stop: Sequence[str | int], salt: str
) -> tuple[Choice, Action]:
    """Take a completion apart.

    Args:
        chat: of the conversation.
        sample: as it was drawn.
        tools: schemas of the tools that may be called; () leaves calls in the text.
        stop: texts or ids of the request that end a completion; they are left out of what the client reads.
        salt: makes the calls' ids different from those of all other completions.
    """
    action = chat.action(sample.tokens, sample.stop_reason, prompt=sample.prompt, tools=tools)
    text = _ended(chat, action, stop)
    if len(text) < len(action):
        action = _cut(chat, action, sample, tools, text)
    parsed = action.parsed or _thought(chat, sample, text)
    calls: tuple[ToolCall, ...] = ()
    content = parsed.text_outside
    if action.parsed is not None and not tools:
        content = text if parsed.reasoning is None else _THOUGHT.sub("", text, count=1)
    elif tools:
        with_calls = parsed if action.parsed is not None else _called(chat, action, content, tools)
        calls = tuple(attrs.evolve(call, id=_id(salt, i)) for i, call in enumerate(with_calls.calls))
        if calls:
            content = with_calls.text_outside
        elif with_calls.errors:  # what cannot be read stays text, as servers of models do it
            content = text if parsed.reasoning is None else _THOUGHT.sub("", text, count=1)
    finish: Finish = "length" if sample.stop_reason == "length" else "tool_calls" if calls else "stop"
    return Choice(sample, text, content, parsed.reasoning, calls, finish), action


def _ended(chat: Chat, action: Action, stop: Sequence[str | int]) -> str:
    """Return the text in front of what ended it."""
    text = str(action)
    if stop and isinstance(stop[0], int):
        if action.tokens.size and int(action.tokens[-1]) in stop and int(action.tokens[-1]) not in chat.ends:
            return chat.prefill + chat.tokenizer.decode(action.tokens[:-1])
        return text
    ends = [at for each in stop if isinstance(each, str) and (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends and action.stop_reason == "stop" else text


def _cut(chat: Chat, action: Action, sample: Sample, tools: Sequence[Message], text: str) -> Action:
    """Return the action as a client reads it: a renderer that reads tokens reads those of the shorter text."""
    if action.parsed is None:
        return Action(text, tokens=action.tokens, raw=action.raw, stop_reason=action.stop_reason)
    ids = chat.tokenizer.encode(text.removeprefix(chat.prefill), special=True)
    parsed = chat.action(ids, "stop", prompt=sample.prompt, tools=tools).parsed
    return Action(text, tokens=action.tokens, raw=action.raw, stop_reason=action.stop_reason, parsed=parsed)


def _thought(chat: Chat, sample: Sample, text: str) -> Parsed:
    """Tell reasoning between <think> and </think> apart, also where the prompt has opened it."""
    if "</think>" not in text:
        return Parsed(text)
    opened = text.lstrip().startswith("<think>")
    if not opened:
        tail = chat.tokenizer.decode(sample.prompt[-8:], skip_special=False).rstrip()
        opened = tail.endswith("<think>")
    match = _THOUGHT.match(text) if opened else None
    return Parsed(text) if match is None else Parsed(text[match.end() :], reasoning=match[1].strip("\n"))


def _called(chat: Chat, action: Action, content: str, tools: Sequence[Message]) -> Parsed:
    """Read calls by the chat's format.

    Whether their arguments fit the schemas is for the agent to find, and so are the schemas: agents that work elsewhere
    have some that are not valid, such as patterns of another language.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas: Mapping[str, Mapping[str, object]] = {each["name"]: each.get("parameters") or {} for each in functions}
    parsed: Parsed = formats.resolve(chat.tool_format)(content, schemas)
    if not parsed.calls and not parsed.errors and action.raw != action:
        raw = formats.resolve(chat.tool_format)(action.raw, schemas)  # some formats begin with a control token
        if raw.calls:
            return Parsed("", raw.calls, raw.errors)
    return parsed


def _id(salt: str, index: int) -> str:
    """Return nine letters and digits, as some templates ask for."""
    return hashlib.blake2b(f"{salt}/{index}".encode(), digest_size=8).hexdigest()[:9]
