"""What a key of a foreign configuration means here: the same, something near, nothing, or that it is refused.

keys.toml says it, class by class, and has Trinity's names of arguments beside; ``with_keys`` puts the keys into the
classes of settings, and ``table`` reads them back for the documentation.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, TypeVar

import attrs

from rlkit.errors import ConfigError

__all__ = ["TABLE", "check", "table", "with_keys"]

T = TypeVar("T")
_KIND, _WHY = "rlkit.key", "rlkit.why"
_NAMES = {"mapped": "mapped", "own": "rlkit's own", "unused": "without effect", "refused": "refused"}
TABLE: Mapping[str, Any] = tomllib.loads(resources.files(__package__).joinpath("keys.toml").read_text("utf-8"))


def with_keys(kind: type[T]) -> type[T]:
    """Give a class of settings what keys.toml says of its fields, and fields for its dead keys; attrs comes after."""
    for part, keys in TABLE.get(kind.__name__, {}).items():
        for name, why in keys.items():
            dead = part in ("unused", "refused")
            if dead:
                kind.__annotations__[name] = object
            mark = {_KIND: _NAMES[part], _WHY: why}
            setattr(kind, name, attrs.field(default=None if dead else getattr(kind, name), metadata=mark))
    return kind


def table(kind: type, where: str = "", seen: set[type] | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield (key, its mark, what it means or why it does nothing) of all marked keys below a settings class.

    The marks are "mapped", "rlkit's own", "without effect" and "refused". What stands in several places (task sets, the
    sections of a stage) is listed at the first.
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


def check(settings: attrs.AttrsInstance, where: str = "") -> list[str]:
    """Return what is set and has no effect, one text each.

    Raises:
        ConfigError: a refused key switches something on.
    """
    without_effect = []
    for field in attrs.fields(type(settings)):
        value, key = getattr(settings, field.name), where + field.name
        kind = field.metadata.get(_KIND)
        if kind == "refused" and _on(value):
            raise ConfigError(key, f"is {value!r}", "nothing here", field.metadata[_WHY])
        if kind == "without effect" and value is not None:
            without_effect.append(f"{key} ({field.metadata[_WHY]})")
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        names = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, (list, tuple)) else [""]
        for name, item in zip(names, items, strict=True):
            if attrs.has(type(item)):
                without_effect += check(item, f"{key}.{name}." if name != "" else f"{key}.")
    return without_effect


def _on(value: object) -> bool:
    """Return whether a value switches something on: not null, false, 0, "none" or ``enable: false``."""
    if isinstance(value, Mapping):
        return _on(value.get("enable", any(_on(x) for x in value.values())))
    return bool(value) and value != "none"


def _classes(hint: object) -> list[type]:
    """Return the settings classes in an annotation."""
    if isinstance(hint, type) and attrs.has(hint):
        return [hint]
    return [kind for part in typing.get_args(hint) for kind in _classes(part)]
