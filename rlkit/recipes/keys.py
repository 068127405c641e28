"""What a key of a foreign configuration means here: the same, something near, nothing, or that it is refused.

The classes of ``rlkit.recipes.settings`` say it field by field, with the four functions below; ``table`` reads it
back, for the documentation and for the lines that a run logs.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rlkit import _check
from rlkit.errors import ConfigError

__all__ = ["check", "mapped", "own", "refused", "table", "unused"]

_KIND, _WHY = "rlkit.key", "rlkit.why"


def mapped(default: Any, what: str) -> Any:
    """A field that means something near to what it means where it comes from."""
    return attrs.field(default=default, metadata={_KIND: "mapped", _WHY: what})


def own(default: Any, what: str) -> Any:
    """A field that exists only here."""
    return attrs.field(default=default, metadata={_KIND: "rlkit's own", _WHY: what})


def unused(why: str) -> Any:
    """A field that is accepted and changes nothing here; a line of the log says so."""
    return attrs.field(default=None, metadata={_KIND: "without effect", _WHY: why})


def refused(why: str) -> Any:
    """A field that may be there only if it switches nothing on."""
    return attrs.field(default=None, metadata={_KIND: "refused", _WHY: why})


def table(kind: type[Any], where: str = "", seen: set[type[Any]] | None = None) -> Iterator[tuple[str, str, str]]:
    """(key, "mapped" | "without effect" | "refused" | "rlkit's own", what or why), of all keys below a settings class.

    What stands in several places (task sets, the sections of a stage) is listed at the first.
    """
    seen = {kind} if seen is None else seen
    hints = typing.get_type_hints(kind)
    for field in attrs.fields(kind):
        if _KIND in field.metadata:
            yield where + field.name, field.metadata[_KIND], field.metadata[_WHY]
        for inner in _classes(hints[field.name]):
            if inner not in seen:
                seen.add(inner)
                yield from table(inner, f"{where}{field.name}.", seen)


def check(settings: Any, where: str = "") -> list[str]:
    """What is set and has no effect, one text each.

    Raises:
        ConfigError: a refused key switches something on.
    """
    found = []
    for field in attrs.fields(type(settings)):
        value, key = getattr(settings, field.name), where + field.name
        kind = field.metadata.get(_KIND)
        if kind == "refused" and _on(value):
            raise ConfigError(_check.problem(key, f"is {value!r}", "nothing here", field.metadata[_WHY]))
        if kind == "without effect" and value is not None:
            found.append(f"{key} ({field.metadata[_WHY]})")
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        names = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, (list, tuple)) else [""]
        for name, item in zip(names, items, strict=True):
            if attrs.has(type(item)):
                found += check(item, f"{key}.{name}." if name != "" else f"{key}.")
    return found


def _on(value: Any) -> bool:
    """Whether a value switches something on: not null, false, 0, "none" or ``enable: false``."""
    if isinstance(value, Mapping):
        return _on(value.get("enable", any(_on(x) for x in value.values())))
    return bool(value) and value != "none"


def _classes(hint: Any) -> list[type[Any]]:
    """The settings classes in an annotation."""
    if isinstance(hint, type) and attrs.has(hint):
        return [hint]
    return [kind for part in typing.get_args(hint) for kind in _classes(part)]
