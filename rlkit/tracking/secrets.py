"""Keys and passwords stay out of what is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit._keys import MASK, is_path, secret_name
from rlkit._secrets import redact, redactor

__all__ = ["masked", "redact", "redactor", "secret_name"]


def masked(value: Any, name: str = "") -> Any:
    """``value`` without secrets: those of settings with a telling name, and those that can be recognised in texts.

    Args:
        value: anything; mappings, lists and tuples are looked through and copied as dicts and lists.
        name: what it is called, if anything.

    Recognised are the values of environment variables that are called a key, token, secret or password (also in
    base64, or as part of a URL; paths and plain words are none), keys that a Tinker client was given, the forms that
    well-known services give their keys, and what stands behind such a name in a URL, a command, JSON or a line of text.

    >>> masked({"lr": 1e-4, "api_key": "abc", "hosts": ["https://me:pass@example.org"], "max_tokens": 8})
    {'lr': 0.0001, 'api_key': '***', 'hosts': ['https://***@example.org'], 'max_tokens': 8}
    """
    return _masked(value, name, redactor())


def _masked(value: object, name: str, clean: Callable[[str], str]) -> object:
    if isinstance(value, Mapping):
        return {clean(str(key)): _masked(each, str(key), clean) for key, each in value.items()}
    if name and secret_name(name) and _can_be_secret(value):
        return MASK
    if isinstance(value, (list, tuple)):
        return list(_items(value, name, clean))
    if isinstance(value, (set, frozenset)):
        return [_masked(each, name, clean) for each in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSU":
        return _masked(value.tolist(), name, clean)
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "backslashreplace")
    return clean(value) if isinstance(value, str) else value


def _items(values: Sequence[object], name: str, clean: Callable[[str], str]) -> Iterator[object]:
    """Of a list, which may be that of a command's arguments: what follows "--api-key" is one."""
    telling = False
    for each in values:
        flag = isinstance(each, str) and each.startswith("-")
        yield MASK if telling and isinstance(each, str) and not flag else _masked(each, name, clean)
        telling = flag and secret_name(each)


def _can_be_secret(value: object) -> bool:
    """Whether it says anything, and is not a number that no key can be."""
    if value is None or isinstance(value, (bool, float, np.bool_, np.floating)):
        return False
    if isinstance(value, str) and is_path(value):
        return False
    return not isinstance(value, (str, bytes, list, tuple, set, frozenset)) or len(value) > 0
