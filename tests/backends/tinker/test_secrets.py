"""A key goes to the service in a header, and nowhere else."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import logging
import pickle
import threading
import traceback

import httpx
import pytest

import rlkit
from rlkit.backends.tinker import _connect
from rlkit.testing import FakeTinker
from tests.each import for_each

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")

KEY = "tml-cAnArY-9f8e7d6c-5b4a-Zq"


@contextlib.contextmanager
def refusing(detail):
    """A server on loopback that refuses every request and says the key back; gives its address and the keys it got."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            got.append(self.headers["x-api-key"])
            self.send_response(401)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"detail": detail}).encode())

        def log_message(self, *args):
            """Not on the screen."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


class Kept(logging.Handler):
    """What records show."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts = []

    def emit(self, record):
        self.texts.append(self.format(record))


@pytest.fixture
def debug():
    """All that is logged at DEBUG by the SDK and its HTTP client."""
    handler = Kept()
    loggers = [logging.getLogger(name) for name in ("tinker", "httpx", "httpcore")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_key_that_a_server_says_back(debug):
    """Is masked in rlkit's message and in what is logged, tracebacks included."""
    said = pytest.raises(rlkit.BackendError, match=r"\(401\).*no such key: \*\*\*")
    with refusing(f"no such key: {KEY}") as (url, got), said as caught:
        rlkit.connect("tinker", model="toy", base_url=url, api_key=KEY, deadline=10.0)
    assert set(got) == {KEY}
    assert KEY not in str(caught.value)
    logger = logging.getLogger("tinker.lib.internal_client_holder")
    try:
        raise ValueError(f"with {KEY}")
    except ValueError:
        logger.exception("an error with %s", KEY)
    assert any("an error with ***" in text and "with ***" in text.splitlines()[-1] for text in debug.texts)
    assert any("HTTP Request: POST" in text for text in debug.texts)
    assert not [text for text in debug.texts if KEY in text]


def test_a_run_at_debug_shows_no_key(debug):
    """Nor do its objects, and the service is given it in headers alone."""
    with FakeTinker(seed=0) as fake:
        policy = rlkit.connect("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key, seed=0)
        policy.forward_backward([rlkit.Datum([65, 66], [0, 1])], "cross_entropy").result()
        policy.optim_step(rlkit.Adam()).result()
        sampler = policy.sampler().result()
        for each in (policy, sampler):
            assert fake.api_key not in repr(each)
            for take in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match="can ?not be pickled"):
                    take(each)
        policy.close()
    assert any("optim_step" in text for text in debug.texts)
    assert not [text for text in debug.texts if fake.api_key in text]


@for_each(
    "url",
    [
        "http://example.com",
        "http://10.0.0.1:8000",
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "http://[2001:db8::1]",
        "https://user:pa55word@example.com",
        "https://user@example.com",
        "http://user:pa55word@127.0.0.1:8000",
        "ftp://user:pa55word@example.com",
        "//user:pa55word@example.com",
        "user:pa55word@example.com",
        "ftp://example.com",
        "example.com",
        "https://",
        "http://[::1",
        "http://127.0.0.1:99999",
    ],
)
def test_addresses_that_would_show_the_key(url, monkeypatch):
    """Also those of the environment."""
    monkeypatch.setenv("TINKER_BASE_URL", url)
    for options in ({"base_url": url}, {}):
        with pytest.raises(rlkit.ConfigError, match="base_url") as caught:
            rlkit.connect("tinker", model="toy", api_key=KEY, deadline=2.0, **options)
        shown = "".join(traceback.format_exception(caught.value))
        assert "pa55word" not in shown
        assert KEY not in shown


def test_addresses_that_may_be_used():
    for url in ("http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "https://example.com/a/b"):
        assert _connect.check_address(url) is url.startswith("http:")


def test_the_key_does_not_follow_a_redirect(monkeypatch):
    """The SDK would send it along to wherever the answer of a server leads."""
    paths, respond = [], FakeTinker.respond

    async def redirect(fake, request):
        paths.append(request.url.path)
        if request.url.path.endswith("/forward_backward"):
            return httpx.Response(307, headers={"location": f"{fake.base_url}/elsewhere"}, request=request)
        return await respond(fake, request)

    monkeypatch.setattr(FakeTinker, "respond", redirect)
    with FakeTinker() as fake:
        policy = rlkit.connect("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key)
        with pytest.raises(rlkit.BackendError, match="307"):
            policy.forward_backward([rlkit.Datum([65, 66], [0, 1])], "cross_entropy").result()
        policy.close()
    assert "/elsewhere" not in paths
