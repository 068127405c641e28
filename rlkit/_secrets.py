"""Keys and passwords that are known or look like ones, masked in logs, files and errors."""

from __future__ import annotations

import base64
import functools
import getpass
import itertools
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "MASK",
    "SECRET",
    "hide",
    "is_path",
    "is_word",
    "masked",
    "redact",
    "redactor",
    "secret_name",
    "without_keys",
]

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# The last word of a setting's or an environment variable's name whose value is a secret.
_SECRET = {
    *("secret", "password", "passwd", "passphrase", "pwd", "credential", "authorization", "authorisation", "auth"),
    *("bearer", "cookie", "apikey"),
}
# Those that are one only after some words: "api_key" and "hf_token", but not "sort_key", "eos_token" or "max_tokens".
_HARMLESS = {
    "key": {"", "sort", "group", "metric", "primary", "foreign", "cache", "dict", "hot", "public"},
    "token": {
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "end", "start", "stop", "image", "per"),
        *("named", "added", "special", "first", "last", "next", "prompt", "sampled", "target", "think"),
    },
}
# In a text these alone are weak evidence ("token: the"): then only a random-looking value is masked.
_DOUBTFUL = {"token", "auth", "cookie", "bearer"}
# If a variable's name ends in one of these, an ordinary word is a secret, too; in MY_KEY=production it is not.
_SURE = {"password", "passwd", "passphrase", "pwd", "secret", "apikey", "credential"}
_BEFORE_KEYS = ("api", "access", "private", "secret", "signing", "encryption")
_BEFORE_TOKENS = {"access", "refresh", "auth", "api", "bearer", "session", "bot", "hf", "github", "gitlab", "personal"}
_NOTHING = {
    *("", "none", "null", "true", "false", "undefined", "required", "optional", "..."),
    *("bearer", "basic", "digest", "token"),  # of a header, whose key comes next
}
_PLACEHOLDER = re.compile(r"\$[A-Z_][A-Z0-9_]*|\$?[<{%].*[>})%]|\W+")

# Prefixes of services' keys: a random-looking text follows (``_random``).
_PREFIXES = (
    r"sk[-_]|pk[-_]|rk_|hf_|api_org_|xai-|gsk_|r8_|gh[pousr]_|github_pat_|gl(?:pat|dt|ptt|rt|soat|agent)-|npm_|pypi-"
    r"|wandb_v\d_|xox[abeprs]-|xapp-|nvapi-|csk-|fw_|tgp_v\d_|lin_(?:api|oauth)_|do[opr]_v\d_|pplx-|lsv2_(?:pt|sk)_"
    r"|tvly-|e2b_|pcsk_|ntn_|secret_|shp(?:at|ca|pa|ss)_|sq0(?:atp|csp)-|whsec_|hv[sb]\.|dp\.(?:pt|st)\.|sbp_|figd_"
    r"|PMAK-|sntry[su]_|NRAK-|glsa_|glc_|dckr_pat_|ya29\.|GOCSPX-|SG\.|key-|tml-|dapi"
)
_PREFIXED = re.compile(rf"(?<![A-Za-z0-9_])(?P<prefix>{_PREFIXES})(?P<body>[A-Za-z0-9][A-Za-z0-9_.\-]{{4,}}={{0,2}})")
# Values that need no second look.
_SHAPES = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_\-]{35}|\bSK[0-9a-f]{32}\b|\bAGE-SECRET-KEY-1[A-Z0-9]{50,}"
    r"|\b\d{8,10}:AA[A-Za-z0-9_\-]{33}\b|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_.\-]+"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)|(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]+"
    r"|(?i:(?<=authorization: bearer )|(?<=authorization: basic )|(?<=authorization: token ))[^\s\"',;]+"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?=\s|\\|[A-Za-z0-9+/]{8})"
    r".*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_PERHAPS = re.compile(r"(?i:(?<=bearer ))[A-Za-z0-9_.\-=+/]{8,}|(?<=://)[A-Za-z0-9_.\-]{16,}(?=@)")
# A name and its value in a text: a=b, "a": "b", a: b, --a b, ?a=b; in JSON within JSON the quotes are escaped.
_TELLING = re.compile(r"(?i)pass|pwd|secret|key|token|auth|cred|cookie|bearer")
_PAIR = re.compile(
    r"""(?<![\w-])(?:(?P<flag>--?[A-Za-z][\w-]{0,62})(?P<gap>[=:]|[ \t]{1,2})
    |(?P<name>(?i:api|access|secret|private)[ ](?i:key|token)\b|[A-Za-z][\w-]{0,62})
    (?P<join>\\{0,3}["']?\]?[ \t]{0,2}(?:=>?|:)[ \t]{0,2}))
    (?:(?P<quote>\\{0,3}["'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n])){1,4096})(?P=quote)
    |(?P<plain>[^\s"',;&()\[\]{}<>\\]+))""",
    re.VERBOSE,
)


@functools.lru_cache(maxsize=4096)
def secret_name(name: str) -> bool:
    """Return whether a setting of that name holds a secret.

    >>> [secret_name(n) for n in ("api_key", "WANDB_API_KEY", "hf_token", "max_tokens", "eos_token", "tokenizer")]
    [True, True, True, False, False, False]
    """
    before, last = _last_words(name)
    if last.removesuffix("s") in _SECRET or (last == "keys" and before in _BEFORE_KEYS):
        return True
    return last in _HARMLESS and before not in _HARMLESS[last]


def without_keys(text: str) -> str:
    """Return ``text`` with everything masked that looks like a key.

    >>> without_keys("sk-proj-4fKq8Wm2Zt7RbX1c in /workspace, password: hunter2")
    '*** in /workspace, password: ***'
    """
    text = _PREFIXED.sub(_prefixed, _SHAPES.sub(MASK, text))
    text = _PERHAPS.sub(lambda found: MASK if _mixed(found[0]) else found[0], text)
    return _without_values(text) if _TELLING.search(text) else text


def is_path(value: str) -> bool:
    """Return whether it is a path of words from a root, a home or this folder."""
    if re.match(r"~?/|\.{1,2}/|[A-Za-z]:[/\\]", value) is None:
        return False
    parts = [part for part in re.split(r"[/\\]", value) if part]
    return all(re.fullmatch(r"[\w.\-~: @]+", part) is not None and not _random(part) for part in parts)


def is_word(name: str, value: str) -> bool:
    """Return whether the value of a variable of that name is an ordinary word or number, which occurs in any text."""
    before, last = _last_words(name)
    word = value.lower()
    if word in _NOTHING or word in name.lower():
        return True
    plain = value.isdecimal() or re.fullmatch(r"[A-Za-z]+([-_ ][A-Za-z]+)*", value) is not None
    sure = last.removesuffix("s") in _SURE or (last == "key" and before in _BEFORE_KEYS)
    sure = sure or (last == "token" and before in _BEFORE_TOKENS)
    return plain and not sure and not _random(value)


def _last_words(name: str) -> tuple[str, str]:
    words = [word.lower() for word in _WORD.findall(name[-64:])]
    return (words[-2] if len(words) > 1 else "", words[-1]) if words else ("", "")


def _prefixed(found: re.Match[str]) -> str:
    body = found["body"]
    if found["prefix"] == "tml-":  # of Tinker, whose keys have no fixed length
        return found[0] if len(body) < 16 and body.islower() and body.replace("-", "").isalpha() else MASK
    return MASK if _random(body) else found[0]


def _random(body: str) -> bool:
    """Return whether it looks random: no word is as long, and no identifier changes kinds as often."""
    parts = re.split(r"[-_.=]", body)
    parts = [part for part in parts if not re.fullmatch(r"(?:[A-Z][a-z]+){2,}", part)]  # a class's name
    if any(len(part) >= 20 or (len(part) >= 16 and re.search(r"\d.*\d", part)) for part in parts):
        return True
    return any(len(part) >= 12 and _changes(part) >= 3 for part in parts) or (
        len(body) >= 20 and _changes("".join(parts)) >= 5
    )


def _changes(text: str) -> int:
    """Count changes between small letters, capital letters and digits; a capital begins a word."""
    kinds = "".join("d" if c.isdigit() else "U" if c.isupper() else "l" for c in text)
    return sum(one != two and one + two != "Ul" for one, two in itertools.pairwise(kinds))


def _mixed(value: str) -> bool:
    """Return whether letters and digits follow each other, or capitals follow small letters twice."""
    return re.search(r"[A-Za-z]\d|\d[A-Za-z]|[a-z][A-Z].*[a-z][A-Z]", value) is not None


def _without_values(text: str) -> str:
    """Mask the values that follow the names of secrets."""
    pieces, done, at = [], 0, 0
    while (pair := _PAIR.search(text, at)) is not None:
        group = "plain" if pair["quoted"] is None else "quoted"
        start, at = pair.start(group), pair.end()
        if _is_value(pair, pair[group]):
            pieces += [text[done:start], MASK]
            done = pair.end(group)
        else:
            at = start  # a value may be another name
    return "".join([*pieces, text[done:]])


def _is_value(found: re.Match[str], value: str) -> bool:
    """Return whether a value follows the name of a secret: any text but a placeholder, a call or nothing."""
    name, before = found["flag"] or found["name"], found.string[: found.start()][-1:]
    if not secret_name(name) or value == MASK:
        return False
    if before in ("?", "&", "#") and "=" in (found["join"] or ""):
        return True
    word = value.rstrip("`.:!?")
    if word.lower() in _NOTHING or _PLACEHOLDER.fullmatch(word) or "://" in word or _is_code(found, word):
        return False
    if found["flag"]:
        return not word.startswith("-")
    return name.lower() not in _DOUBTFUL or _random(word) or (len(word) >= 8 and _mixed(word))


def _is_code(found: re.Match[str], word: str) -> bool:
    """Return whether a value without quotes is too short for a secret, or is called or indexed."""
    if found["quoted"] is not None or found["gap"] == "=":
        return False
    return len(word) < 4 or found.string[found.end() : found.end() + 1] in ("(", "[")


SECRET = "rlkit.secret"  # noqa: S105  # the metadata key of fields made with rlkit.config.secret
_SHORTEST = 8  # shorter values of environment variables are words, not keys

_lock = threading.Lock()
_hidden: frozenset[str] = frozenset()


def hide(secret: str | None) -> None:
    """Make ``redact`` mask ``secret`` from now on, also in base64 or as part of a URL."""
    global _hidden  # noqa: PLW0603  # as the environment, it is the process's
    if secret and len(secret) >= 6:
        with _lock:
            _hidden |= {secret}


def redact(text: str) -> str:
    """Return ``text`` with every key in it masked.

    >>> redact("Authorization: Bearer abcdefghijkl, then more")
    'Authorization: Bearer ***, then more'
    >>> redact("curl https://example.org/v1?api_key=abc&n=3 --token 7f3k9x2m11, in /workspace")
    'curl https://example.org/v1?api_key=***&n=3 --token ***, in /workspace'
    """
    return redactor()(text)


def redactor() -> Callable[[str], str]:
    """Return ``redact`` with the current environment variables, for use on many texts."""
    known = _known(_environment() | _hidden)

    def clean(text: str) -> str:
        if known is not None:
            text = known.sub(MASK, text)
        return without_keys(text)

    return clean


def masked(value: object, name: str = "") -> Any:
    """Return ``value`` without secrets: those of settings with a telling name, and those recognised in texts.

    Args:
        value: anything; mappings, lists and tuples are looked through and copied as dicts and lists.
        name: its name, if it has one.

    It recognises the values of environment variables that are called a key, token, secret or password (also in
    base64, or as part of a URL; paths and plain words are not secrets), the keys of Tinker clients, the forms of
    well-known services' keys, and the value after such a name in a URL, a command, JSON or a line of text.

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
    """Yield the masked items of a list; in a command's arguments, what follows "--api-key" is a secret."""
    telling = False
    for each in values:
        flag = isinstance(each, str) and each.startswith("-")
        yield MASK if telling and isinstance(each, str) and not flag else _masked(each, name, clean)
        telling = flag and secret_name(each)


def _can_be_secret(value: object) -> bool:
    """Return whether it can be a secret: not empty, a flag, a float or a path."""
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
    """Return whether such a variable holds a path, a word or a name, which occur in any text and are not secrets."""
    if name in ("PWD", "OLDPWD") or value in _names():
        return True
    return is_word(name, value) or is_path(value) or _exists(value)


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _names() -> set[str]:
    """Return the names of the user and the machine."""
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
        # In base64 a string looks different at each of three offsets, and its first and last characters mix with the
        # characters next to it.
        for offset in range(3):
            text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            cut = text[(offset * 8 + 5) // 6 : -1]
            forms |= {cut, cut.translate(str.maketrans("+/", "-_"))}
    longest_first = sorted((form for form in forms if len(form) >= 6), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
