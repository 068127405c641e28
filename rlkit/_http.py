"""An ASGI application on a socket: uvicorn, in its own thread, with limits for clients that show no key."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import threading
from typing import Any, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlkit._hosts import LET_IN, most_connections
from rlkit._runtime import Resource
from rlkit._threads import DaemonExecutor, Threads
from rlkit.errors import BackendError

__all__ = ["Listener"]

_HEAD_LIMIT = 64 * 2**10
_CONNECTIONS = 4096  # at a time, and fewer where a process may not have as many files open
_FIRST = 20.0  # seconds that a connection lasts on which no client was let in
_BODY = 120.0  # seconds for the rest of a request of a client that was let in
_IDLE = 120.0  # and until the next one


class Listener(Resource):
    """An application that listens. A context manager.

    Args:
        app: an ASGI application. It calls ``let_in(scope)`` before it reads the body of a client that may use it;
            connections on which it has not yet done so end after 20 s, and make room for new ones, the oldest first.
        host: a name or address of this machine.
        port: 0: a free one.
        name: the name of the thread, and in errors.
        patience: seconds that running requests have when it closes.

    Attributes:
        url: its address, without a slash at the end.

    Raises:
        BackendError: it cannot listen there.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, name: str, patience: int) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise BackendError(f"{name}: cannot listen on {host}:{port}: {error}") from error
        address = self._socket.getsockname()
        self.url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
        self.connections = Connections(most_connections(_CONNECTIONS))
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
            timeout_keep_alive=math.ceil(_IDLE),
            timeout_graceful_shutdown=patience,
        )
        self._server = uvicorn.Server(config)
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


class Connections:
    """The connections of a listener: those of clients that were let in, and strangers."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.closed = False
        self.let_in: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}  # the oldest first

    def add(self, connection: _Connection) -> None:
        """Add a stranger. If the limit is reached, close the oldest one: a client with a key shows it at once."""
        self.strangers[connection] = None
        while len(self.strangers) > 1 and len(self.strangers) + len(self.let_in) > self.most:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.end()

    def remove(self, connection: _Connection) -> None:
        self.strangers.pop(connection, None)
        self.let_in.discard(connection)


class _Connection(H11Protocol):
    """HTTP/1.1 with limits of time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = connections
        self._service: ASGIApp = self.app
        self.app = self._serve
        self._limit: asyncio.TimerHandle | None = None

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
        if self._is_let_in and not self.cycle.more_body and not self.cycle.response_complete:
            self._end_in(None)  # an answer takes as long as it takes

    def on_response_complete(self) -> None:
        if self._is_let_in:
            self._end_in(_IDLE)
        super().on_response_complete()

    def end(self) -> None:
        """Close the connection at once."""
        self._end_in(None)
        self.transport.abort()

    @property
    def _is_let_in(self) -> bool:
        return self in self._all.let_in

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, closing = self._service, {"connection": "close"}
        if self._all.closed:
            answer = PlainTextResponse("this server is closing", 503, closing)
        elif not self._is_let_in and len(self._all.let_in) >= self._all.most:
            answer = PlainTextResponse(f"this server has {self._all.most} connections already", 503, closing)
        await answer({**scope, LET_IN: self._let_in}, receive, send)

    def _let_in(self) -> None:
        if self in self._all.strangers:
            del self._all.strangers[self]
            self._all.let_in.add(self)
        if self._is_let_in:
            self._end_in(_BODY if self.cycle.more_body else None)

    def _end_in(self, seconds: float | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None if seconds is None else self.loop.call_later(seconds, self.end)
