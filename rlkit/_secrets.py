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
from collections.abc import Callable
from pathlib import Path

from rlkit._keys import MASK, is_path, is_word, secret_name, without_keys

__all__ = ["hide", "redact", "redactor"]

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


def _environment() -> frozenset[str]:
    """Return the secrets among the environment variables."""
    found = {(name, value) for name, value in os.environ.items() if len(value) >= _SHORTEST and secret_name(name)}
    return frozenset(value for name, value in found if not _says_nothing(name, value))


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
    found = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOST", "HOME")}
    try:
        found.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # a user without a name
        return found
    return found


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
