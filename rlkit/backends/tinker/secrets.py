"""API keys stay out of logs, messages and reprs."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from typing import Any

from rlkit._keys import MASK
from rlkit._secrets import hide, redact

__all__ = ["clean", "hide", "last_warning", "redact", "watch_logs"]

_LOGGERS = ("tinker", "httpx", "httpcore")
_HEADERS = ("x-api-key", "authorization", "cf-access-client-secret")
_warned: tuple[float, str] | None = None


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
        response._content = masked  # noqa: SLF001  # it cannot be set otherwise
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
            headers[name] = MASK
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
    """Return what the SDK last warned of, such as a pause for capacity, unless that is longer ago than ``seconds``."""
    warning = _warned
    return warning[1] if warning is not None and time.monotonic() - warning[0] <= seconds else None
