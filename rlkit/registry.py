"""Name -> implementation, with decorators to add and misses that list the existing names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, TypeVar

import attrs

from rlkit import _check
from rlkit.errors import ConfigError, UnknownNameError

__all__ = ["Registry"]

F = TypeVar("F", bound=Callable[..., object])


class Registry(dict[str, Any]):
    """A dict of implementations that users extend.

    A value may be a dotted name ``"package.module:attribute"``; it is imported at its first use.
    Packages add to a registry through entry points of the group ``entry_point_group``.

    >>> colours = Registry("colour")
    >>> @colours.register("red")
    ... def red():
    ...     '''The colour of blood.'''
    >>> colours.resolve("red") is red, colours.resolve(red) is red
    (True, True)
    >>> colours.table()
    [('red', 'The colour of blood.')]
    >>> colours.resolve("rad")
    Traceback (most recent call last):
    rlkit.errors.UnknownNameError: no colour named 'rad'; did you mean 'red'? There are: red
    """

    def __init__(self, kind: str, *, entry_point_group: str | None = None) -> None:
        """Return an empty registry.

        Args:
            kind: of its entries, for messages.
            entry_point_group: of packages that add to it.
        """
        super().__init__()
        self.kind = kind
        self._group = entry_point_group

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a function or class to add it under ``name``.

        It replaces one of the same module and qualified name, as when a cell of a notebook runs again.

        Raises:
            ConfigError: ``name`` is not a non-empty string or is taken, or the object is not a function or class.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f'{self.kind}: register it under a non-empty name, @register("name"); got {name!r}')

        def add(implementation: F) -> F:
            good = callable(implementation) or attrs.has(type(implementation))
            _check.require(good, f"{self.kind} {name!r}", implementation, "a function or a class")
            there = dict.get(self, name, implementation)
            if there is not implementation and not _redefined(there, implementation):
                raise ConfigError(f"{self.kind} {name!r} already exists; delete it from the registry first")
            self[name] = implementation
            return implementation

        return add

    def resolve(self, name_or_callable: str | Callable[..., object]) -> Any:
        """Return the implementation of that name; a callable is returned unchanged (rule R4).

        Raises:
            UnknownNameError: no entry has that name; the message suggests and lists the names.
            ConfigError: neither a name nor a callable.
        """
        if isinstance(name_or_callable, str):
            return self[name_or_callable]
        if callable(name_or_callable):
            return name_or_callable
        raise ConfigError(self.kind, f"got {_check.describe(name_or_callable)}", "a name or a callable")

    def table(self) -> list[tuple[str, str]]:
        """Return (name, first line of its docstring), sorted by name."""
        return [(name, (inspect.getdoc(self[name]) or "").partition("\n")[0]) for name in sorted(self)]

    def __getitem__(self, name: str) -> Any:
        value: object = super().__getitem__(name)  # calls __missing__
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            value = getattr(importlib.import_module(module), attribute)
            self[name] = value
        return value

    def __missing__(self, name: object) -> Any:
        if name in self:  # now that entry points are loaded
            return super().__getitem__(str(name))
        raise UnknownNameError(f"no {self.kind} named {name!r}{_check.suggest(str(name), sorted(self))}")

    def __contains__(self, name: object) -> bool:
        self._load_entry_points()
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:  # overridden, so that dict(registry) calls __getitem__, which imports
        return iter(self.keys())

    def keys(self) -> Any:
        """Return the names, those of entry points too."""
        self._load_entry_points()
        return super().keys()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the implementation, or ``default`` if there is none of that name."""
        return self[name] if name in self else default  # noqa: SIM401 (this is get)

    def values(self) -> Any:
        """Import and return the implementations."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return (name, implementation) pairs, imported."""
        return [(name, self[name]) for name in self]

    def _load_entry_points(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            for point in entry_points(group=group):
                self.setdefault(point.name, point.value)


def _redefined(old: object, new: object) -> bool:
    """Return whether ``new`` replaces ``old`` under the same name of the same module."""
    if attrs.has(type(new)) and old == new:
        return True
    one, two = [(getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (old, new)]
    return one == two and None not in one and "<lambda>" not in str(one[1])
