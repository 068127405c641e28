"""What a parser finds in a policy's text."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rlkit._calls import answered

__all__ = ["Malformed", "Parsed", "ToolCall"]


@answered
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


@answered
@attrs.frozen
class Malformed:
    """A call that could not be read, or must not be made.

    Attributes:
        problem: what is wrong.
        expected: what should stand there instead.
        position: the character of the text at which it is wrong.
        excerpt: the text around that place.
        name: of the tool, where that much was clear.
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
        """What the policy is told.

        >>> print(Malformed("the JSON is not closed", "a '}'", 9, '{"name": ').message)
        The tool call was not made: the JSON is not closed.
        Where: character 9, at '{"name": '.
        Expected: a '}'.
        """
        call = f"The call of {self.name}" if self.name else "The tool call"
        where = f"\nWhere: character {self.position}, at {self.excerpt!r}." if self.excerpt else ""
        return f"{call} was not made: {self.problem}.{where}\nExpected: {self.expected}."


@answered
@attrs.frozen
class Parsed:
    """A text, taken apart.

    Attributes:
        text_outside: what stands around the calls.
        calls: those that can be made, in the order of the text.
        errors: those that cannot.
        reasoning: what the policy thought; None where it did not, or where it was not told apart from the text.
    """

    text_outside: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[Malformed, ...] = ()
    reasoning: str | None = None

    @property
    def in_order(self) -> list[ToolCall | Malformed]:
        """Calls and errors as they stand in the text."""
        return sorted([*self.calls, *self.errors], key=lambda call: (call.position, call.id))
