"""What a loop keeps between steps, by name: saved with every checkpoint, and restored in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlkit import _check
from rlkit._warn import warn
from rlkit.errors import ConfigError
from rlkit.runs.record import Record
from rlkit.runs.state import capture, encode, restore

__all__ = ["Kept", "check_name"]

T = TypeVar("T")


class Kept:
    """The objects that a run keeps."""

    def __init__(self) -> None:
        self.objects: dict[str, object] = {}

    def add(self, name: str, kept: T, record: Record | None) -> T:
        """Keep an object, and make it what it was in ``record``; see ``Run.keep``."""
        if check_name("keep(name)", name) in self.objects:
            if self.objects[name] is kept:
                return kept
            why, what = "in a notebook, open the run again to define it anew", f"got {_check.shown(name)}"
            raise ConfigError("keep(name)", what, "a name that is not taken", why)
        capture(name, kept)
        if record is not None:
            if name in record.kept:
                restore(name, kept, record.kept[name])
            else:
                warn(f"the checkpoint has no {name!r}: it starts anew", RuntimeWarning)
        self.objects[name] = kept
        return kept

    def value(self, name: str, make: Callable[[], T], record: Record | None) -> T:
        """Return what ``make()`` gave the first time; see ``Run.value``."""
        key = f"value/{check_name('value(name)', name)}"
        box: Any = self.objects[key] if key in self.objects else self.add(key, {}, record)
        if "value" not in box:
            box["value"] = make()
            encode(name, box["value"])
        value: T = box["value"]
        return value

    def state(self, record: Record | None) -> dict[str, object]:
        """Return the state of every object, and of those in ``record`` that were not asked for since."""
        before = {} if record is None else record.kept
        return {**before, **{name: capture(name, kept) for name, kept in self.objects.items()}}

    def restore(self, record: Record) -> None:
        """Make every object what it was in ``record``."""
        for name, kept in self.objects.items():
            if name in record.kept:
                restore(name, kept, record.kept[name])


def check_name(where: str, name: object) -> str:
    """Return ``name`` if it is a text that is not empty and can be written.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(name, str) or not name or name.encode("utf-8", "replace").decode() != name:
        raise ConfigError(where, f"got {_check.shown(name)}", "a name: text that is not empty")
    return name
