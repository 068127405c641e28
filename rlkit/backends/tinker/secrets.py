"""API keys stay out of logs, messages and reprs."""

from __future__ import annotations

import base64
import logging
import re
import threading
import time
import traceback
import urllib.parse
from typing import Any

__all__ = ["clean", "hide", "last_warning", "redact", "watch_logs"]

_LOGGERS = ("tinker", "httpx", "httpcore")
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
    """Masks keys in the arguments and messages of a foreign error and of its causes, in place."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if any(isinstance(x, str) and redact(x) != x for x in current.args):
            current.args = tuple(redact(x) if isinstance(x, str) else x for x in current.args)
        message = getattr(current, "message", None)
        if isinstance(message, str) and redact(message) != message:
            current.message = redact(message)  # type: ignore[attr-defined]
        current = current.__cause__ or current.__context__


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
            record.exc_text = redact("".join(traceback.format_exception(*record.exc_info))).rstrip()
        if record.levelno >= logging.WARNING and record.name.partition(".")[0] == "tinker":
            global _warned  # noqa: PLW0603  # one for the process, as the SDK's loggers are
            _warned = (time.monotonic(), masked)
        return True


_filter = _Redact()


def watch_logs() -> None:
    """Puts the filter on every logger of the SDK and of its HTTP client that exists; may be called again."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    for name in {*_LOGGERS, *names}:
        logger: Any = logging.getLogger(name)
        if _filter not in logger.filters:
            logger.addFilter(_filter)


def last_warning(seconds: float) -> str | None:
    """What the SDK last warned of, such as a pause for capacity, unless that is longer ago than ``seconds``."""
    found = _warned
    return found[1] if found is not None and time.monotonic() - found[0] <= seconds else None
