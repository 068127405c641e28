"""A gateway on a socket: uvicorn, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import uvicorn

from rlkit._hosts import is_loopback, most_connections
from rlkit._resource import Resource
from rlkit.errors import BackendError
from rlkit.gateway.app import app
from rlkit.gateway.types import Service

__all__ = ["Server"]

_CONNECTIONS = 4096  # at a time, and fewer where a process may not have as many files open
_PATIENCE = 2  # seconds that running requests have when the server closes


class Server(Resource):
    """A gateway that listens. A context manager.

    Args:
        service: lets clients in and answers them.
        host: a name or address of this machine.
        port: 0: a free one.

    Attributes:
        url: where it is, without a slash at the end.

    Raises:
        BackendError: it cannot listen there.
    """

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise BackendError(f"gateway: cannot listen on {host}:{port}: {error}") from error
        address = self._socket.getsockname()
        self.url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
        self._app = app(service, loopback=is_loopback(host))
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=most_connections(_CONNECTIONS),
            timeout_keep_alive=120,
            timeout_graceful_shutdown=_PATIENCE,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="rlkit-gateway", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; clients that wait for an answer are told that the gateway was closed. May be called twice."""
        self._app.end()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._server.serve(sockets=[self._socket]))
