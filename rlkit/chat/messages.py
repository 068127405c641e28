"""One reader of conversations for every door: data files, environments, agents' requests and ``Chat`` itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit.errors import DataError

__all__ = ["is_list", "read_call", "read_content", "read_messages", "read_text", "read_tools"]

FIELDS = ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id")
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {"developer": "system", "function": "tool"}  # what most templates do not know -> its name there
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of one thing
_WEIGHTS = ("weight", "train", "trainable", "loss", "loss_mask", "mask")
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA = ("audio", "image", "images", "video", "videos")


def read_messages(value: object, where: str = "messages") -> list[Message]:
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
    if not is_list(value):
        raise DataError(where, f"got {_check.describe(value)}", "a list of messages")
    messages = [_message(message, f"{where}[{i}]") for i, message in enumerate(value)]
    _name_calls(messages)
    return list(messages)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether ``value`` is a list: a sequence that is not text, or an array of objects."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype == object
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def read_text(value: object, where: str) -> str:
    """Return a text as it is. Raises DataError: another type, or text that UTF-8 cannot encode."""
    if not isinstance(value, str):
        raise DataError(where, f"got {_check.describe(value)}", "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"has half of a surrogate pair, {value[error.start]!r}, at {error.start}"
        raise DataError(where, what, "text that UTF-8 can encode") from None
    return str(value)


def read_tools(value: object, where: str = "tools") -> list[Message]:
    """Return function schemas: a list of them, or JSON text of one, as data sets have it. Raises DataError."""
    tools = _parsed(value, where) if isinstance(value, str) else value
    if not is_list(tools):
        raise DataError(where, f"got {_check.describe(value)}", "a list of function schemas")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}[{i}]", f"got {_check.describe(tool)}", '{"type": "function", "function": {"name", ...}}'
            )
    _check.depth(where, tools)
    return [as_json(tool) for tool in tools]


def as_json(value: Any) -> Any:
    """Return a value with lists for arrays and plain numbers for numpy's, at any depth: pandas nests them."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        return value.item()
    return [as_json(inner) for inner in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(where, f"got {_check.describe(value)}", "a message: {'role', 'content'}")
    _check.depth(where, value)
    given = {str(key): field for key, field in value.items() if field is not None}
    if "role" not in given and "from" in given:
        raise DataError(where, f"has the fields {sorted(given)}", "role and content", "rename from and value")
    role = _OTHER_ROLES.get(str(given.get("role")), given.get("role"))
    if role not in _ROLES:
        raise DataError(f"{where}.role", f"got {_check.describe(role)}", f"one of: {', '.join(_ROLES)}")
    _refuse(given, where)
    message: dict[str, Any] = {"role": role, "content": ""}
    calls = _calls(given, role, where)
    content = given.pop("content", None)
    if content is not None:
        message["content"] = read_content(content, role, f"{where}.content")
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
    return message | {name: as_json(field) for name, field in given.items() if name != "role"}


def _refuse(given: dict[str, Any], where: str) -> None:
    """Raise DataError for a field that would change what is learnt, and remove those that change nothing."""
    for name in _MEDIA:
        media = given.pop(name, None)
        if media is not None and not (hasattr(media, "__len__") and len(media) == 0):
            raise DataError(
                f"{where}.{name}", f"got {_check.describe(media)}", "text alone", "no other input is supported"
            )
    if refusal := given.pop("refusal", None):
        raise DataError(f"{where}.refusal", f"got {_check.describe(refusal)}", "an answer in content")
    for name in _WEIGHTS:
        if (weight := given.pop(name, 1)) != 1:
            why = "what is not to be learnt belongs into prompt, before response"
            raise DataError(f"{where}.{name}", f"got {_check.describe(weight)}", "1 or true", why)


def read_content(value: object, role: str, where: str) -> str:
    """Return a content as text; the parts of the assistant's are joined by nothing, others by line breaks.

    Raises:
        DataError: it is neither text nor a list of text parts.
    """
    if isinstance(value, str):
        return read_text(value, where)
    if not is_list(value):
        raise DataError(where, f"got {_check.describe(value)}", "text, or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = _PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            at, found = (f"{where}[{i}].type", kind) if kind is not None else (f"{where}[{i}]", part)
            raise DataError(
                at, f"got {_check.describe(found)}", '{"type": "text", "text": ...}', "only text is supported"
            )
        texts.append(read_text(part.get(name), f"{where}[{i}].{name}"))
    return ("" if role == "assistant" else "\n").join(texts)


def _calls(given: dict[str, Any], role: str, where: str) -> list[dict[str, Any]]:
    """Take the tool calls of a message out of its fields."""
    calls, field = given.pop("tool_calls", []), f"{where}.tool_calls"
    if not is_list(calls):
        raise DataError(field, f"got {_check.describe(calls)}", "a list of calls")
    read = [_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]
    legacy = given.pop("function_call", None)
    if isinstance(legacy, Mapping) and not any(legacy.values()):  # null in a table
        legacy = None
    if legacy is not None:
        field = f"{where}.function_call"
        read.append({"type": "function", "function": read_call(legacy, field)})
    if read and role != "assistant":
        raise DataError(field, f"is given in the role {role!r}", "calls of the assistant alone")
    return read


def _call(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(where, f"got {_check.describe(value)}", "a call: {'type', 'function'}")
    if value.get("type") not in (None, "function"):
        raise DataError(f"{where}.type", f"got {_check.describe(value['type'])}", "'function'")
    inner = value.get("function")
    flat = inner is None and "name" in value  # {"name", "arguments"}, as some data sets have it
    call: dict[str, Any] = {"type": "function"}
    if value.get("id"):
        call = {"id": read_text(value["id"], f"{where}.id"), **call}
    return {**call, "function": read_call(value if flat else inner, where if flat else f"{where}.function")}


def read_call(value: object, where: str) -> dict[str, Any]:
    """Return the function of a call: its name, and its arguments as an object. Raises DataError."""
    if not isinstance(value, Mapping):
        raise DataError(where, f"got {_check.describe(value)}", "an object with name and arguments")
    name = read_text(value.get("name"), f"{where}.name")
    others = value.keys() - {"name", "arguments", "id", "type", "index"}
    if "arguments" not in value and others:
        raise DataError(where, f"has the fields {sorted(map(str, value))}", "name and arguments")
    arguments, field = value.get("arguments"), f"{where}.arguments"
    if isinstance(arguments, str):
        arguments = _parsed(arguments, field) if arguments.strip() else {}
    if not isinstance(arguments, (Mapping, type(None))):
        raise DataError(field, f"got {_check.describe(value['arguments'])}", "a JSON object, or its text")
    _check.depth(field, arguments or {})
    arguments = as_json(arguments or {})
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(field, f"got {_check.describe(arguments)}", "a JSON object", str(error)) from None
    return {"name": name, "arguments": arguments}


def _parsed(text: str, where: str) -> object:
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
