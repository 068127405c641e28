"""A service on a socket: HTTP/1.1, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from http import HTTPStatus

import attrs

from rlkit._hosts import is_own_name, most_connections
from rlkit._resource import Resource
from rlkit.errors import BackendError
from rlkit.server.requests import ApiError, Response
from rlkit.server.service import Service

__all__ = ["Server"]

_HEAD_LIMIT = 64 * 2**10
_BODY_LIMIT = 256 * 2**20
_FIRST_LIMIT = 64 * 2**20  # and while nobody has a session
_READING_LIMIT = 512 * 2**20  # of all bodies at a time
_CONNECTIONS = 4096  # at a time, and fewer where a process may not have as many files open
_IDLE = 120.0  # seconds that a connection may be silent
_FIRST = 20.0  # and before its first request
_LINGER = 1.0  # seconds in which a refused client may go on sending, so that it reads the answer
_LARGE = 256 * 2**10  # bodies above it are read in another thread, so that short requests are not held up
_LEFT_OPEN = ("/client/config", "/telemetry")  # the SDK uses connections of their own for these, and forgets them


class Server(Resource):
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
        self._reading = 0  # bytes of the bodies that are held
        self._most = most_connections(_CONNECTIONS)
        try:
            self._server = asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result()
        except OSError as error:
            self._end_loop()
            raise BackendError(f"serve: cannot listen on {host}:{port}: {error}") from error
        address = self._server.sockets[0].getsockname()
        self.url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"

    def close(self) -> None:
        """Stop listening, finish what was accepted, and free the models. May be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self.service.close()
        asyncio.run_coroutine_threadsafe(self._drained(), self._loop).result()
        self._end_loop()

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
        full, idle = len(self._connections) >= self._most, _FIRST
        self._connections[task] = writer
        try:
            if full:
                await _refuse(ApiError(503, f"this server has {self._most} connections already"), reader, writer)
            while not full and not self._closed and await self._exchange(reader, writer, idle):
                idle = _IDLE
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone, or the server closes
        finally:
            del self._connections[task]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: float) -> bool:
        """One request and its answer; whether another may follow. Nothing of a body is read before it is let in."""
        size = 0
        try:
            head = await _read_head(reader, idle)
            if head is None:
                return False
            self._admit(head)
            size = self._size(head)
            self._reading += size
            body = await _read_body(head, size, reader, writer)
            answer = await self._answered(head, body)
            del body
        except ApiError as error:
            await _refuse(error, reader, writer)
            return False
        finally:
            self._reading -= size
        keep = head.headers.get("connection", "").lower() != "close" and not head.path.endswith(_LEFT_OPEN)
        await _write(writer, answer, keep=keep)
        return keep

    def _admit(self, head: _Head) -> None:
        """Raise ApiError for a request of a web page, or without the key.

        Without a key everybody on this machine is let in, and so would be a page whose name its owner had resolve to
        this machine: the name it asks for gives it away.
        """
        if "origin" in head.headers or head.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "requests of web pages are refused")
        self.service.admit(head.headers, head.path)
        if not self.service.has_keys and not is_own_name(head.headers.get("host")):
            raise ApiError(403, f"host is {head.headers['host']!r}; without a key, expected localhost or its address")

    def _size(self, head: _Head) -> int:
        """Bytes of the body. Raises ApiError for more than it may have."""
        if "transfer-encoding" in head.headers or head.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(400, "the body is encoded; expected it plain, with a content-length")
        length = head.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise ApiError(400, f"content-length is {length[:40]!r}; expected a number of bytes")
        size, limit = int(length), _BODY_LIMIT if self.service.in_use else _FIRST_LIMIT
        if size > limit:
            raise ApiError(413, f"the body has {size} bytes; expected at most {limit}")
        if self._reading + size > _READING_LIMIT:
            raise ApiError(503, "this server is reading as much as it can; try again")
        return size

    async def _answered(self, head: _Head, body: bytes) -> Response:
        arguments = (head.method, head.path, head.headers, body)
        if len(body) > _LARGE:
            return await asyncio.to_thread(self.service.handle, *arguments)
        return await self.service.answer(*arguments)


@attrs.frozen
class _Head:
    method: str
    path: str
    headers: dict[str, str]


async def _read_head(reader: asyncio.StreamReader, idle: float) -> _Head | None:
    """Request line and headers; None where the client closed the connection."""
    try:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), idle)
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
    return _Head(parts[0], parts[1], headers)


async def _read_body(head: _Head, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    if head.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await asyncio.wait_for(reader.readexactly(size), _IDLE)


async def _refuse(error: ApiError, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers, and throws away for a moment what is still sent: closing at once could lose the answer on its way."""
    await _write(writer, Response.error(error), keep=False)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(_LINGER):
            while await reader.read(_HEAD_LIMIT):
                pass


async def _write(writer: asyncio.StreamWriter, answer: Response, *, keep: bool) -> None:
    size = len(answer.body) if answer.file is None else answer.file.stat().st_size
    headers = {**answer.headers, "content-length": str(size), "connection": "keep-alive" if keep else "close"}
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body)  # at once: two packets would wait
    await writer.drain()
    if answer.file is not None:
        with answer.file.open("rb") as file:
            await asyncio.get_running_loop().sendfile(writer.transport, file)
