"""What listens for the gateway and for the Tinker API: who is let in, how much is read, how long connections last."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
import urllib.parse

import pytest

import rlkit
from tests.each import for_each

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse  # noqa: E402

from rlkit._web import Guard, WebServer, find_key, is_key  # noqa: E402

KEY = "tml-right-key-1"
HALVES = {
    "nothing": b"",
    "half a request line": b"GET /he",
    "half of the headers": b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
    "a body without a key": b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
    "a part of a body without a key": b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n",
    "a wrong key": b"GET / HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-wrong-key-1\r\n\r\n",
    "what nobody needs a key for": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


class App:
    """Answers with the size of the body that it read, once it may."""

    def __init__(self):
        self.ready = threading.Event()
        self.ready.set()
        self.asked = 0

    async def __call__(self, scope, receive, send):
        self.asked += 1
        request = Request(scope, receive)
        try:
            size = len(await request.body())
        except HTTPException as error:
            await (await refuse(request, error))(scope, receive, send)
            return
        while not self.ready.is_set():
            await asyncio.sleep(0.01)
        await JSONResponse({"size": size})(scope, receive, send)


async def refuse(request, error):
    return JSONResponse({"detail": error.detail}, error.status_code)


def guarded(app, key=KEY, body_limit=1000):
    def admit(request):
        if request.url.path == "/health":
            return False
        if key is not None and not is_key(find_key(request.headers), key):
            raise HTTPException(401, "the key is wrong")
        return True

    handlers = {HTTPException: refuse}
    return Guard(app, admit=admit, handlers=handlers, body_limit=body_limit, own_host=key is None)


@pytest.fixture
def app():
    return App()


@pytest.fixture
def open_server(app):
    """``open_server(key)`` listens."""
    with contextlib.ExitStack() as stack:
        yield lambda key=KEY: stack.enter_context(WebServer(guarded(app, key), "127.0.0.1", 0, name="test", patience=1))


def ask(app, method="GET", path="/", *, content=None, key=KEY, host="localhost", body_limit=1000, **headers):
    """The answer of a guarded application in process."""

    async def asked():
        transport = httpx.ASGITransport(guarded(app, key, body_limit))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, content=content, headers={"host": host, **named})

    return asyncio.run(asked())


def connect(server):
    address = urllib.parse.urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=10)


def ask_with_key(server, connection=None):
    """The status that a client with the key gets, and its connection, which stays open."""
    address = urllib.parse.urlsplit(server.url)
    connection = connection or http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", "/", headers={"x-api-key": KEY})
    answer = connection.getresponse()
    answer.read()
    return answer.status, connection


def say(server, data):
    """All that the server answers to ``data`` until it closes."""
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def is_ended(connection):
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


@for_each(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x_api_key": "tml-wrong-key-1"}, 401),
        ({"x_api_key": KEY[:-1]}, 401),
        ({"x_api_key": KEY + "1"}, 401),
        ({"x_api_key": b"\xff\xfe"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x_api_key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer  {KEY}"}, 200),
        ({"x_api_key": KEY, "host": "page.example"}, 200),  # a page does not have the key
        ({"x_api_key": KEY, "origin": "https://page.example"}, 403),
        ({"x_api_key": KEY, "origin": "null"}, 403),
        ({"x_api_key": KEY, "sec_fetch_site": "cross-site"}, 403),
        ({"x_api_key": KEY, "sec_fetch_site": "same-site"}, 403),
        ({"x_api_key": KEY, "sec_fetch_site": "anything"}, 403),
        ({"x_api_key": KEY, "sec_fetch_site": "none"}, 200),  # an address that a user types
        ({"x_api_key": KEY, "sec_fetch_site": "same-origin"}, 200),
        ({"x_api_key": KEY, "content_encoding": "gzip"}, 415),
        ({"x_api_key": KEY, "content_encoding": "identity"}, 200),
    ],
)
def test_who_is_let_in(app, headers, status):
    for method in ("GET", "POST"):
        asked, got = app.asked, ask(app, method, **headers)
        assert got.status_code == status
        assert bool(got.json().get("detail")) == (status != 200)
        assert app.asked - asked == (status == 200)  # what is refused does not reach the application


@for_each(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:9", 200),
        ("127.8.8.8", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_lead_here(app, host, status):
    """Without a key, a page that had its own name resolve to this machine is refused by the name it asks for."""
    assert ask(app, key=None, host=host).status_code == status


def test_a_request_without_a_host_is_this_machines(open_server):
    assert say(open_server(None), b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_bodies_are_bounded(app):
    """Whether the client says how long its body is, or just goes on."""

    async def parts(count):
        for _ in range(count):
            yield b"x" * 100

    for size in (1000, 1001):
        for content in (b"x" * size, parts(-(-size // 100))):
            got = ask(app, "POST", content=content, key=None)
            assert got.status_code == (200 if size == 1000 else 413)
            assert got.json() == ({"size": 1000} if size == 1000 else {"detail": got.json().get("detail")})
    assert "at most 1000 bytes" in got.json()["detail"]
    asked = app.asked
    for length, status in (("9" * 5000, 413), ("99999999999", 413), ("\xb2", 400), ("-1", 400), ("", 400)):
        assert ask(app, "POST", key=None, content_length=length.encode("latin-1")).status_code == status
    assert app.asked == asked


@for_each(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nbroken\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000, 400),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: zstd\r\n\r\n", 415),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: \xb2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"GET http://[::1/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"GET //[x]/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
    ],
)
def test_bad_requests(open_server, data, status):
    assert say(open_server(None), data).startswith(f"HTTP/1.1 {status} ".encode())


def test_nothing_is_read_before_the_key_is_checked(open_server, app):
    """Nor for a page: they are answered after the head, whatever body it promises."""
    server = open_server()
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n"
    for more, status in ((b"", 401), (b"x-api-key: tml-wrong-key-1\r\n", 401), (b"origin: http://a.example\r\n", 403)):
        with connect(server) as connection:
            connection.sendall(head + more + b"\r\n")
            assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
    assert app.asked == 0


def test_a_refused_client_reads_the_answer(open_server):
    """Also one that goes on to send what it promised, without a key, or more than is read."""
    address = urllib.parse.urlsplit(open_server().url)
    for headers, status in (({}, 401), ({"x-api-key": KEY}, 413)):
        for _ in range(5):
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
            connection.request("POST", "/", body=b"x" * 2**22, headers=headers)
            assert connection.getresponse().status == status
            connection.close()


def test_requests_in_a_row(open_server):
    """They share a connection; one that comes with another is answered after it."""
    server = open_server(None)
    one = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert say(server, one * 3).count(b"HTTP/1.1 200 OK") == 3
    last = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert say(server, last + one).count(b"HTTP/1.1 200 OK") == 1


def test_strangers_are_closed_in_time(open_server, monkeypatch):
    """Whatever they send without the key; who has shown it stays, and sends a body within a time of its own."""
    server = open_server()
    status, known = ask_with_key(server)
    assert status == 200
    monkeypatch.setattr("rlkit._web._BODY", 0.2)
    slow = connect(server)
    slow.sendall(f"POST / HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-length: 9\r\n\r\n{{".encode())
    assert is_ended(slow)
    monkeypatch.setattr("rlkit._web._FIRST", 0.2)
    silent = {what: connect(server) for what in HALVES}
    for what, connection in silent.items():
        with contextlib.suppress(OSError):  # it is closed already
            connection.sendall(HALVES[what])
    assert all(is_ended(connection) for connection in silent.values())  # or its timeout is raised
    assert ask_with_key(server, known)[0] == 200
    known.close()


def test_answers_leave_at_once(open_server):
    """An accepted connection has TCP_NODELAY, so that a body does not wait until its head is acknowledged."""
    server = open_server()
    with contextlib.closing(ask_with_key(server)[1]):
        (connection,) = server.connections.let_in
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_clients_with_the_key_come_first(open_server, monkeypatch):
    """However many silent connections there are."""
    monkeypatch.setattr("rlkit._web._CONNECTIONS", 16)
    server = open_server()
    for halves in (list(HALVES.values()) * 8, [b""] * 40):
        silent = [connect(server) for _ in halves]
        for connection, half in zip(silent, halves, strict=True):
            with contextlib.suppress(OSError):  # it had to leave
                connection.sendall(half)
        status, known = ask_with_key(server)
        assert status == 200
        assert len(server.connections.strangers) + len(server.connections.let_in) <= 16
        for connection in (*silent, known):
            connection.close()
        until(lambda: not server.connections.strangers and not server.connections.let_in)


def test_one_too_many_is_told_so(open_server, monkeypatch):
    """As one goes, another may come."""
    monkeypatch.setattr("rlkit._web._CONNECTIONS", 16)
    server = open_server()
    known = [ask_with_key(server)[1] for _ in range(16)]
    silent = [connect(server) for _ in range(5)]
    assert ask_with_key(server)[0] == 503
    known.pop().close()
    until(lambda: len(server.connections.let_in) == 15)
    status, connection = ask_with_key(server)
    assert status == 200
    for each in (connection, *known, *silent):
        each.close()


@for_each(("files", "most"), [(20, 16), (144, 16), (178, 50), (10**6, 4096), (-1, 4096)])
def test_connections_leave_room_for_open_files(files, most, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda what: (files, files))
    from rlkit._web import _most_connections

    assert _most_connections() == most


def test_an_answer_takes_as_long_as_it_takes(open_server, app, monkeypatch):
    """Only a client's own silence is limited, before a request and between two."""
    for name in ("_BODY", "_IDLE"):
        monkeypatch.setattr(f"rlkit._web.{name}", 0.2)
    app.ready.clear()
    with connect(open_server(None)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        time.sleep(0.5)
        app.ready.set()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert is_ended(connection)  # no second request


def test_closing_ends_every_connection(open_server, app):
    """Also one that is just arriving, and one whose answer does not come; it may be done twice."""
    before = set(threading.enumerate())
    server = open_server()
    known = ask_with_key(server)[1]
    silent = [connect(server) for _ in range(3)]
    app.ready.clear()
    waiting = connect(server)
    waiting.sendall(f"GET / HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n\r\n".encode())
    until(lambda: app.asked == 2)
    start = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - start < 8  # its patience is 1 s
    for connection in (*silent, known.sock, waiting):
        assert is_ended(connection)
    with pytest.raises(ConnectionError):
        connect(server)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rlkit-test"]


def test_a_taken_port(open_server):
    port = urllib.parse.urlsplit(open_server().url).port
    with pytest.raises(rlkit.BackendError, match=f"test: cannot listen on 127.0.0.1:{port}"):
        WebServer(App(), "127.0.0.1", port, name="test", patience=1)
