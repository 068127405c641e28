"""API keys stay out of logs, messages and reprs."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import threading
import time
import traceback
import urllib.parse
from typing import Any

__all__ = ["clean", "hide", "last_warning", "redact", "watch_logs"]

_LOGGERS = ("tinker", "httpx", "httpcore")
_HEADERS = ("x-api-key", "authorization", "cf-access-client-secret")
_MASK = "***"
# What a key looks like, wherever it comes from: the service's own prefix, a JWT, and the values of headers that carry
# one.
_SHAPES = re.compile(
    r"tml-[A-Za-z0-9_.\-]+"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_.\-]+"
    r"|(?i:(?<=bearer )[A-Za-z0-9_.\-=+/]{8,})"
    r"|(?i:(?<=x-api-key: )\S+)"
)
_lock = threading.Lock()
_hidden: set[str] = set()
_warned: tuple[float, str] | None = None


def hide(secret: str | None) -> None:
    """Has ``redact`` mask ``secret`` from now on, also where it is written in base64 or as part of a URL."""
    if not secret or len(secret) < 6:
        return
    raw = secret.encode()
    forms = {secret, urllib.parse.quote(secret, safe=""), repr(secret)[1:-1]}
    # In base64 a string looks different at each of three offsets, and its first and last characters mix with what
    # stands beside it.
    for offset in range(3):
        text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
        for form in (text, text.translate(str.maketrans("+/", "-_"))):
            forms.add(form[(offset * 8 + 5) // 6 : -1])
    with _lock:
        _hidden.update(form for form in forms if len(form) >= 6)


def redact(text: str) -> str:
    """``text`` with every key masked.

    >>> redact("X-API-Key: tml-abc123, next")
    'X-API-Key: ***, next'
    """
    with _lock:
        known = sorted(_hidden, key=len, reverse=True)
    for form in known:
        text = text.replace(form, _MASK)
    return _SHAPES.sub(_MASK, text)


def clean(error: BaseException) -> None:
    """Masks keys in a foreign error and all that are attached to it, in place: texts, requests and answers."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        left += [current.__cause__, current.__context__]
        if current.args != (args := _masked(current.args)):
            current.args = args
        for name in ("message", "body"):
            value = getattr(current, name, None)
            if value is not None and (masked := _masked(value)) != value:
                with contextlib.suppress(AttributeError):
                    setattr(current, name, masked)
        response = getattr(current, "response", None)
        _clean_headers(current)
        _clean_headers(response)
        if response is not None:
            _clean_content(response)


def _clean_content(response: Any) -> None:
    """Of an answer that was read, and of the request that a redirect would have led to."""
    if getattr(response, "next_request", None) is not None:
        response.next_request = None
    content = getattr(response, "_content", None)
    if isinstance(content, bytes) and (masked := _masked(content)) != content:
        response._content = masked  # noqa: SLF001  # it can not be set otherwise
        vars(response).pop("_text", None)


def _masked(value: Any) -> Any:
    """``value`` with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, bytes):
        text = value.decode("latin-1")
        return redact(text).encode("latin-1")
    if isinstance(value, dict):
        return {_masked(k): _masked(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_masked(x) for x in value)
    return value


def _clean_headers(owner: Any) -> None:
    """Of an error's or an answer's request, which is not sent again."""
    try:
        headers = owner.request.headers
        names = [name for name, value in headers.items() if name in _HEADERS or redact(value) != value]
        for name in names:
            headers[name] = _MASK
    except (AttributeError, RuntimeError, TypeError):
        return  # it has none


class _Redact(logging.Filter):
    """Masks keys in a record's message, arguments and traceback, and remembers the SDK's last warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # a badly formatted record is shown by logging itself, without its arguments
            text, record.args = str(record.msg), ()
        masked = redact(text)
        if masked != text:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[1] is not None:
            clean(record.exc_info[1])
            record.exc_text = redact("".join(traceback.format_exception(*record.exc_info))).rstrip()
        if record.levelno >= logging.WARNING and record.name.partition(".")[0] == "tinker":
            global _warned  # noqa: PLW0603  # one for the process, as the SDK's loggers are
            _warned = (time.monotonic(), masked)
        return True


_filter = _Redact()


def watch_logs() -> None:
    """Masks keys in what the SDK and its HTTP client log, from now on; may be called again.

    Their loggers get a filter; those that are made later are met where records are made.
    """
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    for name in {*_LOGGERS, *names}:
        logger: Any = logging.getLogger(name)
        if _filter not in logger.filters:
            logger.addFilter(_filter)
    make = logging.getLogRecordFactory()
    if getattr(make, "rlkit_redacts", False):
        return

    def masking(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.name.partition(".")[0] in _LOGGERS:
            _filter.filter(record)
        return record

    masking.rlkit_redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(masking)


def last_warning(seconds: float) -> str | None:
    """What the SDK last warned of, such as a pause for capacity, unless that is longer ago than ``seconds``."""
    found = _warned
    return found[1] if found is not None and time.monotonic() - found[0] <= seconds else None
