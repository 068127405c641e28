"""Server-sent events over an answer that is sampled as a whole.

A sampler returns completions when they are done, not token by token. So a stream is written from the finished answer,
in several parts, and until it is there the client is sent comments, which every reader of such streams skips: proxies
and clients do not take the connection for a dead one. An answer that comes soon, and any error that comes before, is
told by the status of the response; an error after the first comment is told in the stream, in the dialect's form.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from rlkit.gateway.dialects.call import Event

__all__ = ["begin", "dumps", "encode", "gone", "waiting", "write"]

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_SOON = 1.0  # seconds in which an answer decides about the status
_SILENCE = 5.0  # seconds between comments
_CHUNK = 2**16  # bytes that are sent at once, so that a client that does not read holds the stream up


def dumps(value: object) -> bytes:
    """Return strict JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can name: a policy may have written it so
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def encode(events: Iterable[Event]) -> Iterable[bytes]:
    r"""Yield the bytes of events, many at a time.

    >>> b"".join(encode([("ping", {"type": "ping"}), (None, "[DONE]")]))
    b'event: ping\ndata: {"type":"ping"}\n\ndata: [DONE]\n\n'
    """
    buffer = bytearray()
    for name, data in events:
        if name is not None:
            buffer += b"event: " + name.encode() + b"\n"
        buffer += b"data: " + (data.encode() if isinstance(data, str) else dumps(data)) + b"\n\n"
        if len(buffer) > _CHUNK:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def waiting(answer: asyncio.Future[Any], send: Send) -> bool:
    """Wait for an answer; whether the stream was begun, because it took its time."""
    await asyncio.wait([answer], timeout=_SOON)
    if answer.done():
        return False
    await begin(send)
    while not answer.done():
        await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
        await asyncio.wait([answer], timeout=_SILENCE)
    return True


async def begin(send: Send) -> bool:
    """Tell the status of a stream; True."""
    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
    return True


async def write(send: Send, first: bytes, chunks: Iterable[bytes]) -> None:
    """Send what there is, and the end of a stream."""
    for chunk in (first, *chunks):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
