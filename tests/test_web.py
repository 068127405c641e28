"""What listens for the gateway and for the Tinker API: who is let in, how much is read, how long connections last."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest

import rlkit

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse  # noqa: E402

from rlkit._web import Guard, WebServer, _most_connections, find_key, is_key  # noqa: E402

KEY = "tml-right-key-1"
RIGHT = {"x-api-key": KEY}
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
HALVES = [  # what strangers send
    b"",
    b"GET /he",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
    POST + b"content-length: 9\r\n\r\n{",
    POST + b"transfer-encoding: chunked\r\n\r\n1\r\n",
    POST + b"x-api-key: tml-wrong-key-1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
]


class App:
    """Answers with the size of the body that it read, once it may."""

    def __init__(self):
        self.ready, self.asked = threading.Event(), 0
        self.ready.set()

    async def __call__(self, scope, receive, send):
        self.asked += 1
        answer = JSONResponse({"size": len(await Request(scope, receive).body())})
        while not self.ready.is_set():
            await asyncio.sleep(0.01)
        await answer(scope, receive, send)


async def refuse(request, error):
    return JSONResponse({"detail": error.detail}, error.status_code)


def guarded(app, key):
    def admit(request):
        known = key is None or is_key(find_key(request.headers), key)
        if not known and request.url.path != "/health":
            raise HTTPException(401, "the key is wrong")
        return known

    return Guard(app, admit=admit, handlers={HTTPException: refuse}, body_limit=1000, own_host=key is None)


@pytest.fixture
def app():
    return App()


@pytest.fixture
def open_server(app):
    """``open_server(key)`` listens."""
    with contextlib.ExitStack() as stack:
        yield lambda key=KEY: stack.enter_context(WebServer(guarded(app, key), "127.0.0.1", 0, name="test", patience=1))


def ask(app, method="GET", *, content=None, key=KEY, **headers):
    """The answer of a guarded application in process."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(guarded(app, key)), base_url="http://localhost")
    return asyncio.run(client.request(method, "/", content=content, headers=headers))


def connect(server, data=b""):
    """A connection on which this was sent, unless it was closed already."""
    address = urllib.parse.urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


def ask_with_key(server, connection=None, method="GET", headers=RIGHT, body=None):
    """The status that a client with the key gets, and its connection, which stays open."""
    address = urllib.parse.urlsplit(server.url)
    connection = connection or http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request(method, "/", body=body, headers=headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status, connection


def say(server, data):
    """All that the server answers to ``data`` until it closes."""
    with connect(server, data) as connection:
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def is_ended(connection):
    """Wait until the other side has closed."""
    with connection, contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


CASES = {  # status -> headers, each with values that lead to it; those after x-api-key come with the right one
    401: """x-api-key: tml-wrong-key-1|tml-right-key-|tml-right-key-11|\xff\xfe|
        authorization: tml-right-key-1|Basic tml-right-key-1|Bearer """,
    200: """x-api-key: tml-right-key-1
        authorization: Bearer tml-right-key-1|bearer  tml-right-key-1
        host: page.example
        sec-fetch-site: none|same-origin
        content-encoding: identity""",
    403: """origin: https://page.example|null
        sec-fetch-site: cross-site|same-site|x""",
    415: "content-encoding: gzip",
}


def test_who_is_let_in(app):
    """A page does not have the key, so its name does not matter with one."""
    for status, line in ((status, line) for status, lines in CASES.items() for line in lines.split("\n")):
        name, _, values = line.strip(" ").partition(": ")
        for value, method in itertools.product(values.split("|"), ("GET", "POST")):
            key = {} if name in ("x-api-key", "authorization") else RIGHT
            asked, got = app.asked, ask(app, method, **key, **{name: value.encode("latin-1")})
            assert got.status_code == status, (name, value)
            assert bool(got.json().get("detail")) == (status != 200)
            assert app.asked - asked == (status == 200)  # what is refused does not reach the application


def test_a_name_that_was_made_to_lead_here(app, open_server):
    """Without a key, a page that had its own name resolve to this machine is refused by the name it asks for."""
    foreign = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", "")
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:9", "127.8.8.8", "[::1]:8000", *foreign):
        assert ask(app, key=None, host=host).status_code == (403 if host in foreign else 200), host
    assert say(open_server(None), b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_bodies_are_bounded(app):
    """Whether the client says how long its body is, or just goes on."""

    async def parts(count):
        for _ in range(count):
            yield b"x" * 100

    answers = {200: {"size": 1000}, 413: {"detail": "the body is too large; expected at most 1000 bytes"}}
    for content, status in ((b"x" * 1000, 200), (parts(10), 200), (b"x" * 1001, 413), (parts(11), 413)):
        got = ask(app, "POST", content=content, key=None)
        assert (got.status_code, got.json()) == (status, answers[status])
    asked = app.asked
    for length, status in (("9" * 5000, 413), ("99999999999", 413), ("\xb2", 400), ("-1", 400), ("", 400)):
        assert ask(app, "POST", key=None, **{"content-length": length.encode("latin-1")}).status_code == status
    assert app.asked == asked


def test_bad_requests_and_many(open_server):
    """Those in a row share a connection; one that comes with another is answered after it."""
    server, one, ok = open_server(None), POST + b"\r\n", b"HTTP/1.1 200 OK"
    bad = (b"nonsense\r\n", b"GET / HTTP/2\r\n", POST + b"broken\r\n", POST + b"x: " + b"a" * 70_000)
    for data in (*bad, POST.replace(b"/ ", b"http://[::1/ ", 1), POST.replace(b"/ ", b"//[x]/ ", 1)):
        assert say(server, data + b"\r\n").startswith(b"HTTP/1.1 %d " % (400 if data in bad else 200)), data[:80]
    assert say(server, one * 3).count(ok) == 3
    assert say(server, POST + b"connection: close\r\n\r\n" + one).count(ok) == 1


def test_nothing_is_read_before_the_key_is_checked(open_server, app):
    """Nor for a page: all are answered after the head, also those that go on to send the body that it promises."""
    server = open_server()
    for more, status in ((b"", 401), (b"x-api-key: tml-wrong-key-1\r\n", 401), (b"origin: http://a.example\r\n", 403)):
        with connect(server, POST + b"content-length: 900\r\n" + more + b"\r\n") as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)
    assert app.asked == 0
    for headers, expected in [({}, 401)] * 5 + [(RIGHT, 413)] * 5:
        status, connection = ask_with_key(server, None, "POST", headers, b"x" * 2**22)
        assert status == expected
        connection.close()


def test_strangers_are_closed_in_time(open_server, app, monkeypatch):
    """Whatever they send without the key. Who has shown it stays, and sends a body within a time of its own."""
    server = open_server()
    status, known = ask_with_key(server)
    assert status == 200
    (connection,) = server.connections.clients
    accepted = connection.transport.get_extra_info("socket")  # no body waits until its head is acknowledged
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    monkeypatch.setattr("rlkit._web._BODY", 0.2)
    assert is_ended(connect(server, POST + f"x-api-key: {KEY}\r\ncontent-length: 9\r\n\r\n{{".encode()))
    monkeypatch.setattr("rlkit._web._FIRST", 0.2)
    silent = [connect(server, half) for half in HALVES]
    assert all(is_ended(connection) for connection in silent)  # or its timeout is raised
    app.ready.clear()  # an answer takes as long as it takes; the next request does not
    known.request("POST", "/", b"{}", headers=RIGHT)
    time.sleep(0.5)
    monkeypatch.setattr("rlkit._web._IDLE", 0.2)
    app.ready.set()
    assert known.getresponse().read() == b'{"size":2}'
    assert is_ended(known.sock)


def test_clients_with_the_key_come_first(open_server, monkeypatch):
    """However many silent connections there are. One too many of them is told so; as one goes, another may come."""
    monkeypatch.setattr("rlkit._web._CONNECTIONS", 16)
    server = open_server()
    for halves in (HALVES * 8, [b""] * 40):
        silent = [connect(server, half) for half in halves]
        status, known = ask_with_key(server)
        assert status == 200
        assert len(server.connections.strangers) + len(server.connections.clients) <= 16
        for connection in (*silent, known):
            connection.close()
        until(lambda: not server.connections.strangers and not server.connections.clients)
    known = [ask_with_key(server)[1] for _ in range(16)]
    silent = [connect(server) for _ in range(5)]
    assert ask_with_key(server)[0] == 503
    known.pop().close()
    until(lambda: len(server.connections.clients) == 15)
    status, connection = ask_with_key(server)
    assert status == 200
    for each in (connection, *known, *silent):
        each.close()


def test_connections_leave_room_for_open_files(monkeypatch):
    for files, most in {20: 16, 144: 16, 178: 50, 10**6: 4096, -1: 4096}.items():
        monkeypatch.setattr("resource.getrlimit", lambda what, files=files: (files, 10**6))
        assert _most_connections() == most


def test_a_burst_of_connections_is_no_error():
    """More than the files that the process may have open: it accepts a few, ends others, and so on."""
    program = """import resource, time; from rlkit._web import WebServer, Guard
from starlette.responses import Response
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
app = Guard(Response("ok"), admit=lambda request: True, handlers={}, body_limit=9, own_host=True)
print(WebServer(app, "127.0.0.1", 0, name="test", patience=1).url, flush=True); time.sleep(600)"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process, contextlib.ExitStack() as stack:
        url = process.stdout.readline().strip()
        address = urllib.parse.urlsplit(url)
        for _ in range(500):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address.hostname, address.port))
        answer = httpx.get(url, timeout=60).text
        process.kill()
        assert (answer, process.stderr.read()) == ("ok", "")


def test_closing_ends_every_connection(open_server, app, caplog):
    """Also one that is just arriving, and one whose answer does not come; it may be done twice. A port may be taken."""
    before = set(threading.enumerate())
    server = open_server()
    known = ask_with_key(server)[1]
    silent = [connect(server) for _ in range(3)]
    app.ready.clear()
    waiting = connect(server, POST + f"x-api-key: {KEY}\r\n\r\n".encode())
    until(lambda: app.asked == 2)
    start = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - start < 8  # its patience is 1 s
    assert caplog.text == ""
    assert all(is_ended(connection) for connection in (*silent, known.sock, waiting))
    with pytest.raises(ConnectionError):
        connect(server)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rlkit-test"]
    port = urllib.parse.urlsplit(open_server().url).port
    with pytest.raises(rlkit.BackendError, match=f"test: cannot listen on 127.0.0.1:{port}"):
        WebServer(App(), "127.0.0.1", port, name="test", patience=1)
