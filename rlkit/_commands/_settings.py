"""``KEY=VALUE`` on a command line."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from rlkit.errors import ConfigError

__all__ = ["settings"]


def settings(option: str, texts: Sequence[str], taken: Collection[str] = ()) -> dict[str, object]:
    """Values by name; what is JSON is read as such, everything else is a text.

    Args:
        option: for messages.
        texts: as they were given.
        taken: names that have an option of their own.

    >>> settings("--set", ["size=3", "name=a b", "deep=true"])
    {'size': 3, 'name': 'a b', 'deep': True}
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(option, f"is {text!r}", "KEY=VALUE")
        if name in taken:
            raise ConfigError(f"{option} {text}: it has an option of its own, --{name}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
