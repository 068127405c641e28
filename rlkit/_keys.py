"""What keys and passwords look like: the names that they stand behind, the forms that services give them."""

from __future__ import annotations

import functools
import itertools
import re

__all__ = ["MASK", "is_path", "is_word", "secret_name", "without_keys"]

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
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
# In a text, what stands behind such a name may be prose or code. Behind these it is a secret, whatever it looks like.
_STRONG = {"password", "passwd", "passphrase", "credential", "apikey", "authorization", "authorisation"}
_STRONG_BEHIND = {
    "key": {"api", "access", "private", "secret", "signing", "encryption"},
    "token": {"access", "refresh", "auth", "api", "bearer", "session", "bot", "hf", "github", "gitlab", "personal"},
}
_ORDINARY = {
    *("true", "false", "yes", "no", "on", "off", "none", "null", "nan", "undefined", "default", "auto", "any", "str"),
    *("string", "int", "bool", "bytes", "float", "optional", "object", "required", "incorrect", "invalid", "missing"),
    *("wrong", "correct", "changed", "expired", "protected", "unknown", "unset", "empty", "disabled", "enabled"),
    *("localhost", "anonymous", "public", "private", "production", "development", "kerberos", "basic", "digest"),
    *("include", "option", "argument", "instead", "bearer", "keyring", "keychain", "example", "password", "passwd"),
    *("secret", "token", "username", "value", "await", "self", "configuration", "requires", "replace", "creds"),
}

# What services put in front of their keys: then comes what looks drawn at random (``_random``).
_PREFIXES = (
    r"sk[-_]|pk[-_]|rk_|hf_|api_org_|xai-|gsk_|r8_|gh[pousr]_|github_pat_|gl(?:pat|dt|ptt|rt|soat|agent)-|npm_|pypi-"
    r"|wandb_v\d_|xox[abeprs]-|xapp-|nvapi-|csk-|fw_|tgp_v\d_|lin_(?:api|oauth)_|do[opr]_v\d_|pplx-|lsv2_(?:pt|sk)_"
    r"|tvly-|e2b_|pcsk_|ntn_|secret_|shp(?:at|ca|pa|ss)_|sq0(?:atp|csp)-|whsec_|hv[sb]\.|dp\.(?:pt|st)\.|sbp_|figd_"
    r"|PMAK-|sntry[su]_|NRAK-|glsa_|glc_|dckr_pat_|ya29\.|GOCSPX-|SG\.|key-|tml-|dapi"
)
_PREFIXED = re.compile(rf"(?<![A-Za-z0-9_])(?P<prefix>{_PREFIXES})(?P<body>[A-Za-z0-9][A-Za-z0-9_.\-]{{4,}}={{0,2}})")
# What needs no second look.
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
# $KEY, ***, ..., .key, Bearer {token}, <key>, and the types of annotations
_CODE = re.compile(
    r"\$[A-Z_][A-Z0-9_]*$|\W+$|\.\.\.|\.[a-z]|(?:Bearer |Basic |Token )?[<{%].*[>})]|[A-Za-z_]*[a-z][A-Z][A-Za-z_]*$"
)
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")  # settings.api_key


@functools.lru_cache(maxsize=4096)
def secret_name(name: str) -> bool:
    """Whether a setting of that name holds a secret.

    >>> [secret_name(n) for n in ("api_key", "WANDB_API_KEY", "hf_token", "max_tokens", "eos_token", "tokenizer")]
    [True, True, True, False, False, False]
    """
    before, last = _last_words(name)
    if last.removesuffix("s") in _SECRET or (last == "keys" and before in ("api", "access", "private", "secret")):
        return True
    return last in _HARMLESS and before not in _HARMLESS[last]


def without_keys(text: str) -> str:
    """``text`` with whatever looks like a key masked.

    >>> without_keys("sk-proj-4fKq8Wm2Zt7RbX1c in /workspace, password: hunter2")
    '*** in /workspace, password: ***'
    """
    text = _PREFIXED.sub(_prefixed, _SHAPES.sub(MASK, text))
    text = _PERHAPS.sub(lambda found: MASK if _mixed(found[0]) else found[0], text)
    return _without_values(text) if _TELLING.search(text) else text


def is_path(value: str) -> bool:
    """Whether it is written as a path from a root, home or this folder is, in words."""
    if re.match(r"~?/|\.{1,2}/|[A-Za-z]:[/\\]", value) is None:
        return False
    parts = [part for part in re.split(r"[/\\]", value) if part]
    return all(re.fullmatch(r"[\w.\-~: @]+", part) is not None and not _random(part) for part in parts)


def is_word(name: str, value: str) -> bool:
    """Whether the value of a setting of that name is an ordinary word or number, which occurs in any text."""
    if value.lower() in _ORDINARY:
        return True
    plain = value.isdecimal() or re.fullmatch(r"[A-Za-z]+([-_ ][A-Za-z]+)*", value) is not None
    return plain and not (_strong(name) or name.lower() == "secret")


def _last_words(name: str) -> tuple[str, str]:
    words = [word.lower() for word in _WORD.findall(name[-64:])]
    return (words[-2] if len(words) > 1 else "", words[-1]) if words else ("", "")


def _prefixed(found: re.Match[str]) -> str:
    body = found["body"]
    if found["prefix"] == "tml-":  # of Tinker, whose keys have no fixed length
        return found[0] if len(body) < 16 and body.islower() and body.replace("-", "").isalpha() else MASK
    return MASK if _random(body) else found[0]


def _random(body: str) -> bool:
    """Whether it looks drawn: no word has 20 letters, and no identifier changes between letters and digits so often."""
    parts = re.split(r"[-_.=]", body)
    parts = [part for part in parts if not re.fullmatch(r"(?:[A-Z][a-z]+){2,}", part)]  # a class's name
    if any(len(part) >= 20 or (len(part) >= 16 and re.search(r"\d.*\d", part)) for part in parts):
        return True
    return any(len(part) >= 12 and _changes(part) >= 3 for part in parts) or (
        len(body) >= 20 and _changes("".join(parts)) >= 5
    )


def _changes(text: str) -> int:
    """How often a small letter, a capital one and a digit follow upon another kind; a capital begins a word."""
    kinds = "".join("d" if c.isdigit() else "U" if c.isupper() else "l" for c in text)
    return sum(one != two and one + two != "Ul" for one, two in itertools.pairwise(kinds))


def _mixed(value: str) -> bool:
    """Whether letters and digits follow upon each other, or capital letters upon small ones twice."""
    return re.search(r"[A-Za-z]\d|\d[A-Za-z]|[a-z][A-Z].*[a-z][A-Z]", value) is not None


def _strong(name: str) -> bool:
    before, last = _last_words(name)
    last = last.removesuffix("s")
    return last in _STRONG or before in _STRONG_BEHIND.get(last, ()) or (last == "secret" and before != "")


def _without_values(text: str) -> str:
    """Without what stands behind telling names."""
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
    """Whether what stands behind a telling name is a value, not prose or code."""
    name, join, quoted = found["flag"] or found["name"], found["join"] or "", found["quoted"] is not None
    if not secret_name(name) or value == MASK:
        return False
    if "=" in join and found.string[: found.start()][-1:] in ("?", "&", "#"):
        return True
    word, follows = value.rstrip("`.:!?"), found.string[found.end() : found.end() + 1]
    if _is_code(word, follows, quoted) or (secret_name(word) and _last_words(name)[1] not in _STRONG):
        return False
    letters = re.fullmatch(r"[A-Za-z_]+", word) is not None
    if found["flag"]:  # not --key KEY, which is of a usage, nor "with --key and more"
        return not value.startswith("-") and not (
            letters and found["gap"].isspace() and (word.isupper() or len(word) < 6)
        )
    if not _strong(name):
        json = join.lstrip("\\")[:1] in ('"', "'") and name.lower().endswith("secret")
        return (_random(word) and not letters) or (len(word) >= 8 and (_mixed(word) or json))
    if quoted or not letters:
        return len(word) >= 4
    if "=" in join:
        return len(word) >= 4 and not (join.endswith(" ") and "_" in word)
    return len(word) >= 6 and follows in ("", "\n", "\r", ",", ";", "}", "]", ")", '"', "'")


def _is_code(word: str, follows: str, quoted: bool) -> bool:
    """Whether it is an ordinary word, a placeholder, an address, or code that stands for a value."""
    if word.lower() in _ORDINARY or "://" in word or (_CODE.match(word) and not _random(word)):
        return True
    chain = _CHAIN.fullmatch(word) is not None and not _random(word)
    if follows in ("(", "[") and not quoted and (chain or re.fullmatch(r"[A-Za-z_]\w*", word)):
        return True
    return (chain and not quoted) or (
        re.fullmatch(r"[A-Za-z_]+", word) is not None and not quoted and secret_name(word)
    )
