"""An ASGI application on a socket that answers only who may use it: a listener with limits, and a guard."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import importlib
import math
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlkit._runtime import Resource, is_loopback
from rlkit._threads import DaemonExecutor, Threads
from rlkit.errors import BackendError

__all__ = ["Guard", "Handlers", "WebServer", "find_key", "is_key"]

Handlers: TypeAlias = Mapping[type[Exception], Callable[[Request, Any], Awaitable[Response]]]  # as starlette's

_HEAD_LIMIT = 64 * 2**10
_CONNECTIONS = 4096  # at a time, and fewer where a process may not have as many files open
_OTHER_FILES = 128  # open files of a process that are no connections
_WAITING = 1024  # connections that wait to be accepted
_AT_ONCE = 16  # and are accepted before others are ended to make room for them
_FIRST = 20.0  # seconds that a connection lasts on which no client was let in
_BODY = 120.0  # seconds for the rest of a request of a client that was let in
_IDLE = 120.0  # and until the next one
_CANCELLED = 2  # and for what is left to be done for a client that was disconnected when the server closed
_LET_IN = "rlkit.let_in"  # of an ASGI scope


class Guard:
    """Refuse web pages, foreign host names, strangers and large bodies, before a byte of a body is read. ASGI.

    Args:
        app: the application behind it.
        admit: called with each request; raises for a client that may not use the application, and returns whether the
            client may stay connected: False for what any client may ask, such as a health check.
        handlers: make the responses to exceptions of ``admit`` and to an ``HTTPException`` of the guard, as starlette's
            ``exception_handlers`` do. A body that grows above the limit raises one in the application.
        body_limit: the largest body, in bytes.
        own_host: refuse a Host header that does not name this machine. A web page whose owner lets its name resolve to
            this machine sends requests under that name, which a key or another machine's address would stop, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        admit: Callable[[Request], bool],
        handlers: Handlers,
        body_limit: int,
        own_host: bool,
    ) -> None:
        self._app, self._admit, self._limit, self._own_host = app, admit, body_limit, own_host
        self._guarded = ExceptionMiddleware(self._let_in, dict(handlers))  # writes the responses to exceptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, size = Request(scope), 0

        async def count() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._too_large()
            return message

        self._check_origin(request.headers)
        if self._admit(request):
            scope.get(_LET_IN, bool)()  # tells the server, if there is one
        self._check_body(request.headers)
        await self._app(scope, count, send)

    def _check_origin(self, headers: Headers) -> None:
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HTTPException(403, "requests of web pages are refused")
        if self._own_host and not _names_this_machine(headers.get("host", "localhost")):
            raise HTTPException(403, f"host is {headers['host'][:80]!r}; expected localhost or its address")

    def _check_body(self, headers: Headers) -> None:
        if headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "the body is compressed; expected an uncompressed one")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise HTTPException(400, f"content-length is {length[:80]!r}; expected a number")
        if len(length) > 18 or int(length) > self._limit:
            raise self._too_large()

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is too large; expected at most {self._limit} bytes")


def find_key(headers: Headers) -> str | None:
    """Return the API key, as x-api-key or as a bearer token; None where there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None) or None


def is_key(sent: str | None, key: str) -> bool:
    """Return whether a client sent this key; the time that it takes tells nothing of it."""
    return hmac.compare_digest((sent or "").encode(), key.encode())


def _names_this_machine(host: str) -> bool:
    name = host.strip().lower()
    return is_loopback(name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0])


class WebServer(Resource):
    """An application that listens, in a thread. A context manager.

    Connections on which the ``Guard`` let no client in end after 20 s, and make room for new ones, the oldest first.

    Args:
        app: an ASGI application.
        host: a name or address of this machine.
        port: 0: a free one.
        name: the name of the thread, and in errors.
        patience: seconds that running requests have when it closes; then their clients are disconnected.

    Attributes:
        url: its address, without a slash at the end.

    Raises:
        BackendError: it cannot listen there.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, name: str, patience: int) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_WAITING)
        except OSError as error:
            raise BackendError(f"{name}: cannot listen on {host}:{port}: {error}") from error
        address = self._socket.getsockname()
        self.url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
        self.connections = Connections(_most_connections(), patience)
        config = uvicorn.Config(
            app,
            http=cast("type[H11Protocol]", functools.partial(_Connection, self.connections)),
            ws="none",
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=_HEAD_LIMIT,
            backlog=_AT_ONCE,
            timeout_keep_alive=math.ceil(_IDLE),
            timeout_graceful_shutdown=patience + _CANCELLED,
        )
        self._server = _Listener(config)
        self._thread = threading.Thread(target=self._run, name=f"rlkit-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse new requests, without waiting for those in progress."""
        self.connections.closed = True
        self._server.should_exit = True

    def close(self) -> None:
        """Stop, and wait for the requests in progress. May be called twice."""
        self.stop()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        # A template takes its time, and cannot be stopped: closing does not wait for it, as for the default's threads.
        threads = Threads(f"{self._thread.name}-work", most=min(32, (os.cpu_count() or 1) + 4))
        asyncio.get_running_loop().set_default_executor(DaemonExecutor(threads))
        await self._server.serve(sockets=[self._socket])


class _Listener(uvicorn.Server):
    """Listens with a long backlog; asyncio has the number for that, and for how many it accepts in a row."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_WAITING)


def _most_connections() -> int:
    """Return how many connections there may be: fewer if this process may not have as many files open; at least 16."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # not a Unix
        return _CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _CONNECTIONS if files < 0 else max(16, min(_CONNECTIONS, files - _OTHER_FILES))


class Connections:
    """The connections of a server: those of clients that were let in, and strangers."""

    def __init__(self, most: int, patience: float) -> None:
        self.most, self.patience = most, patience
        self.closed = False
        self.clients: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}  # the oldest first

    def add(self, connection: _Connection) -> None:
        """Add a stranger. If the limit is reached, close the oldest one: a client with a key shows it at once."""
        self.strangers[connection] = None
        while len(self.strangers) > 1 and len(self.strangers) + len(self.clients) > self.most:
            (oldest := next(iter(self.strangers))).end()
            del self.strangers[oldest]

    def remove(self, connection: _Connection) -> None:
        self.strangers.pop(connection, None)
        self.clients.discard(connection)


class _Connection(H11Protocol):
    """HTTP/1.1 with limits of time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all, self._service = connections, self.app
        self.app = self._serve
        self._limit: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP has these alone
        super().connection_made(transport)
        # Head and body are two packets, and the second would wait until the first is acknowledged.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._all.add(self)
        self._end_in(_FIRST)
        if self._all.closed:  # it was being accepted when the listener closed
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_in(None)
        self._all.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self in self._all.clients and not self.cycle.more_body and not self.cycle.response_complete:
            self._end_in(None)  # an answer takes as long as it takes

    def on_response_complete(self) -> None:
        if self in self._all.clients:
            self._end_in(_IDLE)
        super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_in(self._all.patience)

    def end(self) -> None:
        """Close the connection at once; as the server closes, what is being answered ends with it."""
        self._end_in(None)
        self.transport.abort()
        if self._all.closed and self._answering is not None:
            self._answering.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, closing = self._service, {"connection": "close"}
        if self._all.closed:
            answer = PlainTextResponse("this server is closing", 503, closing)
        elif self not in self._all.clients and len(self._all.clients) >= self._all.most:
            answer = PlainTextResponse(f"this server has {self._all.most} connections already", 503, closing)
        self._answering = asyncio.current_task()
        try:
            await answer({**scope, _LET_IN: self._let_in}, receive, send)
        except asyncio.CancelledError:
            if not self._all.closed:
                raise

    def _let_in(self) -> None:
        if self in self._all.strangers:
            del self._all.strangers[self]
            self._all.clients.add(self)
        if self in self._all.clients:
            self._end_in(_BODY if self.cycle.more_body else None)

    def _end_in(self, seconds: float | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None if seconds is None else self.loop.call_later(seconds, self.end)
