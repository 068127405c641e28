"""What listens for the gateway and for the Tinker API: how long and how many connections last that show no key."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.parse

import pytest

import rlkit

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from rlkit._hosts import let_in
from rlkit._http import Listener

KEY = "tml-right-key-1"
HALVES = {
    "nothing": b"",
    "half a request line": b"GET /he",
    "half of the headers": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: ",
    "a body without a key": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    "a part of a body without a key": b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n",
    "a wrong key": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-wrong-key-1\r\n\r\n",
    "what nobody needs a key for": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.fixture(params=["gateway", "Tinker API"])
def opened(request):
    """``opened()`` is one of the two, with a key, as (its listener, a path that is answered to whoever has it)."""
    with contextlib.ExitStack() as stack:

        def make():
            if request.param == "gateway":
                from rlkit.gateway import Gateway

                sampler = stack.enter_context(rlkit.connect("toy", seed=0)).sampler().result()
                gateway = stack.enter_context(Gateway(sampler, open=True, key=KEY))
                assert gateway.url
                return gateway._server, "/v1/models"
            pytest.importorskip("tinker")
            from rlkit.server import ExactModels, serve

            server = stack.enter_context(serve(ExactModels(), names=("toy",), key=KEY))
            return server._listener, "/api/v1/healthz"

        yield make


def connected(listener):
    address = urllib.parse.urlsplit(listener.url)
    return socket.create_connection((address.hostname, address.port), timeout=10)


def asking(listener, path, connection=None):
    """The status that a client with the key gets, and its connection, which stays open."""
    address = urllib.parse.urlsplit(listener.url)
    connection = connection or http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", path, headers={"x-api-key": KEY})
    answer = connection.getresponse()
    answer.read()
    return answer.status, connection


def ended(connection):
    """Wait until the other side has closed."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    connection.close()
    return True


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_strangers_are_closed_in_time(opened, monkeypatch):
    """Whatever they send without the key; who has shown it stays, and sends a body within a time of its own."""
    listener, path = opened()
    status, known = asking(listener, path)
    assert status == 200
    monkeypatch.setattr("rlkit._http._BODY", 0.2)
    slow = connected(listener)
    post = "/v1/completions" if path == "/v1/models" else "/api/v1/optim_step"
    slow.sendall(f"POST {post} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-length: 9\r\n\r\n{{".encode())
    assert ended(slow)
    monkeypatch.setattr("rlkit._http._FIRST", 0.2)
    silent = {what: connected(listener) for what in HALVES}
    for what, connection in silent.items():
        with contextlib.suppress(OSError):  # it is closed already
            connection.sendall(HALVES[what])
    assert all(ended(connection) for connection in silent.values())  # or its timeout is raised
    assert asking(listener, path, known)[0] == 200
    known.close()


def test_answers_leave_at_once(opened):
    """An accepted connection has TCP_NODELAY, so that a body does not wait until its head is acknowledged."""
    listener, path = opened()
    status, known = asking(listener, path)
    with contextlib.closing(known):
        assert status == 200
        (connection,) = listener.connections.let_in
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_clients_with_the_key_come_first(opened, monkeypatch):
    """However many silent connections there are."""
    monkeypatch.setattr("rlkit._http._CONNECTIONS", 16)
    listener, path = opened()
    for halves in (list(HALVES.values()) * 8, [b""] * 40):
        silent = [connected(listener) for _ in halves]
        for connection, half in zip(silent, halves, strict=True):
            with contextlib.suppress(OSError):  # it had to leave
                connection.sendall(half)
        status, known = asking(listener, path)
        assert status == 200
        assert len(listener.connections.strangers) + len(listener.connections.let_in) <= 16
        for connection in (*silent, known):
            connection.close()
        until(lambda: not listener.connections.strangers and not listener.connections.let_in)


def test_one_too_many_is_told_so(opened, monkeypatch):
    """As one goes, another may come."""
    monkeypatch.setattr("rlkit._http._CONNECTIONS", 16)
    listener, path = opened()
    known = [asking(listener, path)[1] for _ in range(16)]
    silent = [connected(listener) for _ in range(5)]
    assert asking(listener, path)[0] == 503
    known.pop().close()
    until(lambda: len(listener.connections.let_in) == 15)
    status, connection = asking(listener, path)
    assert status == 200
    for each in (connection, *known, *silent):
        each.close()


def test_an_answer_takes_as_long_as_it_takes(monkeypatch):
    """Only a client's own silence is limited, before a request and between two."""
    for name in ("_BODY", "_IDLE"):
        monkeypatch.setattr(f"rlkit._http.{name}", 0.2)
    ready = threading.Event()

    async def app(scope, receive, send):
        import asyncio

        let_in(scope)
        assert (await receive())["body"] == b"{}"
        while not ready.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with Listener(app, "127.0.0.1", 0, name="test", patience=1) as listener, connected(listener) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        time.sleep(0.5)
        ready.set()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert ended(connection)  # no second request


def test_closing_ends_every_connection(opened):
    """Also one that is just arriving; it may be done twice."""
    listener, path = opened()
    known = asking(listener, path)[1]
    silent = [connected(listener) for _ in range(3)]
    listener.close()
    listener.close()
    for connection in (*silent, known.sock):
        assert ended(connection)
    with pytest.raises(ConnectionError):
        connected(listener)
