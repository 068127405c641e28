"""One reader of conversations for every door: data files, environments, agents' requests and ``Chat`` itself."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit.errors import DataError

__all__ = ["is_list", "read_call", "read_messages", "read_text", "read_tools"]

FIELDS = ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id")
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {"developer": "system", "function": "tool"}  # what most templates do not know -> its name there
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of one thing
_WEIGHTS = ("weight", "train", "trainable", "loss", "loss_mask", "mask")
_require = functools.partial(_check.require, error=DataError)
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA = ("audio", "image", "images", "video", "videos")


def read_messages(value: Any, where: str = "messages") -> list[Message]:
    """Return a conversation in the form that chat templates read.

    Read are the messages of OpenAI's API and of the data sets in use. Contents become text: the texts of several parts
    are joined, by a line break except in the assistant's; null is the empty text in the role tool and beside tool
    calls. Arguments of calls become objects. ``developer`` becomes ``system``, ``function`` and ``function_call``, the
    older form of calls, ``tool`` and ``tool_calls``, and ``reasoning`` and ``thinking`` become ``reasoning_content``.
    Other fields that are null are left out, and those that are not known are kept for the template.

    Args:
        value: a sequence of mappings; also an object array, which is what pandas reads from parquet.
        where: begins error messages, as in ``messages[1].content``.

    Raises:
        DataError: another role or a field of another form, an image or other part that is not text, a refusal, or a
            weight.

    >>> read_messages([{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}])
    [{'role': 'user', 'content': '2 + 2?'}]
    >>> read_messages([{"role": "assistant", "content": None}])
    Traceback (most recent call last):
    rlkit.errors.DataError: messages[0].content: got None; expected text (null only beside tool_calls, or of a tool)
    """
    _require(is_list(value), where, value, "a list of messages")
    messages = [_read_message(message, f"{where}[{i}]") for i, message in enumerate(value)]
    _name_calls(messages)
    return list(messages)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether ``value`` is a list: a sequence that is not text, or an array of objects."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype == object
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def read_text(value: Any, where: str) -> str:
    """Return a text as it is. Raises DataError: another type, or text that UTF-8 cannot encode."""
    _require(isinstance(value, str), where, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"has half of a surrogate pair, {value[error.start]!r}, at {error.start}"
        raise DataError(where, what, "text that UTF-8 can encode") from None
    return str(value)


def read_tools(value: Any, where: str = "tools") -> list[Message]:
    """Return function schemas: a list of them, or JSON text of one, as data sets have it. Raises DataError."""
    tools: Any = _parse_json(value, where) if isinstance(value, str) else value
    _require(is_list(tools), where, value, "a list of function schemas")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        good = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        _require(good, f"{where}[{i}]", tool, '{"type": "function", "function": {"name", ...}}')
    _check.depth(where, tools)
    return [_to_json(tool) for tool in tools]


def _to_json(value: Any) -> Any:
    """Return a value with lists for arrays and plain numbers for numpy's, at any depth: pandas nests them."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(inner) for key, inner in value.items()}
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        return value.item()
    return [_to_json(inner) for inner in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def _read_message(value: Any, where: str) -> dict[str, Any]:
    _require(isinstance(value, Mapping), where, value, "a message: {'role', 'content'}")
    _check.depth(where, value)
    given = {str(key): field for key, field in value.items() if field is not None}
    if "role" not in given and "from" in given:
        raise DataError(where, f"has the fields {sorted(given)}", "role and content", "rename from and value")
    role: Any = _OTHER_ROLES.get(str(given.get("role")), given.get("role"))
    _require(role in _ROLES, f"{where}.role", role, f"one of: {', '.join(_ROLES)}")
    _refuse_fields(given, where)
    message: dict[str, Any] = {"role": role, "content": ""}
    calls = _read_calls(given, role, where)
    content = given.pop("content", None)
    if content is not None:
        message["content"] = _read_content(content, role, f"{where}.content")
    elif not calls and role != "tool":
        raise DataError(f"{where}.content", "got None", "text", "null only beside tool_calls, or of a tool")
    for name in _THOUGHTS:
        thought = given.pop(name, None)
        if thought and message.setdefault("reasoning_content", read_text(thought, f"{where}.{name}")) != thought:
            raise DataError(f"{where}.{name}", "differs from the message's other reasoning", "one of them")
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if name in given:
            message[name] = read_text(given.pop(name), f"{where}.{name}")
    return message | {name: _to_json(field) for name, field in given.items() if name != "role"}


def _refuse_fields(given: dict[str, Any], where: str) -> None:
    """Raise DataError for a field that would change what is learnt, and remove those that change nothing."""
    for name in _MEDIA:
        media = given.pop(name, None)
        none = media is None or (hasattr(media, "__len__") and len(media) == 0)
        _require(none, f"{where}.{name}", media, "text alone", "no other input is supported")
    refusal = given.pop("refusal", None)
    _require(not refusal, f"{where}.refusal", refusal, "an answer in content")
    for name in _WEIGHTS:
        weight, why = given.pop(name, 1), "what is not to be learnt belongs into prompt, before response"
        _require(weight == 1, f"{where}.{name}", weight, "1 or true", why)


def _read_content(value: Any, role: str, where: str) -> str:
    """Return a content as text; the parts of the assistant's are joined by nothing, others by line breaks.

    Raises:
        DataError: it is neither text nor a list of text parts.
    """
    if isinstance(value, str):
        return read_text(value, where)
    _require(is_list(value), where, value, "text, or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = _PARTS.get(kind) if isinstance(kind, str) else None
        at, found = (f"{where}[{i}].type", kind) if kind is not None else (f"{where}[{i}]", part)
        _require(name is not None, at, found, '{"type": "text", "text": ...}', "only text is supported")
        texts.append(read_text(part.get(name), f"{where}[{i}].{name}"))
    return ("" if role == "assistant" else "\n").join(texts)


def _read_calls(given: dict[str, Any], role: str, where: str) -> list[dict[str, Any]]:
    """Take the tool calls of a message out of its fields."""
    calls, field = given.pop("tool_calls", []), f"{where}.tool_calls"
    _require(is_list(calls), field, calls, "a list of calls")
    read = [_read_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]
    legacy = given.pop("function_call", None)
    if isinstance(legacy, Mapping) and not any(legacy.values()):  # null in a table
        legacy = None
    if legacy is not None:
        field = f"{where}.function_call"
        read.append({"type": "function", "function": read_call(legacy, field)})
    if read and role != "assistant":
        raise DataError(field, f"is given in the role {role!r}", "calls of the assistant alone")
    return read


def _read_call(value: Any, where: str) -> dict[str, Any]:
    _require(isinstance(value, Mapping), where, value, "a call: {'type', 'function'}")
    _require(value.get("type") in (None, "function"), f"{where}.type", value.get("type"), "'function'")
    inner = value.get("function")
    flat = inner is None and "name" in value  # {"name", "arguments"}, as some data sets have it
    call: dict[str, Any] = {"type": "function"}
    if value.get("id"):
        call = {"id": read_text(value["id"], f"{where}.id"), **call}
    return {**call, "function": read_call(value if flat else inner, where if flat else f"{where}.function")}


def read_call(value: Any, where: str) -> dict[str, Any]:
    """Return the function of a call: its name, and its arguments as an object. Raises DataError."""
    _require(isinstance(value, Mapping), where, value, "an object with name and arguments")
    name = read_text(value.get("name"), f"{where}.name")
    others = value.keys() - {"name", "arguments", "id", "type", "index"}
    if "arguments" not in value and others:
        raise DataError(where, f"has the fields {sorted(map(str, value))}", "name and arguments")
    arguments, field = value.get("arguments"), f"{where}.arguments"
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, field) if arguments.strip() else {}
    good = isinstance(arguments, (Mapping, type(None)))
    _require(good, field, value.get("arguments"), "a JSON object, or its text")
    _check.depth(field, arguments or {})
    arguments = _to_json(arguments or {})
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(field, f"got {_check.describe(arguments)}", "a JSON object", str(error)) from None
    return {"name": name, "arguments": arguments}


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text, parse_float=_check.finite, parse_constant=_check.finite)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"got {_check.describe(text)}", "JSON", str(error)) from None


def _name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give calls without an id one, and their results the same: templates of some models need them."""
    number, waiting = 0, list[str]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" not in call:
                call["id"] = f"call{number:05d}"
                number += 1
                waiting.append(call["id"])
        if message["role"] == "tool" and "tool_call_id" not in message and waiting:
            message["tool_call_id"] = waiting.pop(0)
