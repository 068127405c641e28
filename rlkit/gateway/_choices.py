"""A completion as its client reads it: text, reasoning and calls of tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import attrs

from rlkit._interaction import Action, Message
from rlkit.chat import Chat
from rlkit.gateway._types import Choice, Finish
from rlkit.tools import Parsed, ToolCall
from rlkit.tools.formats import formats
from rlkit.types import Sample

__all__ = ["cut_at_stop", "read_choice"]

_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def read_choice(
    chat: Chat, sample: Sample, tools: Sequence[Message], stop: Sequence[str | int], salt: str
) -> tuple[Choice, Action]:
    """Parse a completion.

    Args:
        chat: of the conversation.
        sample: as it was drawn.
        tools: schemas of the tools that may be called; () leaves calls in the text.
        stop: texts or ids of the request that end a completion; they are left out of the client's text.
        salt: makes the calls' ids differ from those of all other completions.
    """
    action = chat.action(sample.tokens, sample.stop_reason, prompt=sample.prompt, tools=tools)
    text = _visible_text(chat, action, stop)
    if len(text) < len(action):
        action = _shorten(chat, action, sample, tools, text)
    parsed = action.parsed or _split_reasoning(chat, sample, text)
    uncalled = text if parsed.reasoning is None else _THOUGHT.sub("", text, count=1)
    calls: tuple[ToolCall, ...] = ()
    content = parsed.text_outside
    if tools:
        found = parsed if action.parsed is not None else _parse_calls(chat, action, content, tools)
        calls = tuple(attrs.evolve(call, id=_make_id(salt, i)) for i, call in enumerate(found.calls))
        if calls:
            content = found.text_outside
        elif found.errors:  # text that cannot be parsed stays text, as in other model servers
            content = uncalled
    elif action.parsed is not None:
        content = uncalled
    finish: Finish = "length" if sample.stop_reason == "length" else "tool_calls" if calls else "stop"
    return Choice(sample, text, content, parsed.reasoning, calls, finish), action


def cut_at_stop(text: str, stop: Sequence[str | int]) -> str:
    """Return the text before the first of the stop texts."""
    ends = [at for each in stop if isinstance(each, str) and (at := text.find(each)) >= 0]
    return text[: min(ends)] if ends else text


def _visible_text(chat: Chat, action: Action, stop: Sequence[str | int]) -> str:
    """Return the text without the stop that ended it."""
    if stop and isinstance(stop[0], int):
        last = int(action.tokens[-1]) if action.tokens.size else -1
        met = last in stop and last not in chat.ends
        return chat.prefill + chat.tokenizer.decode(action.tokens[:-1]) if met else str(action)
    return cut_at_stop(str(action), stop) if action.stop_reason == "stop" else str(action)


def _shorten(chat: Chat, action: Action, sample: Sample, tools: Sequence[Message], text: str) -> Action:
    """Return the action as a client reads it: a renderer that reads tokens reads those of the shorter text."""
    parsed = None
    if action.parsed is not None:
        ids = chat.tokenizer.encode(text.removeprefix(chat.prefill), special=True)
        parsed = chat.action(ids, "stop", prompt=sample.prompt, tools=tools).parsed
    return Action(text, tokens=action.tokens, raw=action.raw, stop_reason=action.stop_reason, parsed=parsed)


def _split_reasoning(chat: Chat, sample: Sample, text: str) -> Parsed:
    """Separate reasoning between <think> and </think>, also where the prompt has opened it."""
    if "</think>" not in text:
        return Parsed(text)
    opened = text.lstrip().startswith("<think>")
    if not opened:
        tail = chat.tokenizer.decode(sample.prompt[-8:], skip_special=False).rstrip()
        opened = tail.endswith("<think>")
    match = _THOUGHT.match(text) if opened else None
    return Parsed(text) if match is None else Parsed(text[match.end() :], reasoning=match[1].strip("\n"))


def _parse_calls(chat: Chat, action: Action, content: str, tools: Sequence[Message]) -> Parsed:
    """Read calls by the chat's format.

    The agent checks arguments against the schemas, and the schemas themselves: agents that work elsewhere have some
    that are not valid, such as patterns of another language.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas: Mapping[str, Mapping[str, object]] = {each["name"]: each.get("parameters") or {} for each in functions}
    parsed: Parsed = formats.resolve(chat.tool_format)(content, schemas)
    if not parsed.calls and not parsed.errors and action.raw != action:
        raw = formats.resolve(chat.tool_format)(action.raw, schemas)  # some formats begin with a control token
        if raw.calls:
            return Parsed("", raw.calls, raw.errors)
    return parsed


def _make_id(salt: str, index: int) -> str:
    """Return nine letters and digits, as some templates ask for."""
    return hashlib.blake2b(f"{salt}/{index}".encode(), digest_size=8).hexdigest()[:9]
