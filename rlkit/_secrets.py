"""Keys and passwords that are known or look like ones, masked in logs, files and errors."""

from __future__ import annotations

import base64
import functools
import getpass
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit._keys import MASK, is_path, is_word, secret_name, without_keys

__all__ = ["hide", "masked", "redact", "redactor"]

_SHORTEST = 8  # shorter values of environment variables are words, not keys

_lock = threading.Lock()
_hidden: frozenset[str] = frozenset()


def hide(secret: str | None) -> None:
    """Has ``redact`` mask ``secret`` from now on, also where it is written in base64 or as part of a URL."""
    global _hidden  # noqa: PLW0603  # as the environment, it is the process's
    if secret and len(secret) >= 6:
        with _lock:
            _hidden |= {secret}


def redact(text: str) -> str:
    """``text`` with every key in it masked.

    >>> redact("Authorization: Bearer abcdefghijkl, then more")
    'Authorization: Bearer ***, then more'
    >>> redact("curl https://example.org/v1?api_key=abc&n=3 --token 7f3k9x2m11, in /workspace")
    'curl https://example.org/v1?api_key=***&n=3 --token ***, in /workspace'
    """
    return redactor()(text)


def redactor() -> Callable[[str], str]:
    """``redact`` with the environment variables as they are now, for many texts."""
    known = _known(_environment() | _hidden)

    def clean(text: str) -> str:
        if known is not None:
            text = known.sub(MASK, text)
        return without_keys(text)

    return clean


def masked(value: object, name: str = "") -> Any:
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


def _environment() -> frozenset[str]:
    """Return the secrets among the environment variables."""
    telling = {(name, value) for name, value in os.environ.items() if len(value) >= _SHORTEST and secret_name(name)}
    return frozenset(value for name, value in telling if not _says_nothing(name, value))


@functools.lru_cache(maxsize=1024)
def _says_nothing(name: str, value: str) -> bool:
    """Whether such a variable holds a path, a word or a name, which are no secrets and occur in every text."""
    if name in ("PWD", "OLDPWD") or value in _names():
        return True
    return is_word(name, value) or is_path(value) or _exists(value)


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _names() -> set[str]:
    """Of the user and the machine."""
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOST", "HOME")}
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # a user without a name
        return names
    return names


@functools.lru_cache(maxsize=4)
def _known(secrets: frozenset[str]) -> re.Pattern[str] | None:
    forms: set[str] = set()
    for secret in secrets:
        raw = secret.encode("utf-8", "surrogateescape")
        forms |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], raw.hex()}
        forms |= {urllib.parse.quote(raw, safe=""), urllib.parse.quote(raw), urllib.parse.quote_plus(raw)}
        # In base64 a string looks different at each of three offsets, and its first and last characters mix with what
        # stands beside it.
        for offset in range(3):
            text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            cut = text[(offset * 8 + 5) // 6 : -1]
            forms |= {cut, cut.translate(str.maketrans("+/", "-_"))}
    longest_first = sorted((form for form in forms if len(form) >= 6), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
