"""A key goes to the service in a header, and nowhere else."""

from __future__ import annotations

import logging
import traceback

import httpcore  # noqa: F401  # makes its loggers
import httpx
import pytest

import rlkit
from rlkit.backends.tinker import _connect
from rlkit.testing import FakeTinker
from tests.backends.tinker.conftest import STEP, connect
from tests.each import for_each

pytest.importorskip("tinker", reason="needs the extra tinker")

KEY = "tml-cAnArY-9f8e7d6c-5b4a-Zq"
DATA = [rlkit.Datum([65, 66], [0, 1])]


@pytest.fixture
def debug(caplog):
    """All that the SDK and its HTTP client log at DEBUG."""
    for name in ("tinker", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, name)
    return caplog


def answer(monkeypatch, function):
    """Have FakeTinker answer by a function where that gives an answer; return the requests to come."""
    requests, respond = [], FakeTinker.respond

    async def replaced(fake, request):
        requests.append(request)
        return function(request) or await respond(fake, request)

    monkeypatch.setattr(FakeTinker, "respond", replaced)
    return requests


def test_a_key_that_a_server_says_back(fake, debug, monkeypatch):
    """Is masked in rlkit's message and in what is logged, tracebacks included."""
    said = {"detail": f"no such key: {KEY}"}
    requests = answer(monkeypatch, lambda request: httpx.Response(401, json=said, request=request))
    with pytest.raises(rlkit.BackendError, match=r"\(401\).*no such key: \*\*\*") as caught:
        connect(fake, api_key=KEY)
    assert {request.headers["x-api-key"] for request in requests} == {KEY}
    assert KEY not in str(caught.value)
    assert "HTTP Request: POST" in debug.text
    for name in ("tinker.lib.internal_client_holder", "httpx", "httpcore.http11"):
        debug.clear()
        try:
            raise ValueError(f"with {KEY}")
        except ValueError:
            logging.getLogger(name).exception("an error with %s", KEY)
        assert "an error with ***" in debug.text
        assert "with ***" in debug.text.splitlines()[-1]
        assert KEY not in debug.text


def test_a_run_at_debug_shows_no_key(fake, debug):
    """Nor do its objects, and the service is given it in headers alone."""
    with connect(fake) as policy:
        policy.forward_backward(DATA, "cross_entropy").result()
        policy.optim_step(STEP).result()
        for each in (policy, policy.sampler().result()):
            assert fake.api_key not in repr(each)
    assert "optim_step" in debug.text
    assert fake.api_key not in debug.text


SHOWING = """http://example.com http://10.0.0.1:8000 http://127.0.0.1.example.com http://localhost.example.com
    http://[2001:db8::1] https://user:pa55word@example.com https://user@example.com ftp://example.com example.com https://
    http://user:pa55word@127.0.0.1:8000 ftp://user:pa55word@example.com //user:pa55word@example.com
    user:pa55word@example.com http://[::1 http://127.0.0.1:99999"""


@for_each("url", SHOWING.split())
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


def test_the_key_does_not_follow_a_redirect(fake, monkeypatch):
    """The SDK would send it along to wherever the answer of a server leads."""

    def redirect(request):
        if request.url.path.endswith("/forward_backward"):
            return httpx.Response(307, headers={"location": f"{fake.base_url}/elsewhere"}, request=request)
        return None

    requests = answer(monkeypatch, redirect)
    with connect(fake) as policy, pytest.raises(rlkit.BackendError, match="307"):
        policy.forward_backward(DATA, "cross_entropy").result()
    assert "/elsewhere" not in [request.url.path for request in requests]
