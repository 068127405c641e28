"""A client's request as ASGI gives it: where it may come from, whose it is, and its JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import NoReturn

from starlette.datastructures import Headers

from rlkit._hosts import is_own_name
from rlkit.gateway.streaming import Receive
from rlkit.gateway.types import GatewayError

__all__ = ["Gone", "check_origin", "key_of", "read_object"]

_LARGE = 256 * 2**10  # bodies above it are parsed in another thread, so that short requests are not held up
_LINGER = 2.0  # seconds in which a refused client may go on sending, so that it reads the answer


class Gone(Exception):
    """The client closed the connection."""


def check_origin(headers: Headers, *, loopback: bool) -> None:
    """Raise GatewayError for a request of a web page.

    Args:
        headers: of the request.
        loopback: the service listens on this machine alone. A page whose owner has its name resolve to this machine
            is given away by the name that it asks for.
    """
    if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise GatewayError(403, "requests of web pages are refused")
    if loopback and not is_own_name(headers.get("host")):
        raise GatewayError(403, f"host is {headers['host'][:80]!r}; expected localhost or its address")


def key_of(headers: Headers) -> str | None:
    """Return the API key, as OpenAI's clients or Anthropic's send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None) or None


async def read_object(headers: Headers, receive: Receive, limit: int) -> Mapping[str, object]:
    """Return the JSON object of a request. Raises GatewayError, or Gone."""
    if headers.get("content-encoding", "identity") != "identity":
        raise GatewayError(415, "the body is compressed; expected it plain")
    length = headers.get("content-length", "0")
    body, more = bytearray(), True
    too_long = length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit)
    while more and not too_long:
        part, more = await _next(receive)
        body += part
        too_long = len(body) > limit
    if too_long:
        del body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while more:
                    _, more = await _next(receive)
        raise GatewayError(413, f"the body is too large; expected at most {limit} bytes", code="request_too_large")
    raw = bytes(body)
    return await asyncio.to_thread(_object, raw) if len(raw) > _LARGE else _object(raw)


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Gone
    return message.get("body", b""), message.get("more_body", False)


def _object(raw: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(raw, parse_constant=_not_json)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode-escape").decode()
        problem = f"the body has {half}, half of a surrogate pair, which is no text"
        raise GatewayError(400, problem, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise GatewayError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
