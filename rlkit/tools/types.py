"""The results of parsing a policy's text, and the messages that answer calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import attrs

__all__ = ["Malformed", "Parsed", "ToolCall", "error_message", "error_text", "tool_message"]

SURROGATES = re.compile("[\ud800-\udfff]")


@attrs.frozen
class ToolCall:
    """A call that could be read.

    Attributes:
        name: of the tool.
        arguments: by name.
        id: "call00000", "call00001", ... in the order of the text, nine letters and digits, as some templates ask for;
            or the model's own, where its format has one.
        position: the character of the text at which it begins.
    """

    name: str
    arguments: Mapping[str, object]
    id: str = "call00000"
    position: int = 0


@attrs.frozen
class Malformed:
    """A call that could not be read, or must not be made.

    Attributes:
        problem: what is wrong.
        expected: the expected text.
        position: the character of the text at which it is wrong.
        excerpt: the text around that place.
        name: of the tool, if it was recognised.
        id: as of a ``ToolCall``.
        raw: the call as it was sampled, where a renderer read it from the tokens.
    """

    problem: str
    expected: str
    position: int = 0
    excerpt: str = ""
    name: str = ""
    id: str = "call00000"
    raw: str = ""

    @property
    def message(self) -> str:
        """The message to the policy.

        >>> print(Malformed("the JSON is not closed", "a '}'", 9, '{"name": ').message)
        The tool call was not made: the JSON is not closed.
        Where: character 9, at '{"name": '.
        Expected: a '}'.
        """
        call = f"The call of {self.name}" if self.name else "The tool call"
        where = f"\nWhere: character {self.position}, at {self.excerpt!r}." if self.excerpt else ""
        return f"{call} was not made: {self.problem}.{where}\nExpected: {self.expected}."


@attrs.frozen
class Parsed:
    """A parsed text.

    Attributes:
        text_outside: the text around the calls.
        calls: those that can be made, in the order of the text.
        errors: those that cannot.
        reasoning: the policy's thinking; None if there is none, or if it was not separated from the text.
    """

    text_outside: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[Malformed, ...] = ()
    reasoning: str | None = None

    @property
    def in_order(self) -> list[ToolCall | Malformed]:
        """Calls and errors in the order of the text."""
        return sorted([*self.calls, *self.errors], key=lambda call: (call.position, call.id))


def tool_message(call: ToolCall, result: object) -> dict[str, str]:
    """Return a tool's result as the message that follows the policy's turn.

    Args:
        call: the call.
        result: text as it is; anything else as JSON, and what JSON cannot hold as its ``str``. Halves of characters
            (lone surrogates), which no tokenizer encodes, become U+FFFD.

    >>> tool_message(ToolCall("add", {"x": 1}), {"sum": 3})["content"]
    '{"sum": 3}'
    """
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False, default=_plain)
        except Exception:  # noqa: BLE001  # keys that are not text, cycles, 5,000 digits, what a class does
            try:
                result = str(result)
            except Exception as error:  # noqa: BLE001
                result = error_text(error)
    content = SURROGATES.sub("\N{REPLACEMENT CHARACTER}", str(result))
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}


def error_text(error: BaseException) -> str:
    """Return an exception's type and text, for the policy."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # its own __str__ raised
        return type(error).__name__


def _plain(value: object) -> object:
    """Return numbers and arrays of numpy and torch as JSON has them, and anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def error_message(error: Malformed) -> dict[str, str]:
    r"""Return the message to the policy about a call that was not made.

    >>> error_message(Malformed("the tool does not exist", "one of: add", name="ad"))["content"]
    'The call of ad was not made: the tool does not exist.\nExpected: one of: add.'
    """
    return {"role": "tool", "name": error.name or "error", "tool_call_id": error.id, "content": error.message}
