"""Objects that a loop keeps between steps, as JSON and back, bit for bit.

Floats are written so that reading gives the same float, infinities and NaN too; arrays as base64 of their bytes.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from rlkit import _check
from rlkit._json import from_json, to_json
from rlkit.errors import CheckpointError, ConfigError

__all__ = ["Stateful", "capture", "decode", "encode", "restore"]

_ARRAY, _SCALAR, _TUPLE, _PAIRS, _FLOAT = "__array__", "__scalar__", "__tuple__", "__pairs__", "__float__"
_KINDS = "biufcmMSU"  # of arrays whose bytes are all there is to them


@runtime_checkable
class Stateful(Protocol):
    """An object that says what it is in plain data, and takes it back."""

    def state(self) -> Any:
        """Return numbers, texts, arrays, and lists and dicts of them."""

    def restore(self, state: Any) -> None:
        """Become what ``state`` was taken from."""


def capture(where: str, kept: Any) -> Any:
    """Return what ``restore`` needs to make ``kept`` what it is now, as JSON.

    Args:
        where: its name, for messages.
        kept: a numpy Generator, a ``random.Random``, an instance of a class made with ``attrs.define``, something with
            ``state`` and ``restore``, or a dict or list of plain data. Fields of an attrs object may be any of these.

    Raises:
        ConfigError: it is none of these, or holds what cannot be written and read back as it is.
    """
    if isinstance(kept, np.random.Generator):
        return encode(where, kept.bit_generator.state)
    if isinstance(kept, random.Random):
        return encode(where, kept.getstate())
    if isinstance(kept, Stateful):
        return encode(where, kept.state())
    if attrs.has(type(kept)):
        return {field.name: _field(where, kept, field.name) for field in attrs.fields(type(kept))}
    if isinstance(kept, (dict, list)):
        return encode(where, kept)
    expected = "a generator, an attrs object, a dict, a list, or something with state() and restore()"
    raise ConfigError(_check.problem(where, f"got {_check.shown(kept)}", expected))


def _in_place(value: Any) -> bool:
    """Return whether a field holds something that is itself restored in place."""
    return isinstance(value, (np.random.Generator, random.Random, Stateful)) or attrs.has(type(value))


def _field(where: str, kept: Any, name: str) -> Any:
    value = getattr(kept, name)
    if _in_place(value):
        return capture(f"{where}.{name}", value)
    try:
        setattr(kept, name, value)
    except attrs.exceptions.FrozenError as error:
        what = "is frozen, so a checkpoint could not be put back into it"
        raise ConfigError(_check.problem(where, what, "a class made with attrs.define")) from error
    return encode(f"{where}.{name}", value)


def restore(where: str, kept: Any, state: Any) -> None:
    """Make ``kept`` what it was when ``state`` was captured, in place.

    Raises:
        CheckpointError: the state is of another kind of object.
    """
    try:
        plain = decode(state)
        if isinstance(kept, np.random.Generator):
            kept.bit_generator.state = plain
        elif isinstance(kept, random.Random):
            kept.setstate(plain)
        elif isinstance(kept, Stateful):
            kept.restore(plain)
        elif attrs.has(type(kept)):
            names = {field.name for field in attrs.fields(type(kept))}
            if not isinstance(plain, dict) or plain.keys() != names:
                raise ValueError(f"it has the fields {sorted(plain)}, expected {sorted(names)}")
            for name, value in plain.items():
                if _in_place(getattr(kept, name)):
                    restore(f"{where}.{name}", getattr(kept, name), state[name])
                else:
                    setattr(kept, name, value)
        elif isinstance(kept, dict):
            fresh = dict(plain)
            kept.clear()
            kept.update(fresh)
        else:
            kept[:] = list(plain)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{where}: what was saved does not fit {_check.shown(kept)}: {error}") from error


def encode(where: str, value: Any) -> Any:
    """Return ``value`` as what JSON can hold.

    Raises:
        ConfigError: something in it cannot be kept, naming where.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64):
        return int(value)
    if isinstance(value, (float, np.float16, np.float32)):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: to_json(number)}
    if isinstance(value, (np.ndarray, np.generic, complex)):
        array = np.asarray(value)
        if array.dtype.kind in _KINDS:
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            name = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
            return {name: array.dtype.str, "shape": list(array.shape), "data": data}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]}
    if isinstance(value, list):
        return [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(f"{where}[{key!r}]", x) for key, x in value.items()}
        pairs = [[encode(f"a key of {where}", k), encode(f"{where}[{k!r}]", x)] for k, x in value.items()]
        return {_PAIRS: pairs}
    why = "an object of its own is kept under a name of its own" if attrs.has(type(value)) else ""
    expected = "numbers, texts, arrays, lists and dicts"
    raise ConfigError(_check.problem(where, f"got {_check.shown(value)}", expected, why))


def decode(value: Any) -> Any:
    """Return the inverse of ``encode``; tuples and arrays are such again.

    Raises:
        ValueError, KeyError: it is not what ``encode`` gives.
    """
    if isinstance(value, list):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if _FLOAT in value:
        number = from_json(value[_FLOAT])
        if number is None:
            raise ValueError(f"a number that is {_check.shown(value[_FLOAT])}")
        return number
    if _ARRAY in value or _SCALAR in value:
        dtype = np.dtype(value.get(_ARRAY, value.get(_SCALAR)))
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of dtype {dtype}")
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype)
        array = flat.reshape(value["shape"]).copy()
        return array if _ARRAY in value else array[()]
    if _TUPLE in value:
        return tuple(decode(x) for x in value[_TUPLE])
    if _PAIRS in value:
        return {decode(k): decode(x) for k, x in value[_PAIRS]}
    return {key: decode(x) for key, x in value.items()}
