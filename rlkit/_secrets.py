"""Mask known secrets in logs, files and errors: by value, by the name in front of them, or by a well-known shape."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["MASK", "add_secret", "is_secret_name", "mask", "redact"]

MASK = "***"
_added: set[str] = set()

# Names whose values are secrets: "api_key", "hf_token", but not "sort_key", "prompt_key", "eos_token" or "max_tokens".
_HARMLESS = """sort group metric target primary foreign cache dict hot public prompt response messages tools chosen
    rejected image video think bos eos pad unk sep cls mask eot eom end start stop per special first last next"""
_NOT = "".join(rf"(?<!(?<![a-zA-Z])(?i:{word})[_\-])" for word in _HARMLESS.split())
_SURE = r"""(?i:pass(?:word|wd|phrase)|secret|credential|authori[sz]ation|api[_\- ]?key
    |(?:access|private|secret|signing|encryption)[_\- ]key|(?:access|refresh|auth|api)[_\- ]?token)[sS]?"""
_ANY = rf"(?:(?P<sure>{_SURE})|[_\-]{_NOT}(?i:key|token|auth|pwd|cookie)|^(?i:-*(?:token|auth|bearer|cookies?|pwd)))$"
_NAME = re.compile(_ANY, re.VERBOSE)

# A path of words, which many texts hold; no part of it is as long as a random key.
_PATH = re.compile(r"(?!.*[A-Za-z0-9]{20})(?:~|\.{1,2}|[A-Za-z]:)?[/\\][\w.\-~: @/\\]*")

_SHAPES = re.compile(
    r"""\b(?:sk[-_]|(?:hf|npm|r8|gsk)_|pypi-|xai-)[\w\-]{0,40}?[A-Za-z0-9]{16}[\w\-.]*  # as sk-learn-pipeline is not
    |\b(?:gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|nvapi-|wandb_v1_|ya29\.|GOCSPX-|SG\.)[\w\-.]{16,}
    |\btml-[\w\-.]{5,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w\-]{35}|\beyJ[\w\-]{8,}\.[\w\-.]+
    |(?<=://)[^\s/:@]*:[^\s/@]+(?=@)                                                  # https://user:password@host
    |(?i:(?<=bearer[ ]))(?=\S{0,60}\d)[\w.\-=+/~]{8,}
    |-----BEGIN[ ][A-Z ]{0,40}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----(?=\s|\\|[A-Za-z0-9+/]{8})
    (?s:.*?)(?:-----END[ ][A-Z ]{0,40}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----|\Z)""",
    re.VERBOSE,
)
# A name and its value in a text: a=b, "a": "b", a: b, ?a=b, --a b; in JSON within JSON the quotes are escaped.
_PAIR = re.compile(
    rf"""(?P<name>
    (?:{_SURE}|[_\-]{_NOT}(?i:token|auth|pwd)|_KEY|(?<=[?&])(?i:token|sig|(?:x-(?:amz|goog)-)?signature))
    \\{{0,3}}["']?\]?[ \t]{{0,2}}(?:=>?|:)[ \t]{{0,2}}
    |(?<![\w\-])--?(?:[A-Za-z][\w\-]{{0,40}}?)?(?:{_SURE}|(?<=-)(?:token|auth)|[_\-]{_NOT}(?:key|token))[ =][ ]?)
    (?!\\{{0,3}}["']?(?:[<{{%*]|\$[{{A-Z(]|(?i:none|null|true|false|required|optional)\b))  # a placeholder, or nothing
    (?:(?P<quote>\\{{0,3}}["'])(?:(?!(?P=quote))(?:\\.|[^\n])){{1,4096}}(?P=quote)
    |(?P<scheme>(?i:bearer|basic|token)[ ])?(?![-/]|\w+://)[^\s"',;&()\[\]{{}}<>\\]{{4,}}+(?![(\[]))  # no code
    """,
    re.VERBOSE,
)


def add_secret(secret: str | None) -> None:
    """Make ``redact`` mask ``secret`` from now on, also in base64 or as part of a URL."""
    if secret and len(secret) >= 6:
        _added.add(secret)


def redact(text: str) -> str:
    """Return ``text`` with every key in it masked.

    >>> redact("Authorization: Bearer abcdefghijkl, then more")
    'Authorization: Bearer ***, then more'
    >>> redact("curl https://example.org/v1?api_key=abcd&n=3 --token 7f3k9x2m11, in /workspace")
    'curl https://example.org/v1?api_key=***&n=3 --token ***, in /workspace'
    """
    known = frozenset(_added).union(value for name, value in os.environ.items() if _is_secret(name, value))
    text = _compile(known).sub(MASK, text) if known else text
    return _PAIR.sub(rf"\g<name>\g<quote>\g<scheme>{MASK}\g<quote>", _SHAPES.sub(MASK, text))


def mask(value: object, name: str = "") -> Any:
    """Return ``value`` without secrets: values of settings with telling names, and what ``redact`` finds in texts.

    Args:
        value: anything; mappings, lists and tuples are looked through and copied as dicts and lists. In a list of
            arguments, the value after ``"--api-key"`` is a secret.
        name: its name, if it has one.

    Fractions, booleans, None and paths are never masked, whatever their names.

    >>> mask({"lr": 1e-4, "api_key": "abc", "hosts": ["https://me:pass@example.org"], "max_tokens": 8})
    {'lr': 0.0001, 'api_key': '***', 'hosts': ['https://***@example.org'], 'max_tokens': 8}
    """
    if isinstance(value, Mapping):
        return {redact(str(k)): mask(each, str(k) if is_secret_name(str(k)) else name) for k, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(_mask_items(value, name))
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSU":
        return mask(value.tolist(), name)
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "backslashreplace")
    if not is_secret_name(name) or value is None or isinstance(value, (bool, float, np.bool_, np.floating)):
        return redact(value) if isinstance(value, str) else value
    return value if isinstance(value, str) and (not value or _PATH.fullmatch(value)) else MASK


def _mask_items(values: Iterable[object], name: str) -> Iterator[object]:
    flag = ""
    for each in values:
        is_flag = isinstance(each, str) and each.startswith("-")
        yield mask(each, name if is_flag or not is_secret_name(flag) else flag)
        flag = str(each) if is_flag else ""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a setting or an environment variable of that name holds a secret.

    >>> [is_secret_name(n) for n in ("api_key", "WANDB_API_KEY", "hf_token", "max_tokens", "eos_token", "tokenizer")]
    [True, True, True, False, False, False]
    """
    return _NAME.search(name[-64:]) is not None


@functools.lru_cache(maxsize=1024)
def _is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable holds a secret, and not a path, word or user name, as any text does."""
    telling = _NAME.search(name)
    if telling is None or len(value) < 8 or _PATH.fullmatch(value):
        return False
    if value in {os.environ.get(each) for each in ("USER", "LOGNAME", "USERNAME", "HOSTNAME")}:
        return False
    word = re.fullmatch(r"[A-Za-z]+([-_ ][A-Za-z]+)*|\d+", value)  # a secret only in a variable such as DB_PASSWORD
    return word is None or (telling["sure"] is not None and value.lower() not in name.lower())


@functools.lru_cache(maxsize=4)
def _compile(secrets: frozenset[str]) -> re.Pattern[str]:
    """Return the pattern of the secrets in each form in which a text may hold them."""
    forms: set[str] = set()
    for secret in secrets:
        raw = secret.encode("utf-8", "surrogateescape")
        forms |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], raw.hex()}
        forms |= {urllib.parse.quote(raw, safe=""), urllib.parse.quote(raw), urllib.parse.quote_plus(raw)}
        # In base64 a string looks different at each of three offsets, and its first and last characters mix with the
        # characters next to it.
        for offset in range(3):
            text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            inner = text[(offset * 8 + 5) // 6 : -1]
            forms |= {inner, inner.translate(str.maketrans("+/", "-_"))}
    longest_first = sorted((form for form in forms if len(form) >= 6), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
