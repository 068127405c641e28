"""The endpoints: they map paths and keys of clients to APIs and sessions.

A sampler returns completions when they are done, not token by token. So a stream is written from the finished answer,
and until then the client gets comments, which every reader of such streams skips: so proxies and clients do not take
the connection for a dead one. An early answer or error sets the status of the response; an error after the first
comment is written into the stream, in the form of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rlkit import _check
from rlkit._runtime import VERSION, is_loopback
from rlkit._web import Guard, WebServer, find_key
from rlkit.backends.tokenizers import source_of
from rlkit.errors import DataError
from rlkit.gateway import _anthropic, _chat, _completions, _requests, _responses
from rlkit.gateway._requests import Call, Posted
from rlkit.gateway._session import Session
from rlkit.gateway._types import Event, GatewayError, Json, Reply

if TYPE_CHECKING:
    from rlkit.gateway._gateway import Gateway

__all__ = ["Server", "create_app"]

_LARGE = 256 * 2**10  # bodies above it are parsed in another thread, so that short requests are not held up
_SOON = 1.0  # seconds in which an answer decides about the status of a stream
_SILENCE = 5.0  # seconds between comments
_PATIENCE = 0  # seconds that running requests have when the server closes: their answers are of no more use
_OPEN: Final = re.compile(r"(/s/[^/]*)?/(health|ping|version)?")  # paths that need no key
_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_log = logging.getLogger(__name__)


@attrs.frozen
class Api:
    """How an endpoint reads and writes."""

    posted: type[Posted]
    write: Callable[[Call, Sequence[Reply]], Json]
    stream: Callable[[Call, Sequence[Reply]], Iterator[Event]]
    failed: Callable[[GatewayError], Event] = _chat.failed


_APIS: Final = {
    "/v1/chat/completions": Api(_requests.ChatRequest, _chat.write, _chat.stream),
    "/v1/completions": Api(_requests.CompletionsRequest, _completions.write, _completions.stream),
    "/v1/responses": Api(_requests.ResponsesRequest, _responses.write, _responses.stream, _responses.failed),
    "/v1/messages": Api(_requests.MessagesRequest, _anthropic.write, _anthropic.stream, _anthropic.failed),
}


def create_app(gateway: Gateway, *, loopback: bool = True, body_limit: int = 64 * 2**20) -> ASGIApp:
    """Return the endpoints of a gateway as an ASGI application.

    Args:
        gateway: admits clients and answers them.
        loopback: it listens on this machine alone, and accepts only this machine's own names as Host.
        body_limit: the largest body of a request, in bytes.
    """

    def admit(request: HttpRequest) -> bool:
        if _OPEN.fullmatch(request.url.path):
            return False
        named = re.match(r"/s/([^/]*)(?:/|$)", request.url.path)
        request.state.session = gateway.admit(named and named[1], find_key(request.headers))
        return True

    routes: list[BaseRoute] = [
        *(Route(path, _Endpoint(api), methods=["POST"]) for path, api in _APIS.items()),
        Route("/v1/messages/count_tokens", _count_tokens, methods=["POST"]),
        Route("/v1/models", _list_models),
        Route("/v1/models/{model:path}", _retrieve_model),
        *(Route(path, Response(), methods=["GET", "POST"]) for path in ("/", "/health", "/ping")),
        Route("/version", _respond(200, {"version": VERSION}), methods=["GET"]),
    ]
    handlers: dict[type[Exception], Callable[[HttpRequest, Any], Coroutine[Any, Any, Response]]] = {
        GatewayError: _write_failure,
        HTTPException: _refuse,
    }
    of_session = Mount("/s/{session}", Router(routes, redirect_slashes=False))
    app = Starlette(routes=[of_session, *routes], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, admit=admit, handlers=handlers, body_limit=body_limit, own_host=loopback)


@attrs.frozen(eq=False)
class _Endpoint:
    """An endpoint that samples. An ASGI application."""

    api: Api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            call = await _read_call(HttpRequest(scope, receive), self.api.posted)
            exchange = self._stream(call, send) if call.posted.stream else self._answer(call, scope, receive, send)
            await _cancel_on_disconnect(exchange, receive)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        with _bugs_as_errors():
            response = _respond(200, self.api.write(call, await _sample_all(call)))
        await response(scope, receive, send)

    async def _stream(self, call: Call, send: Send) -> None:
        async with contextlib.aclosing(self._chunks(call)) as chunks:
            first = await anext(chunks)  # an early error comes before the status is sent
            await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM)})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})

    async def _chunks(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield comments until the answer is there, and then its events, or its error. Raises an early GatewayError."""
        answer, wait = asyncio.ensure_future(_sample_all(call)), _SOON
        begun = False
        try:
            while not (await asyncio.wait({answer}, timeout=wait))[0]:
                yield b": waiting\n\n"
                wait, begun = _SILENCE, True
            with _bugs_as_errors():
                for name, data in self.api.stream(call, answer.result()):
                    yield encode_event(name, data)
                    begun = True
        except GatewayError as error:
            if not begun:
                raise
            yield encode_event(*self.api.failed(error))
        finally:
            answer.cancel()


async def _cancel_on_disconnect(exchange: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run an exchange; when its client closes the connection, cancel it."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    task, watcher = asyncio.ensure_future(exchange), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task})
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _sample_all(call: Call) -> list[Reply]:
    """Answer all requests of a call; when one fails, the others are cancelled."""
    running = [asyncio.ensure_future(call.session.answer(request)) for request in call.requests]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()


async def _read_call(request: HttpRequest, posted: type[Posted]) -> Call:
    """Read a request, and count it if it is not valid. Raises GatewayError, ClientDisconnect, or HTTPException."""
    session: Session = request.state.session
    try:
        raw = await request.body()
        value = await asyncio.to_thread(parse_object, raw) if len(raw) > _LARGE else parse_object(raw)
        with _bugs_as_errors():
            return _requests.read_posted(posted, value, session)
    except (GatewayError, HTTPException):
        session.refuse()
        raise


def parse_object(raw: bytes) -> Mapping[str, object]:
    """Return the JSON object of a request. Raises GatewayError."""
    try:
        value = json.loads(raw, parse_float=_check.finite, parse_constant=_check.finite)
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
    try:
        _check.depth("the body", value)
    except DataError as error:
        raise GatewayError(400, str(error)) from None
    return value


@contextlib.contextmanager
def _bugs_as_errors() -> Iterator[None]:
    """Log an unexpected exception; the client learns that it was not its fault, and nothing of the inside."""
    try:
        yield
    except GatewayError:
        raise
    except Exception as error:  # noqa: BLE001
        _log.exception("a request failed in the gateway")
        raise GatewayError(500, f"internal error: {type(error).__name__}", code="internal_error") from None


def dump_json(value: object) -> bytes:
    """Return strict JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can name: a policy may have written it so
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def encode_event(name: str | None, data: Json | str) -> bytes:
    r"""Return the bytes of a server-sent event.

    >>> encode_event("ping", {"type": "ping"}), encode_event(None, "[DONE]")
    (b'event: ping\ndata: {"type":"ping"}\n\n', b'data: [DONE]\n\n')
    """
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + (data.encode() if isinstance(data, str) else dump_json(data)) + b"\n\n"


async def _count_tokens(request: HttpRequest) -> Response:
    call = await _read_call(request, _requests.CountRequest)
    with _bugs_as_errors():
        return _respond(200, {"input_tokens": int((await call.session.render(call.requests[0])).size)})


async def _list_models(request: HttpRequest) -> Response:
    card = _describe_model(request)
    pages = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
    return _respond(200, {"data": [card], **(pages if _is_claude(request) else {"object": "list"})})


async def _retrieve_model(request: HttpRequest) -> Response:
    card, asked = _describe_model(request), request.path_params["model"]
    if asked != card["id"]:
        what = f"the model {asked[:100]!r} does not exist; this gateway serves {card['id']!r}"
        raise GatewayError(404, what, param="model", code="model_not_found")
    return _respond(200, card)


def _describe_model(request: HttpRequest) -> Json:
    """Return the policy's card, in the form of OpenAI, or of Anthropic."""
    session: Session = request.state.session
    name, length = session.model, session.max_length
    if _is_claude(request):
        created = "1970-01-01T00:00:00Z"  # clients require a date
        card: Json = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
        return {**card, "max_input_tokens": length, "max_tokens": length}
    root = source_of(session.tokenizer) or name  # as in vLLM: the model's source, where its tokenizer is found
    # rlkit.sampler knows by the owner that what it asks for is what is drawn.
    owner = "rlkit" if session.params is None else "rlkit, with its own sampling settings"
    card = {"id": name, "object": "model", "created": 0, "owned_by": owner, "root": root, "parent": None}
    return {**card, "max_model_len": length}


async def _refuse(request: HttpRequest, error: HTTPException) -> Response:
    """Return the response to an unknown path or method, and to a request that the guard refuses."""
    what, headers, where = error.detail, dict(error.headers or {}), f"{request.method} {request.url.path[:200]}"
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
    if code == "not_found":
        what = f"{where}: this gateway has no such endpoint"
    elif code == "method_not_allowed":
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))  # whose order is that of a set
        what = f"{where}: this endpoint takes {headers['Allow']}"
    return await _write_failure(request, GatewayError(error.status_code, what, code=code), headers)


async def _write_failure(
    request: HttpRequest, error: GatewayError, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response of an error, with headers that tell clients whether and when to retry."""
    retry = {"x-should-retry": "false"}
    if error.retry_after is not None:
        retry = {"x-should-retry": "true", "retry-after": str(max(1, math.ceil(error.retry_after)))}
    form = _anthropic.error if _is_claude(request) else _chat.error
    return _respond(error.status, form(error), {**(headers or {}), **retry})


def _is_claude(request: HttpRequest) -> bool:
    """Return whether a client speaks Anthropic's API."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


def _respond(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump_json(body), status, headers, media_type="application/json")


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
        app = create_app(gateway, loopback=is_loopback(host))
        super().__init__(app, host, port, name="gateway", patience=_PATIENCE)
