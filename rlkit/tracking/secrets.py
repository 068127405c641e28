"""Keys and passwords stay out of what is logged."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["masked", "redact", "redactor", "secret_name"]

MASK = "***"
_SHORTEST = 8  # shorter values of environment variables are words, not keys

# The last word of a name, of a setting or an environment variable, whose value is a secret.
_SECRET = {
    *("secret", "password", "passwd", "passphrase", "pwd", "credential", "authorization", "authorisation", "auth"),
    *("bearer", "cookie", "apikey"),
}
# Those that are one only behind some words: "api_key" and "hf_token", but not "sort_key", "eos_token" or "max_tokens".
_HARMLESS = {
    "key": {"", "sort", "group", "metric", "primary", "foreign", "cache", "dict", "hot", "public"},
    "token": {
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "end", "start", "stop", "image", "per"),
        *("named", "added", "special", "first", "last", "next", "prompt", "sampled", "target", "think"),
    },
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# What keys look like, whoever gave them out, and where headers and addresses carry them.
_SHAPES = re.compile(
    r"\b(?:tml|sk|pk|rk|hf|xai|gsk|r8|ghp|gho|ghu|ghs|ghr|glpat|npm|pypi|wandb_v\d)[-_][A-Za-z0-9_.\-]{16,}"
    r"|\btml-[A-Za-z0-9_.\-]+"
    r"|\bgithub_pat_[A-Za-z0-9_]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_\-]{35}"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_.\-]+"
    r"|(?i:(?<=bearer )[A-Za-z0-9_.\-=+/]{8,})|(?i:(?<=x-api-key: )\S+)"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)


@functools.lru_cache(maxsize=4096)
def secret_name(name: str) -> bool:
    """Whether a setting of that name holds a secret.

    >>> [secret_name(n) for n in ("api_key", "WANDB_API_KEY", "hf_token", "max_tokens", "eos_token", "tokenizer")]
    [True, True, True, False, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last.removesuffix("s") in _SECRET or (last == "keys" and before in ("api", "access", "private", "secret")):
        return True
    return last in _HARMLESS and before not in _HARMLESS[last]


def masked(value: Any, name: str = "") -> Any:
    """``value`` without secrets: those of settings with a telling name, and those that can be recognised in texts.

    Args:
        value: anything; mappings, lists and tuples are looked through and copied as dicts and lists.
        name: what it is called, if anything.

    Recognised are the values of environment variables that are called a key, token, secret or password (also in
    base64, or as part of a URL), keys that a Tinker client was given, and the forms that well-known services give
    their keys.

    >>> masked({"lr": 1e-4, "api_key": "abc", "hosts": ["https://me:pass@example.org"], "max_tokens": 8})
    {'lr': 0.0001, 'api_key': '***', 'hosts': ['https://***@example.org'], 'max_tokens': 8}
    """
    return _masked(value, name, redactor())


def _masked(value: Any, name: str, clean: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {clean(str(key)): _masked(each, str(key), clean) for key, each in value.items()}
    if name and secret_name(name) and _can_be_secret(value):
        return MASK
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_masked(each, name, clean) for each in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSU":
        return _masked(value.tolist(), name, clean)
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "backslashreplace")
    return clean(value) if isinstance(value, str) else value


def _can_be_secret(value: Any) -> bool:
    """Whether it says anything, and is not a number that no key can be."""
    if value is None or isinstance(value, (bool, float, np.bool_, np.floating)):
        return False
    return not isinstance(value, (str, bytes, list, tuple, set, frozenset)) or len(value) > 0


def redact(text: str) -> str:
    """``text`` with every key in it masked.

    >>> redact("Authorization: Bearer abcdefghijkl, then more")
    'Authorization: Bearer ***, then more'
    """
    return redactor()(text)


def redactor() -> Callable[[str], str]:
    """``redact`` with the environment variables as they are now, for many texts."""
    known = _known(_environment())
    tinker = sys.modules.get("rlkit.backends.tinker.secrets")  # where there is a client, it knows the key it was given

    def clean(text: str) -> str:
        if known is not None:
            text = known.sub(MASK, text)
        return _SHAPES.sub(MASK, tinker.redact(text) if tinker is not None else text)

    return clean


def _environment() -> frozenset[str]:
    """The secrets among the environment variables."""
    return frozenset(v for name, v in os.environ.items() if len(v) >= _SHORTEST and secret_name(name))


@functools.lru_cache(maxsize=4)
def _known(secrets: frozenset[str]) -> re.Pattern[str] | None:
    forms: set[str] = set()
    for secret in secrets:
        raw = secret.encode("utf-8", "surrogateescape")
        forms |= {secret, urllib.parse.quote(raw, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1], raw.hex()}
        # In base64 a string looks different at each of three offsets, and its first and last characters mix with what
        # stands beside it.
        for offset in range(3):
            text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            cut = text[(offset * 8 + 5) // 6 : -1]
            forms |= {cut, cut.translate(str.maketrans("+/", "-_"))}
    longest_first = sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
