"""The fields of a client's JSON, each read once, in its type; what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from rlkit import _check
from rlkit.gateway.types import GatewayError

__all__ = ["Body", "refuse", "wrong"]

T = TypeVar("T", bound=str)


class Body:
    """A JSON object. ``null`` is the same as a field that is not there.

    Args:
        value: what stands in the JSON.
        where: its path in the request, "" for the whole.

    Raises:
        GatewayError: 400 with ``param``, from here and from every method, where a value is not what it must be.

    >>> body = Body({"tools": [{"type": "function"}], "n": 2, "stop": None})
    >>> body.integer("n", low=1), body.get("stop"), [tool.where for tool in body.objects("tools")]
    (2, None, ['tools[0]'])
    >>> body.text("n")
    Traceback (most recent call last):
    rlkit.gateway.types.GatewayError: n: got 2 (int); expected a string
    """

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise wrong(where or "body", value, "an object")
        self.value: Mapping[str, object] = value
        self.where = where

    def path(self, name: str) -> str:
        """Return where a field is in the request."""
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str) -> object:
        """Return a field as it is."""
        return self.value.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        raise wrong(self.path(name), value, "a string")

    def choice(self, name: str, choices: Collection[T]) -> T | None:
        """Return one of some strings."""
        value = self.get(name)
        for choice in choices:
            if value == choice:
                return choice
        if value is None:
            return None
        raise wrong(self.path(name), value, "one of: " + ", ".join(choices))

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        """Return an integer in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        expected = (
            "an integer" + (f" >= {low}" if low is not None else "") + (f" <= {high}" if high is not None else "")
        )
        if isinstance(number, bool) or not isinstance(number, int):
            raise wrong(self.path(name), value, expected)
        if (low is not None and number < low) or (high is not None and number > high):
            raise wrong(self.path(name), value, expected)
        return number

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a finite number in [low, high]."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise wrong(self.path(name), value, f"a number in [{low}, {high}]")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False where there is none."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise wrong(self.path(name), value, "true or false")

    def body(self, name: str) -> Body | None:
        """Return an object."""
        value = self.get(name)
        return None if value is None else Body(value, self.path(name))

    def items(self, name: str, expected: str = "a list") -> list[object]:
        """Return a list; an empty one where there is none."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(self.path(name), value, expected)
        return value

    def parts(self, name: str) -> Iterator[Body]:
        """Yield the parts of a content that is no text."""
        return self.objects(name, "text, or a list of parts")

    def objects(self, name: str, expected: str = "a list") -> Iterator[Body]:
        """Yield the objects of a list."""
        for i, value in enumerate(self.items(name, expected)):
            yield Body(value, f"{self.path(name)}[{i}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a list, or the one string that stands there; none of them is empty."""
        value = self.get(name)
        values = [value] if isinstance(value, str) else self.items(name)
        for i, each in enumerate(values):
            if not isinstance(each, str) or not each:
                raise wrong(f"{self.path(name)}[{i}]", each, "a string that is not empty")
        return tuple(each for each in values if isinstance(each, str))

    def tokens(self, name: str) -> list[int]:
        """Return the token ids of a list."""
        values = self.items(name)
        for i, each in enumerate(values):
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 2**63:
                raise wrong(f"{self.path(name)}[{i}]", each, "a token id, an integer >= 0")
        return [each for each in values if isinstance(each, int)]

    def required(self, name: str, value: T | None) -> T:
        """Return ``value``, which was read from a field that must be there."""
        if value is None:
            raise GatewayError(400, f"{self.path(name)}: is missing", param=self.path(name))
        return value


def wrong(where: str, value: object, expected: str, why: str = "") -> GatewayError:
    """Return the refusal of a value.

    >>> print(wrong("messages[0].role", "robot", "one of: system, user", "of the chat").message)
    messages[0].role: got 'robot' (str); expected one of: system, user (of the chat)
    """
    return GatewayError(400, _check.problem(where, f"got {_check.shown(value)}", expected, why), param=where)


def refuse(body: Body, unsupported: Mapping[str, Collection[object]]) -> None:
    """Raise GatewayError for a field that would change what is sampled or returned, and that nothing here does.

    Args:
        body: of the request.
        unsupported: name -> the values that change nothing, beside null, "", [] and {}.

    >>> refuse(Body({"logit_bias": {}, "best_of": 1}), {"logit_bias": (), "best_of": (1,)})
    >>> refuse(Body({"logit_bias": {"5": 1}}), {"logit_bias": ()})
    Traceback (most recent call last):
    rlkit.gateway.types.GatewayError: logit_bias: is not supported here, and would not be without effect
    """
    for name, harmless in unsupported.items():
        value = body.get(name)
        nothing = value is None or (isinstance(value, (str, list, dict)) and not value)
        same = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless)
        if not nothing and not same:
            where = body.path(name)
            raise GatewayError(400, f"{where}: is not supported here, and would not be without effect", param=where)
