"""The endpoints: paths and keys of clients on one side, dialects and sessions on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlkit.gateway import streaming
from rlkit.gateway.answering import Running, unless_gone
from rlkit.gateway.dialects import anthropic, models, openai
from rlkit.gateway.dialects.call import Call, Json
from rlkit.gateway.dialects.chat import ChatCall
from rlkit.gateway.dialects.completions import CompletionCall
from rlkit.gateway.dialects.responses import ResponseCall
from rlkit.gateway.dialects.tokens import GenerateCall, detokenize, tokenize, tokenizer_info
from rlkit.gateway.incoming import Gone, check_origin, key_of, read_object
from rlkit.gateway.types import Answerer, GatewayError, Service

__all__ = ["App", "app"]

Handler: TypeAlias = Callable[[Mapping[str, object], Answerer], Call | Awaitable[Json]]
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


def app(service: Service, *, loopback: bool = True, body_limit: int = 64 * 2**20) -> App:
    """Return the endpoints of a gateway as an ASGI application.

    Args:
        service: lets clients in and answers them.
        loopback: it listens on this machine alone, and is asked under this machine's own names.
        body_limit: bytes that the body of a request may have.
    """
    running = Running()
    posts: list[BaseRoute] = [
        Route(path, _Endpoint(service, handler, form, body_limit, running), methods=["POST"])
        for path, (handler, form) in _POSTS.items()
    ]
    gets: list[BaseRoute] = [
        Route("/v1/models", _get(service, models.list_models)),
        Route("/v1/models/{model:path}", _get(service, models.retrieve_model)),
        *(Route(path, _healthy, methods=["GET", "POST"]) for path in ("/", "/health", "/ping")),
        Route("/tokenizer_info", _get(service, tokenizer_info)),
        Route("/version", _version),
    ]
    routes = [*posts, *gets]
    endpoints = Starlette(routes=[Mount("/s/{session}", routes=routes), *routes])
    endpoints.router.redirect_slashes = False
    endpoints.add_exception_handler(HTTPException, _no_route)
    return App(endpoints, running, loopback)


class _Endpoint:
    """One path that is posted to."""

    def __init__(self, service: Service, handler: Handler, form: ErrorForm, limit: int, running: Running) -> None:
        self._running = running
        self._service = service
        self._handler = handler
        self._form = form
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            answerer = _admit(self._service, scope, headers)
            with _counted(answerer):
                value = await read_object(headers, receive, self._limit)
            await unless_gone(self._exchange(value, answerer, send), receive)
        except Gone:
            return
        except GatewayError as error:
            await _write(send, error.status, self._form(error), _retry(error))

    async def _exchange(self, value: Mapping[str, object], answerer: Answerer, send: Send) -> None:
        """Answer one request. Raises GatewayError where nothing was sent yet."""
        made: Call | Awaitable[Json] | None = None
        begun = False
        try:
            with _counted(answerer):
                made = self._handler(value, answerer)
            if not isinstance(made, Call):
                await _write(send, 200, await made)
                return
            answer = self._running.begin(made)
            try:
                begun = made.stream and await streaming.waiting(answer, send)
                replies = await answer
            except asyncio.CancelledError:
                if not self._running.ended:
                    raise
                raise GatewayError(503, "the gateway was closed", code="closed") from None
            finally:
                answer.cancel()
            if not made.stream:
                await _write(send, 200, made.body(replies))
                return
            chunks = iter(streaming.encode(made.events(replies)))
            first = next(chunks)  # what fails, fails before the status is told
            if not begun:
                begun = await streaming.begin(send)
            await streaming.write(send, first, chunks)
        except GatewayError as error:
            problem = error
            if not begun:
                raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told that it was not its fault
            _log.exception("a request failed in the gateway")
            problem = GatewayError(500, f"internal error: {type(error).__name__}", code="internal_error")
            if not begun:
                raise problem from None
        else:
            return
        assert isinstance(made, Call)  # noqa: S101  # nothing else begins a stream
        await streaming.write(send, b"", streaming.encode(made.failed(self._form(problem))))


class App:
    """All endpoints, behind a guard that refuses what web pages send. An ASGI application; made by ``app``."""

    def __init__(self, endpoints: ASGIApp, running: Running, loopback: bool) -> None:
        self._app = endpoints
        self._running = running
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            check_origin(headers, loopback=self._loopback)
        except GatewayError as error:
            await _write(send, error.status, _form_of(scope["path"], headers)(error), _retry(error))
        else:
            await self._app(scope, receive, send)

    def end(self) -> None:
        """Cancel what is being answered, and refuse from now on: clients are told that the gateway was closed."""
        self._running.end()


@contextlib.contextmanager
def _counted(answerer: Answerer) -> Iterator[None]:
    """Have a request that is not valid counted by what would have answered it."""
    try:
        yield
    except GatewayError:
        answerer.refused()
        raise


def _admit(service: Service, scope: Scope, headers: Headers) -> Answerer:
    return service.admit(scope.get("path_params", {}).get("session"), key_of(headers))


def _get(
    service: Service, answer: Callable[[Answerer, Mapping[str, str], Headers], Json]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return an endpoint that is not posted to."""

    async def endpoint(request: HttpRequest) -> Response:
        try:
            body = answer(_admit(service, request.scope, request.headers), request.path_params, request.headers)
        except GatewayError as error:
            return _response(error.status, _form_of(request.url.path, request.headers)(error), _retry(error))
        return _response(200, body)

    return endpoint


async def _healthy(_: HttpRequest) -> Response:
    return Response(b"")


async def _version(_: HttpRequest) -> Response:
    import rlkit

    return _response(200, {"version": rlkit.__version__})


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path, allowed = request.url.path, dict(getattr(error, "headers", None) or {})
    what, code = "there is no such endpoint here", "not_found"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed["Allow"] = ", ".join(sorted(allowed["Allow"].split(", ")))  # whose order is that of a set
        what, code = f"this endpoint takes {allowed['Allow']}", "method_not_allowed"
    problem = GatewayError(status, f"{request.method} {path[:200]}: {what}", code=code)
    return _response(status, _form_of(path, request.headers)(problem), {**allowed, **_retry(problem)})


def _form_of(path: str, headers: Headers) -> ErrorForm:
    """Return how the client of a path reads errors."""
    return anthropic.error if "anthropic-version" in headers or "/v1/messages" in path else openai.error


def _retry(error: GatewayError) -> dict[str, str]:
    """Return the headers by which clients know whether to try again, and when."""
    if error.retry_after is None:
        return {"x-should-retry": "false"}
    return {"x-should-retry": "true", "retry-after": str(max(1, math.ceil(error.retry_after)))}


def _response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(streaming.dumps(body), status, headers, media_type="application/json")


async def _write(send: Send, status: int, body: Json, headers: Mapping[str, str] | None = None) -> None:
    response: Any = _response(status, body, headers)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
