"""Who is let in, what is refused, and what becomes of clients that leave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
import time

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.gateway import GatewayError, _app
from rlkit.gateway._app import Server, create_app
from tests.each import for_each
from tests.gateway.conftest import HI
from tests.gateway.fake import FakeService
from tests.properties import examples

CHAT = {"model": "m", "messages": HI}
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]


def in_process(app):
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1/s/s1")


def run(coroutine):
    return asyncio.run(coroutine)


def post(http, path="/v1/chat/completions", **options):
    return run(http.post(path, **options))


def test_a_session_is_named_by_the_url_or_by_the_key(http, service):
    for path, headers in (("", {}), ("/s/s7", {}), ("", {"x-api-key": "sk-2"})):
        assert post(http, f"{path}/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert service.admitted == [(None, "sk-1"), ("s7", "sk-1"), (None, "sk-2")]
    for path in ("/s/x/v1/chat/completions", "/v1/chat/completions", "/v1/models", "/s/x/v1/models"):
        method = "GET" if path.endswith("models") else "POST"
        got = run(http.request(method, path, json=CHAT, headers={"authorization": "Bearer unknown"}))
        assert (got.status_code, got.headers["x-should-retry"]) == (401, "false"), path
        assert got.json()["error"]["code"] == "invalid_api_key"


META = b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": %s}}'


@for_each(
    ("content", "status", "headers"),
    [
        *((each, 400, {}) for each in (b"{", b"", b"[]", b'{"n": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000)),
        *((each, 400, {}) for each in (b'{"n": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"{" + b" " * 300_000)),
        *((each, 400, {}) for each in (META % b"1e999", META % (b'{"a": ' * 800 + b"1" + b"}" * 800))),
        (b"x" * 2000, 413, {}),
        (b"{}", 403, {"origin": "https://page.example"}),
        (b"{}", 403, {"host": "page.example"}),
    ],
)
def test_what_is_no_request(service, content, status, headers):
    """Bodies above 256 KiB are parsed in another thread. The guard's limits are those of tests/test_web.py."""
    http = in_process(create_app(service, body_limit=1000 if status == 413 else 2**20))
    got = post(http, content=content, headers=headers)
    assert (got.status_code, got.headers["x-should-retry"]) == (status, "false"), got.text
    message = got.json()["error"]["message"]
    assert b"ud800" not in content or message == "the body has \\ud800, half of a surrogate pair; expected valid text"
    assert message
    assert (status == 413) == (got.json()["error"]["code"] == "request_too_large")
    assert service.refused >= (status == 400)  # it is counted


def test_paths_and_methods(http):
    for prefix in ("", "/s/s1"):
        for method, path, allowed in [*(("GET", path, "POST") for path in POSTS), ("POST", "/v1/models", "GET, HEAD")]:
            got = run(http.request(method, prefix + path))
            assert (got.status_code, got.headers["allow"]) == (405, allowed)
            assert got.headers["x-should-retry"] == "false"
            assert f"{method} {prefix}{path}: this endpoint takes {allowed}" in got.text
        assert run(http.get(f"{prefix}/v1/files")).json()["error"]["code"] == "not_found"
        assert run(http.post(f"{prefix}/v1/chat/completions/", json=CHAT)).status_code == 404
        assert run(http.get(f"{prefix}/v1/messages/batches")).json()["type"] == "error"


def test_health(service):
    """Asked without a key, too, which does not keep the connection: only a client with a session is let in."""
    let_in, endpoints = [], create_app(service)

    async def app(scope, receive, send):
        await endpoints({**scope, "rlkit.let_in": lambda: let_in.append(scope["path"])}, receive, send)

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1")
    paths = ("/", "/health", "/ping", "/version", "/s/s1/health", "/s/s1/v1/models")
    assert [run(http.get(path)).status_code for path in paths] == [200] * 6
    assert let_in == ["/s/s1/v1/models"]
    assert run(http.get("/version")).json()["version"]


LONG = GatewayError(400, "too long", param="messages", code="context_length_exceeded")
ERRORS = [  # what is raised; OpenAI's type; Anthropic's; retry-after
    (GatewayError(429, "no more", code="limit_reached"), "rate_limit_error", "rate_limit_error", None),
    (GatewayError(429, "busy", retry_after=0.3), "rate_limit_error", "rate_limit_error", "1"),
    (GatewayError(503, "gone", code="sampler", retry_after=2.5), "server_error", "overloaded_error", "3"),
    (LONG, "invalid_request_error", "invalid_request_error", None),
    (RuntimeError("a secret path: /home/me"), "server_error", "api_error", None),
]


@for_each("stream", [False, True])
@for_each(("problem", "kind", "claude", "after"), ERRORS)
def test_errors(http, service, caplog, stream, problem, kind, claude, after):
    """They say whether to try again, and nothing of the inside, which the log has."""
    caplog.clear()
    service.raises = problem
    if isinstance(problem, RuntimeError):
        problem = GatewayError(500, "internal error: RuntimeError", code="internal_error")
    for path in ("chat/completions", "completions", "responses", "messages"):
        body = {**CHAT, "input": "x", "max_tokens": 5, "stream": stream}
        body |= {"prompt": "x"} if path == "completions" else {}
        got = post(http, f"/v1/{path}", json=body)
        assert (got.status_code, got.headers.get("retry-after")) == (problem.status, after)
        assert got.headers["x-should-retry"] == ("false" if after is None else "true")
        if path == "messages":
            message = f"prompt is too long: {problem.message}" if problem is LONG else problem.message
            assert got.json() == {"type": "error", "error": {"type": claude, "message": message}, "request_id": None}
        else:
            error = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
            assert got.json() == {"error": error}
    assert ("a secret path" in caplog.text) == (problem.status == 500)


def test_refusals_are_written_in_the_form_of_the_api(http, client, service):
    for path in ("chat/completions", "completions", "responses", "messages"):
        error = post(http, f"/v1/{path}", json={**CHAT, "temperature": "hot", "prompt": "x"}).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("temperature: got 'hot' (str)")
        assert error.get("param", "temperature") == "temperature"
    service.raises = ERRORS[0][0]
    with pytest.raises(openai.RateLimitError, match="no more"):
        run(client.with_options(max_retries=5).chat.completions.create(**CHAT))
    assert len(service.requests) == 1  # the SDK does not try again


@pytest.fixture
def soon(monkeypatch):
    """``soon(call)``: streams begin soon, and ``call`` is called after each of their comments."""

    def begin(call):
        chunks = _app._Endpoint._chunks

        async def begun(self, asked):
            async for chunk in chunks(self, asked):
                yield chunk
                call()

        for name in ("_SOON", "_SILENCE"):
            monkeypatch.setattr(_app, name, 0.01)
        monkeypatch.setattr(_app._Endpoint, "_chunks", begun)

    return begin


def test_a_stream_that_has_to_wait_is_kept_open_by_comments(http, service, soon):
    service.hold, begun = threading.Event(), []
    soon(lambda: (begun.append(1), len(begun) == 2 and service.hold.set()))
    got = post(http, json={**CHAT, "stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.text.startswith(": waiting\n\n: waiting\n\n")
    assert got.text.endswith("data: [DONE]\n\n")
    assert '"delta":{"content":"Hello there, Wörld!"}' in got.text


@for_each("path", ["chat/completions", "responses", "messages"])
@for_each(
    ("problem", "said"), [(GatewayError(503, "gone"), "gone"), (RuntimeError("x"), "internal error: RuntimeError")]
)
def test_an_error_after_the_stream_has_begun_is_told_in_it(http, ask, service, soon, problem, said, path):
    service.raises, service.hold = problem, threading.Event()
    soon(service.hold.set)
    with pytest.raises(openai.APIError, match=said):
        ask("chat", stream=True)
    service.hold.clear()
    got = post(http, f"/v1/{path}", json={**CHAT, "input": "x", "max_tokens": 5, "stream": True})
    assert got.status_code == 200
    *_, name, last = ["", *got.text.strip().split("\n")]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == said
    assert name == ("" if path == "chat/completions" else "event: error")


def test_a_client_that_leaves_frees_its_row(http, service):
    """Over a socket that is closed while the answer is sampled, or in process: ``answer`` is cancelled at once."""
    service.hold = threading.Event()
    with Server(service) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /s/s1/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: "
        for stream in (False, True):
            body = json.dumps({**CHAT, "stream": stream})
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
                assert service.running.acquire(timeout=30)
            assert service.cancelled.acquire(timeout=30)
        with socket.create_connection((host, int(port))) as connection:  # and one that leaves while it sends
            connection.sendall(f"{head}90\r\n\r\n{{".encode())
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert len(service.requests) == 2

    async def leave():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(http.post("/v1/chat/completions", json=CHAT), 0.1)

    run(leave())
    assert service.cancelled.acquire(timeout=30)


@pytest.mark.parametrize("stream", [False, True])
def test_closing_ends_what_runs(service, stream, soon, caplog):
    """Clients are disconnected, whether their streams have begun or not; nothing is left, and no failure is logged."""
    begun, server = threading.Event(), Server(service)
    soon(begun.set)
    service.hold = threading.Event()
    url = f"{server.url}/s/s1/v1/chat/completions"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        asked = threads.submit(httpx2.post, url, json={**CHAT, "stream": stream}, timeout=60)
        assert service.running.acquire(timeout=30)
        assert not stream or begun.wait(60)
        since = time.monotonic()
        server.close()
        assert time.monotonic() - since < 1.5
        server.close()
        assert isinstance(asked.exception(30), (httpx2.RemoteProtocolError, httpx2.ReadError))
    assert service.cancelled.acquire(timeout=30)
    assert "Traceback" not in caplog.text
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
OBJECTS = "model messages role content tools type function name arguments tool_calls n prompt prompt_logprobs stream"
FIELDS = "max_tokens logprobs stop tool_choice call_id output instructions echo top_logprobs input_schema"
KINDS = "user assistant system tool text input tool_result tool_use input_text function_call thinking reasoning"
WORDS = st.sampled_from(f"{OBJECTS} {FIELDS} {KINDS} function_call_output stop_token_ids".split())
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=9) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=6),
)


@pytest.mark.parametrize("path", POSTS)
@examples(50)
@given(body=st.dictionaries(WORDS, VALUES, max_size=7))
def test_any_json_is_answered_or_refused(path, body):
    """Never with a 500, and a refusal says what is wrong."""
    http = in_process(create_app(FakeService()))
    good = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    for value in (body, {**good, "max_tokens": 5, **body}):
        got = run(http.post(path, json=value))
        assert got.status_code in (200, 400), got.text
        if got.status_code == 400:
            assert got.json()["error"]["message"]
