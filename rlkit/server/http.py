"""A service on a socket: HTTP/1.1, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import attrs

from rlkit.errors import BackendError
from rlkit.server.requests import ApiError, Response
from rlkit.server.service import Service

__all__ = ["Server"]

_HEAD_LIMIT = 64 * 2**10
_BODY_LIMIT = 256 * 2**20
_IDLE = 120.0  # seconds that a connection may be silent
_LARGE = 256 * 2**10  # bodies above it are read in another thread, so that short requests are not held up
_LEFT_OPEN = ("/client/config", "/telemetry")  # the SDK uses connections of their own for these, and forgets them
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    408: "Request Timeout",
}


class Server:
    """A service that listens. A context manager; ``close`` finishes what was accepted.

    Attributes:
        service: what answers.
        url: where it is.
        names: the base models that clients may name.
    """

    def __init__(self, service: Service, host: str, port: int, names: Sequence[str] = ()) -> None:
        self.service = service
        self.names = tuple(names)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlkit-serve", daemon=True)
        self._thread.start()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._closed = False
        try:
            self._server = asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result()
        except OSError as error:
            self._end_loop()
            raise BackendError(f"serve: can not listen on {host}:{port}: {error}") from error
        found = self._server.sockets[0].getsockname()
        self.url = f"http://[{found[0]}]:{found[1]}" if ":" in found[0] else f"http://{found[0]}:{found[1]}"

    def close(self) -> None:
        """Stops listening, finishes what was accepted, and frees the models. May be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self.service.close()
        asyncio.run_coroutine_threadsafe(self._drained(), self._loop).result()
        self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _listen(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._connected, host, port, limit=_HEAD_LIMIT, backlog=512)

    async def _stop(self) -> None:
        # asyncio loses connections that it is accepting when the server closes: from here on none is accepted, and
        # those in between get the time to arrive.
        for listening in self._server.sockets:
            with contextlib.suppress(NotImplementedError):
                self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0.02)
        self._server.close()
        for writer in self._connections.values():
            writer.close()

    async def _drained(self) -> None:
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=5.0)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # a callback of start_server is a task
        self._connections[task] = writer
        try:
            while not self._closed and await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone, or the server closes
        finally:
            del self._connections[task]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            head = await _read_head(reader)
            if head is None:
                return False
            body = await _read_body(head, reader, writer)
        except ApiError as error:
            await _write(writer, Response.error(error), keep=False)
            return False
        arguments = (head.method, head.path, head.headers, body)
        if len(body) > _LARGE:
            answer = await asyncio.to_thread(self.service.handle, *arguments)
        else:
            answer = await self.service.answer(*arguments)
        keep = head.headers.get("connection", "").lower() != "close" and not head.path.endswith(_LEFT_OPEN)
        await _write(writer, answer, keep=keep)
        return keep


@attrs.frozen
class _Head:
    method: str
    path: str
    headers: dict[str, str]


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Request line and headers; None where the client closed the connection."""
    try:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE)
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise ApiError(400, f"the request's headers are longer than {_HEAD_LIMIT} bytes") from error
    line, *lines = text.decode("latin-1").rstrip("\r\n").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise ApiError(400, "the request line is not one of HTTP/1.1")
    headers: dict[str, str] = {}
    for each in lines:
        name, colon, value = each.partition(":")
        if not colon:
            raise ApiError(400, "a header has no colon")
        headers[name.strip().lower()] = value.strip()
    if "origin" in headers:
        raise ApiError(403, "requests of web pages are refused")
    return _Head(parts[0], parts[1], headers)


async def _read_body(head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    if "transfer-encoding" in head.headers or head.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(400, "the body is encoded; expected it plain, with a content-length")
    length = head.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > _BODY_LIMIT:
        raise ApiError(400, f"content-length is {length!r}; expected at most {_BODY_LIMIT} bytes")
    if head.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await asyncio.wait_for(reader.readexactly(int(length)), _IDLE)


async def _write(writer: asyncio.StreamWriter, answer: Response, *, keep: bool) -> None:
    headers = {
        **answer.headers,
        "content-length": str(len(answer.body)),
        "connection": "keep-alive" if keep else "close",
    }
    lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body)  # at once: two packets would wait
    await writer.drain()
