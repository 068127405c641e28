"""Converters and checks of the fields of turns, trajectories and groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import DataError

__all__ = ["items", "keep", "numbers", "read_only", "reduced", "reward", "several", "tags", "text"]

T = TypeVar("T")


def keep(value: object) -> object:
    """Take what the caller gave, of any type; it is checked once all fields are there."""
    return value


def read_only(value: object) -> object:
    """Make a mapping read-only."""
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


def reduced(record: attrs.AttrsInstance) -> tuple[Callable[[], object], tuple[()]]:
    """Return what ``__reduce__`` gives, since pickle cannot take read-only mappings."""
    kind = type(record)
    fields = {field.name: getattr(record, field.name) for field in attrs.fields(kind)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return functools.partial(kind, **plain), ()


def items(where: str, value: object, kind: type[T]) -> tuple[T, ...]:
    """Return a sequence of one class as a tuple."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise DataError(where, f"got {_check.shown(value)}", f"a sequence of {kind.__name__}")
    listed = tuple(value)
    for i, item in enumerate(listed):
        _check.require(isinstance(item, kind), f"{where}[{i}]", item, f"a {kind.__name__}", error=DataError)
    return listed


def reward(where: str, value: object) -> float:
    """Return a finite number, or NaN."""
    if isinstance(value, (float, np.floating)) and np.isnan(value):
        return float("nan")
    return _check.real(where, value, error=DataError, why="or NaN for unscored")


def several(value: object, total: float) -> tuple[float, ...]:
    """Return the rewards of a turn, of which ``total`` is 0 (not given) or their sum."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise DataError("Turn.rewards", f"got {_check.shown(value)}", "a sequence of numbers")
    rewards = tuple(reward(f"Turn.rewards[{i}]", each) for i, each in enumerate(value))
    if total != 0.0 and not np.isclose(total, sum(rewards), equal_nan=True):
        what = f"is {total:g}, and rewards add up to {sum(rewards):g}"
        raise DataError("Turn.reward", what, "their sum", "give rewards alone")
    return rewards


def text(where: str, value: object) -> None:
    """Raise where it is no text."""
    _check.require(isinstance(value, str), where, value, "text", error=DataError)


def numbers(where: str, value: Mapping[str, float]) -> None:
    """Raise where it is no mapping from names to finite numbers."""
    _names(where, value)
    for name, number in value.items():
        _check.real(f"{where}[{name!r}]", number, error=DataError)


def tags(where: str, value: Mapping[str, object]) -> None:
    """Raise where it is no mapping from names to texts, numbers and bools."""
    _names(where, value)
    for name, tag in value.items():
        if not isinstance(tag, (str, bool, int, float)):
            raise DataError(f"{where}[{name!r}]", f"got {_check.shown(tag)}", "text, a number or a bool")


def _names(where: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise DataError(where, f"got {_check.shown(value)}", "a mapping with names as keys")
