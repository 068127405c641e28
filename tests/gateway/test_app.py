"""Who is let in, what is refused, and what becomes of clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.gateway import GatewayError, _app
from rlkit.gateway._app import Server, create_app
from tests.each import for_each
from tests.gateway.fake import FakeService
from tests.properties import examples

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]


def run(coroutine):
    async def awaited():  # the SDK's lists are awaitable, and no coroutines
        return await coroutine

    return asyncio.run(awaited())


@pytest.fixture
def served(service):
    with Server(service) as server:
        yield server


def post(http, path="/v1/chat/completions", **options):
    return run(http.post(path, **options))


def test_a_session_is_named_by_the_url_or_by_the_key(http, service):
    assert post(http, json=CHAT).status_code == 200
    assert post(http, "/s/s7/v1/chat/completions", json=CHAT).status_code == 200
    assert post(http, json=CHAT, headers={"x-api-key": "sk-2"}).status_code == 200
    assert service.admitted == [(None, "sk-1"), ("s7", "sk-1"), (None, "sk-2")]


@pytest.mark.parametrize("path", ["/s/x/v1/chat/completions", "/v1/chat/completions", "/v1/models", "/s/x/v1/models"])
def test_unknown_sessions_and_keys(http, path):
    headers = {"authorization": "Bearer unknown"}
    got = (
        run(http.get(path, headers=headers))
        if path.endswith("models")
        else post(http, path, json=CHAT, headers=headers)
    )
    assert got.status_code == 401
    assert got.json()["error"]["code"] == "invalid_api_key"
    assert got.headers["x-should-retry"] == "false"


@for_each(
    ("content", "status", "headers"),
    [
        *((each, 400, {}) for each in (b"{", b"", b"[]", b'{"n": NaN}', b'{"model": "\\ud800"}', b"[" * 100_000)),
        *((each, 400, {}) for each in (b'{"n": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"{" + b" " * 300_000)),
        (b"x" * 2000, 413, {}),
        (b"{}", 403, {"origin": "https://page.example"}),
        (b"{}", 403, {"host": "page.example"}),
    ],
)
def test_what_is_no_request(service, content, status, headers):
    """Bodies above 256 KiB are parsed in another thread. The guard's limits are those of tests/test_web.py."""
    app = create_app(service, body_limit=1000 if status == 413 else 2**20)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1/s/s1")
    got = post(http, content=content, headers=headers)
    assert got.status_code == status, got.text
    message = got.json()["error"]["message"]
    assert b"ud800" not in content or message == "the body has \\ud800, half of a surrogate pair; expected valid text"
    assert message
    assert (status == 413) == (got.json()["error"]["code"] == "request_too_large")
    assert got.headers["x-should-retry"] == "false"


@for_each("prefix", ["", "/s/s1"])
@for_each(
    ("method", "path", "allowed"), [*(("GET", path, "POST") for path in POSTS), ("POST", "/v1/models", "GET, HEAD")]
)
def test_a_method_that_an_endpoint_does_not_take(http, prefix, method, path, allowed):
    got = run(http.request(method, prefix + path))
    assert (got.status_code, got.headers["allow"], got.headers["x-should-retry"]) == (405, allowed, "false")
    assert f"{method} {prefix}{path}: this endpoint takes {allowed}" in got.text
    assert run(http.get(f"{prefix}/v1/files")).json()["error"]["code"] == "not_found"
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


def test_models(client, claude, service):
    (model,) = run(client.models.list()).data
    assert (model.id, model.object, model.max_model_len) == ("policy", "model", 4096)
    assert run(client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        run(client.models.retrieve("gpt-4"))
    (model,) = run(claude.models.list()).data
    assert (model.id, model.type) == ("policy", "model")
    assert run(claude.models.retrieve("policy")).display_name == "policy"
    with pytest.raises(anthropic.NotFoundError):
        run(claude.models.retrieve("claude"))


@pytest.mark.parametrize("stream", [False, True])
def test_errors_say_whether_to_try_again(client, service, stream):
    service.raises = GatewayError(429, "two turns are all there are", code="limit_reached")
    with pytest.raises(openai.RateLimitError) as caught:
        run(client.with_options(max_retries=5).chat.completions.create(**CHAT, stream=stream))
    assert len(service.requests) == 1  # and the SDK does not
    client = client.with_options(max_retries=0)
    assert caught.value.code == "limit_reached"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in caught.value.response.headers
    service.raises = GatewayError(429, "busy", retry_after=0.3)
    with pytest.raises(openai.RateLimitError) as caught:
        run(client.chat.completions.create(**CHAT, stream=stream))
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_our_own_tells_nothing_of_the_inside(http, service, stream, caplog):
    service.raises = RuntimeError("a secret path: /home/me")
    got = post(http, json={**CHAT, "stream": stream})
    assert got.status_code == 500
    assert got.json()["error"] == {
        "message": "internal error: RuntimeError",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "a secret path" in caplog.text  # the log has it


def after_begin(monkeypatch, call):
    """``call`` is made when a stream has begun, which is soon."""
    comments = _app._Endpoint._chunks

    async def begun(self, asked):
        async for chunk in comments(self, asked):
            yield chunk
            call()

    monkeypatch.setattr(_app, "_SOON", 0.01)
    monkeypatch.setattr(_app, "_SILENCE", 0.01)
    monkeypatch.setattr(_app._Endpoint, "_chunks", begun)


def test_a_stream_that_has_to_wait_is_kept_open_by_comments(http, service, monkeypatch):
    monkeypatch.setattr(_app, "_SOON", 0.01)
    monkeypatch.setattr(_app, "_SILENCE", 0.01)
    service.hold = threading.Event()
    served, comments = create_app(service), []

    async def counts(scope, receive, send):
        async def counted(message):
            comments.extend([1] if message.get("body", b"").startswith(b": waiting") else [])
            await send(message)
            if len(comments) == 2:
                service.hold.set()

        await served(scope, receive, counted)

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(counts), base_url=http.base_url, headers=http.headers)
    got = run(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.text.startswith(": waiting\n\n: waiting\n\n")
    assert got.text.endswith("data: [DONE]\n\n")
    assert '"delta":{"content":"Hello there, Wörld!"}' in got.text


@pytest.mark.parametrize("problem", [GatewayError(503, "the policy is gone", code="gone"), RuntimeError("secret")])
def test_an_error_after_the_stream_has_begun_is_told_in_it(http, client, service, monkeypatch, problem):
    service.raises = problem
    service.hold = threading.Event()
    after_begin(monkeypatch, service.hold.set)
    got = run(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert got.status_code == 200
    last = [line for line in got.text.splitlines() if line.startswith("data: ")][-1]
    expected = "the policy is gone" if isinstance(problem, GatewayError) else "internal error: RuntimeError"
    assert json.loads(last[6:])["error"]["message"] == expected

    async def read():
        return [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]

    service.hold.clear()
    with pytest.raises(openai.APIError, match=expected):
        run(read())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(served, service, stream):
    """Over a socket that is closed while the answer is sampled: ``answer`` is cancelled at once."""
    service.hold = threading.Event()
    body = json.dumps({**CHAT, "stream": stream}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /s/s1/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert service.running.acquire(timeout=30)
    assert service.cancelled.acquire(timeout=30)


def test_a_client_in_process_that_is_cancelled_frees_its_row(http, service):
    service.hold = threading.Event()

    async def leave():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(http.post("/v1/chat/completions", json=CHAT), 0.1)

    run(leave())
    assert service.cancelled.acquire(timeout=30)


def test_a_client_that_leaves_while_it_sends(served, service):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /s/s1/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{")
    assert httpx2.get(f"{served.url}/health").status_code == 200
    assert not service.requests


@pytest.mark.parametrize("stream", [False, True])
def test_closing_ends_what_runs(service, stream, monkeypatch, caplog):
    """Clients are disconnected, whether their streams have begun or not; nothing is left, and no failure is logged."""
    begun = threading.Event()
    after_begin(monkeypatch, begun.set)
    service.hold = threading.Event()
    server = Server(service)
    asked = openai.OpenAI(base_url=f"{server.url}/s/s1/v1", api_key="any", max_retries=0)
    failures = []

    def ask():
        try:
            list(asked.chat.completions.create(**CHAT, stream=stream))
        except (openai.APIConnectionError, httpx2.RemoteProtocolError, httpx2.ReadError) as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert service.running.acquire(timeout=30)
    assert not stream or begun.wait(60)
    since = time.monotonic()
    server.close()
    assert time.monotonic() - since < 1.5
    server.close()
    thread.join(timeout=30)
    asked.close()
    assert len(failures) == 1
    assert service.cancelled.acquire(timeout=30)
    assert "Traceback" not in caplog.text
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")


def test_two_hundred_at_once(served, service):
    service.hold = threading.Event()

    async def all_of_them():
        limits = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(base_url=served.url, limits=limits, timeout=120) as http:
            asking = [http.post(f"/s/s{i}/v1/chat/completions", json=CHAT) for i in range(200)]
            asked = asyncio.gather(*asking)
            for _ in range(200):
                await asyncio.to_thread(service.running.acquire, timeout=60)
            service.hold.set()
            return await asked

    assert {got.status_code for got in run(all_of_them())} == {200}
    assert {session for session, _ in service.admitted} == {f"s{i}" for i in range(200)}


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
OBJECTS = "model messages role content tools type function name arguments tool_calls n prompt prompt_logprobs stream"
FIELDS = (
    "max_tokens logprobs stop tool_choice call_id output instructions echo top_logprobs input_schema stop_token_ids"
)
KINDS = "user assistant system tool text input tool_result tool_use input_text function_call thinking reasoning"
WORDS = st.sampled_from(f"{OBJECTS} {FIELDS} {KINDS} function_call_output".split())
VALUES = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=6),
)


@pytest.mark.parametrize("path", POSTS)
@examples(50)
@given(body=st.dictionaries(WORDS, VALUES, max_size=7))
def test_any_json_is_answered_or_refused(path, body):
    """Never with a 500, and a refusal says what is wrong."""
    http = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(create_app(FakeService())), base_url="http://127.0.0.1/s/s1"
    )
    good = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    for value in (body, {**good, "max_tokens": 5, **body}):
        got = run(http.post(path, json=value))
        assert got.status_code in (200, 400), got.text
        if got.status_code == 400:
            assert got.json()["error"]["message"]
