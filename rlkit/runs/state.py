"""Objects that a loop keeps between steps, as JSON and back, bit for bit.

Floats are written so that reading gives the same float; arrays as base64 of their bytes.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import CheckpointError, ConfigError

__all__ = ["Stateful", "capture", "decode", "encode", "restore"]

_ARRAY, _TUPLE, _PAIRS = "__array__", "__tuple__", "__pairs__"


@runtime_checkable
class Stateful(Protocol):
    """An object that says what it is in plain data, and takes it back."""

    def state(self) -> Any:
        """Numbers, texts, arrays, and lists and dicts of them."""

    def restore(self, state: Any) -> None:
        """Becomes what ``state`` was taken from."""


def capture(where: str, kept: Any) -> Any:
    """What ``restore`` needs to make ``kept`` what it is now, as JSON.

    Args:
        where: its name, for messages.
        kept: a numpy Generator, a ``random.Random``, an instance of a class made with ``attrs.define``, something with
            ``state`` and ``restore``, or a dict or list of plain data.

    Raises:
        ConfigError: it is none of these, or holds what JSON can not.
    """
    if isinstance(kept, np.random.Generator):
        return encode(where, kept.bit_generator.state)
    if isinstance(kept, random.Random):
        return encode(where, kept.getstate())
    if isinstance(kept, Stateful):
        return encode(where, kept.state())
    if attrs.has(type(kept)):
        return encode(where, {field.name: getattr(kept, field.name) for field in attrs.fields(type(kept))})
    if isinstance(kept, (dict, list)):
        return encode(where, kept)
    expected = "a generator, an attrs object, a dict, a list, or something with state() and restore()"
    raise ConfigError(_check.problem(where, f"got {_check.shown(kept)}", expected))


def restore(where: str, kept: Any, state: Any) -> None:
    """Makes ``kept`` what it was when ``state`` was captured, in place.

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
                setattr(kept, name, value)
        elif isinstance(kept, dict):
            fresh = dict(plain)
            kept.clear()
            kept.update(fresh)
        else:
            kept[:] = list(plain)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: what was saved does not fit {_check.shown(kept)}: {error}") from error


def encode(where: str, value: Any) -> Any:
    """``value`` as what JSON can hold.

    Raises:
        ConfigError: something in it can not be kept, naming where.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            raise ConfigError(f"{where} is {value}; what is not finite is not saved")
        return float(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ConfigError(f"{where} holds numbers that are not finite, which are not saved")
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]}
    if isinstance(value, list):
        return [encode(f"{where}[{i}]", x) for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(f"{where}[{key!r}]", x) for key, x in value.items()}
        pairs = [[encode(f"a key of {where}", k), encode(f"{where}[{k!r}]", x)] for k, x in value.items()]
        return {_PAIRS: pairs}
    if attrs.has(type(value)):
        return encode(where, attrs.asdict(value, recurse=False))
    raise ConfigError(_check.problem(where, f"got {_check.shown(value)}", "numbers, texts, arrays, lists and dicts"))


def decode(value: Any) -> Any:
    """The inverse of ``encode``; tuples and arrays are such again.

    Raises:
        ValueError, KeyError: it is not what ``encode`` gives.
    """
    if isinstance(value, list):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        dtype = np.dtype(value[_ARRAY])
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of dtype {dtype}")
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype)
        return flat.reshape(value["shape"]).copy()
    if _TUPLE in value:
        return tuple(decode(x) for x in value[_TUPLE])
    if _PAIRS in value:
        return {decode(k): decode(x) for k, x in value[_PAIRS]}
    return {key: decode(x) for key, x in value.items()}
