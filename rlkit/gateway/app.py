"""The endpoints: they map paths and keys of clients to dialects and sessions.

A sampler returns completions when they are done, not token by token. So a stream is written from the finished answer,
in several parts, and until then the client gets comments, which every reader of such streams skips: so proxies and
clients do not take the connection for a dead one. An early answer or error sets the status of the response; an error
after the first comment is written into the stream, in the dialect's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

import attrs
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlkit._runtime import VERSION, is_loopback
from rlkit._web import Guard, WebServer, let_in
from rlkit.gateway._session import Session
from rlkit.gateway.dialects import anthropic, models, openai
from rlkit.gateway.dialects.body import Call, Event, Json
from rlkit.gateway.dialects.chat import ChatCall
from rlkit.gateway.dialects.completions import CompletionCall, GenerateCall, detokenize, tokenize, tokenizer_info
from rlkit.gateway.dialects.responses import ResponseCall
from rlkit.gateway.types import GatewayError, Reply

if TYPE_CHECKING:
    from rlkit.gateway._gateway import Gateway

__all__ = ["App", "Server", "app"]


class Running:
    """The requests in progress, in any event loop."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._answers: set[asyncio.Task[list[Reply]]] = set()

    def begin(self, call: Call) -> asyncio.Task[list[Reply]]:
        """Start to answer a call. Raises GatewayError after ``end``."""
        with self._lock:
            if self.ended:
                raise GatewayError(503, "the gateway was closed", code="closed")
            answer = asyncio.get_running_loop().create_task(_replies(call))
            self._answers.add(answer)
        answer.add_done_callback(self._done)
        return answer

    def end(self) -> None:
        """Cancel all of them. May be called from any thread."""
        with self._lock:
            self.ended = True
            answers = list(self._answers)
        for answer in answers:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                answer.get_loop().call_soon_threadsafe(answer.cancel)

    def _done(self, answer: asyncio.Task[list[Reply]]) -> None:
        with self._lock:
            self._answers.discard(answer)


async def unless_gone(exchange: Awaitable[None], receive: Receive) -> None:
    """Run an exchange; when the client closes the connection, cancel it."""
    running = asyncio.ensure_future(exchange)
    left = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({running, left}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, left):
            task.cancel()
        await asyncio.gather(running, left, return_exceptions=True)


async def _replies(call: Call) -> list[Reply]:
    """Answer all requests of a call; when one fails, the others are cancelled."""
    running = [asyncio.ensure_future(call.session.answer(request)) for request in call.requests]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()


_LARGE = 256 * 2**10  # bodies above it are parsed in another thread, so that short requests are not held up
_LINGER = 2.0  # seconds in which a refused client may go on sending, so that it reads the answer


class Gone(Exception):
    """The client closed the connection."""


def key_of(headers: Headers) -> str | None:
    """Return the API key, as OpenAI's clients or Anthropic's send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None) or None


async def read_object(headers: Headers, receive: Receive, limit: int) -> Mapping[str, object]:
    """Return the JSON object of a request. Raises GatewayError, or Gone."""
    if headers.get("content-encoding", "identity") != "identity":
        raise GatewayError(415, "the body is compressed; expected an uncompressed one")
    length = headers.get("content-length", "0")
    body, more = bytearray(), True
    too_long = length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit)
    while more and not too_long:
        part, more = await _next(receive)
        body += part
        too_long = len(body) > limit
    if too_long:
        del body
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while more:
                    _, more = await _next(receive)
        raise GatewayError(413, f"the body is too large; expected at most {limit} bytes", code="request_too_large")
    raw = bytes(body)
    return await asyncio.to_thread(_object, raw) if len(raw) > _LARGE else _object(raw)


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Gone
    return message.get("body", b""), message.get("more_body", False)


def _object(raw: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(raw, parse_constant=_not_json)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode-escape").decode()
        problem = f"the body has {half}, half of a surrogate pair; expected valid text"
        raise GatewayError(400, problem, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise GatewayError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_SOON = 1.0  # seconds in which an answer decides about the status
_SILENCE = 5.0  # seconds between comments
_CHUNK = 2**16  # bytes that are sent at once, so that a client that does not read holds the stream up


def dumps(value: object) -> bytes:
    """Return strict JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can name: a policy may have written it so
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def encode(events: Iterable[Event]) -> Iterable[bytes]:
    r"""Yield the bytes of events, many at a time.

    >>> b"".join(encode([("ping", {"type": "ping"}), (None, "[DONE]")]))
    b'event: ping\ndata: {"type":"ping"}\n\ndata: [DONE]\n\n'
    """
    buffer = bytearray()
    for name, data in events:
        if name is not None:
            buffer += b"event: " + name.encode() + b"\n"
        buffer += b"data: " + (data.encode() if isinstance(data, str) else dumps(data)) + b"\n\n"
        if len(buffer) > _CHUNK:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def waiting(answer: asyncio.Future[list[Reply]], send: Send) -> bool:
    """Wait for an answer; return whether the stream was started because the answer was late."""
    await asyncio.wait([answer], timeout=_SOON)
    if answer.done():
        return False
    await begin(send)
    while not answer.done():
        await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
        await asyncio.wait([answer], timeout=_SILENCE)
    return True


async def begin(send: Send) -> bool:
    """Send the status of a stream; return True."""
    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
    return True


async def write(send: Send, first: bytes, chunks: Iterable[bytes]) -> None:
    """Send the given bytes, and the end of a stream."""
    for chunk in (first, *chunks):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


Handler: TypeAlias = Callable[[Mapping[str, object], Session], Call | Awaitable[Json]]
ErrorForm: TypeAlias = Callable[[GatewayError], Json]

_log = logging.getLogger(__name__)
_POSTS: Final[Mapping[str, tuple[Handler, ErrorForm]]] = {
    "/v1/chat/completions": (ChatCall.parse, openai.error),
    "/v1/completions": (CompletionCall.parse, openai.error),
    "/v1/responses": (ResponseCall.parse, openai.error),
    "/v1/messages": (anthropic.MessagesCall.parse, anthropic.error),
    "/v1/messages/count_tokens": (anthropic.count_tokens, anthropic.error),
    "/inference/v1/generate": (GenerateCall.parse, openai.error),
    "/tokenize": (tokenize, openai.error),
    "/detokenize": (detokenize, openai.error),
}


def app(gateway: Gateway, *, loopback: bool = True, body_limit: int = 64 * 2**20) -> App:
    """Return the endpoints of a gateway as an ASGI application.

    Args:
        gateway: admits clients and answers them.
        loopback: it listens on this machine alone, and accepts only this machine's own names as Host.
        body_limit: the largest body of a request, in bytes.
    """
    running = Running()
    posts: list[BaseRoute] = [
        Route(path, _Endpoint(gateway, handler, form, body_limit, running), methods=["POST"])
        for path, (handler, form) in _POSTS.items()
    ]
    gets: list[BaseRoute] = [
        Route("/v1/models", _get(gateway, models.list_models)),
        Route("/v1/models/{model:path}", _get(gateway, models.retrieve_model)),
        *(Route(path, _healthy, methods=["GET", "POST"]) for path in ("/", "/health", "/ping")),
        Route("/tokenizer_info", _get(gateway, tokenizer_info)),
        Route("/version", _version),
    ]
    routes = [*posts, *gets]
    endpoints = Starlette(routes=[Mount("/s/{session}", routes=routes), *routes])
    endpoints.router.redirect_slashes = False
    endpoints.add_exception_handler(HTTPException, _no_route)
    guard = Guard(
        endpoints,
        admit=lambda request: False,  # its endpoints admit clients themselves
        handlers={HTTPException: _refused},
        body_limit=body_limit,
        own_host=loopback,
    )
    return App(guard, running)


@attrs.frozen(eq=False)
class _Endpoint:
    """An endpoint for POST requests."""

    gateway: Gateway
    handler: Handler
    form: ErrorForm
    limit: int
    running: Running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            session = _admit(self.gateway, scope, headers)
            with _counted(session):
                value = await read_object(headers, receive, self.limit)
            await unless_gone(self._exchange(value, session, scope, receive, send), receive)
        except Gone:
            return
        except GatewayError as error:
            await _failure(error, self.form)(scope, receive, send)

    async def _exchange(
        self, value: Mapping[str, object], session: Session, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request. Raises GatewayError if no response was sent yet."""
        made: Call | Awaitable[Json] | None = None
        begun = False
        try:
            with _counted(session):
                made = self.handler(value, session)
            if not isinstance(made, Call):
                await _response(200, await made)(scope, receive, send)
                return
            answer = self.running.begin(made)
            try:
                begun = made.stream and await waiting(answer, send)
                replies = await answer
            except asyncio.CancelledError:
                if not self.running.ended:
                    raise
                raise GatewayError(503, "the gateway was closed", code="closed") from None
            finally:
                answer.cancel()
            if not made.stream:
                await _response(200, made.body(replies))(scope, receive, send)
                return
            chunks = iter(encode(made.events(replies)))
            first = next(chunks)  # errors come before the status is sent
            if not begun:
                begun = await begin(send)
            await write(send, first, chunks)
        except GatewayError as error:
            problem = error
            if not begun:
                raise
        except Exception as error:  # noqa: BLE001  # the client learns that it was not its fault
            _log.exception("a request failed in the gateway")
            problem = GatewayError(500, f"internal error: {type(error).__name__}", code="internal_error")
            if not begun:
                raise problem from None
        else:
            return
        assert isinstance(made, Call)  # noqa: S101  # only these begin a stream
        await write(send, b"", encode(made.failed(self.form(problem))))


@attrs.frozen(eq=False)
class App:
    """All endpoints, with a guard that refuses requests of web pages. An ASGI application; made by ``app``."""

    endpoints: ASGIApp
    running: Running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.endpoints(scope, receive, send)

    def end(self) -> None:
        """Cancel the requests in progress and refuse new ones: clients learn that the gateway was closed."""
        self.running.end()


@contextlib.contextmanager
def _counted(session: Session) -> Iterator[None]:
    """Count an invalid request at the session that would have answered it."""
    try:
        yield
    except GatewayError:
        session.refused()
        raise


def _admit(gateway: Gateway, scope: Scope, headers: Headers) -> Session:
    session = gateway.admit(scope.get("path_params", {}).get("session"), key_of(headers))
    let_in(scope)
    return session


def _get(
    gateway: Gateway, answer: Callable[[Session, Mapping[str, str], Headers], Json]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return an endpoint for GET requests."""

    async def endpoint(request: HttpRequest) -> Response:
        try:
            body = answer(_admit(gateway, request.scope, request.headers), request.path_params, request.headers)
        except GatewayError as error:
            return _failure(error, _form_of(request.url.path, request.headers))
        return _response(200, body)

    return endpoint


async def _healthy(_: HttpRequest) -> Response:
    return Response(b"")


async def _version(_: HttpRequest) -> Response:
    return _response(200, {"version": VERSION})


async def _refused(request: HttpRequest, error: HTTPException) -> Response:
    code = "request_too_large" if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    problem = GatewayError(error.status_code, error.detail, code=code)
    return _failure(problem, _form_of(request.url.path, request.headers))


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if isinstance(error, HTTPException) and status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # from the guard
        return await _refused(request, error)
    path, allowed = request.url.path, dict(getattr(error, "headers", None) or {})
    what, code = "this gateway has no such endpoint", "not_found"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed["Allow"] = ", ".join(sorted(allowed["Allow"].split(", ")))  # whose order is that of a set
        what, code = f"this endpoint takes {allowed['Allow']}", "method_not_allowed"
    problem = GatewayError(status, f"{request.method} {path[:200]}: {what}", code=code)
    return _failure(problem, _form_of(path, request.headers), allowed)


def _form_of(path: str, headers: Headers) -> ErrorForm:
    """Return the form of errors for the client of a path."""
    return anthropic.error if "anthropic-version" in headers or "/v1/messages" in path else openai.error


def _failure(error: GatewayError, form: ErrorForm, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    """Return the response of an error, with headers that tell clients whether and when to retry."""
    retry = {"x-should-retry": "false"}
    if error.retry_after is not None:
        retry = {"x-should-retry": "true", "retry-after": str(max(1, math.ceil(error.retry_after)))}
    return _response(error.status, form(error), {**headers, **retry})


def _response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


_PATIENCE = 2  # seconds that running requests have when the server closes


class Server(WebServer):
    """A gateway that listens. A context manager.

    Args:
        gateway: admits clients and answers them.
        host: a name or address of this machine.
        port: 0: a free one.

    Raises:
        BackendError: it cannot listen there.
    """

    def __init__(self, gateway: Gateway, host: str = "127.0.0.1", port: int = 0) -> None:
        self._app = app(gateway, loopback=is_loopback(host))
        super().__init__(self._app, host, port, name="gateway", patience=_PATIENCE)

    def close(self) -> None:
        """Stop listening; waiting clients learn that the gateway was closed. May be called twice."""
        self._app.end()
        super().close()
