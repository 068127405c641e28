"""A guard between the SDK and the network, for the connections that rlkit makes and no others.

The SDK follows redirects with the key attached, asks again at once when a result cannot be fetched for a fault of the
server, and sends a training call again whose answer was lost, which a server that does not recognise repeated requests
carries out twice. Here no redirect is followed, a server in trouble is asked slowly, and a training call that may have
arrived is sent again only where that is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from rlkit._secrets import MASK, add_secret, redact
from rlkit.errors import UnsupportedError

if TYPE_CHECKING:
    import httpx

__all__ = [
    "DEDUPLICATES",
    "HEADER",
    "LOST",
    "Link",
    "Trouble",
    "add_secret",
    "clean",
    "install",
    "last_warning",
    "redact",
    "watch_logs",
]

_LOGGERS = ("tinker", "httpx", "httpcore")
_HEADERS = ("x-api-key", "authorization", "cf-access-client-secret")
_warned: tuple[float, str] | None = None

T = TypeVar("T")


def clean(error: BaseException) -> None:
    """Mask keys in a foreign error and all that are attached to it, in place: texts, requests and answers."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        left += [current.__cause__, current.__context__]
        if current.args != (args := _masked(current.args)):
            current.args = args
        for name in ("message", "body"):
            value = getattr(current, name, None)
            if value is not None and (masked := _masked(value)) != value:
                with contextlib.suppress(AttributeError):
                    setattr(current, name, masked)
        response = getattr(current, "response", None)
        _clean_headers(current)
        _clean_headers(response)
        if response is not None:
            _clean_content(response)


def _clean_content(response: httpx.Response) -> None:
    """Mask keys in an answer that was read, and in the request that a redirect would have led to."""
    if getattr(response, "next_request", None) is not None:
        response.next_request = None
    content = getattr(response, "_content", None)
    if isinstance(content, bytes) and (masked := _masked(content)) != content:
        response._content = masked  # noqa: SLF001  # it cannot be set otherwise
        vars(response).pop("_text", None)


def _masked(value: T) -> T:
    """Return ``value`` with every text in it redacted."""
    masked: object = value
    if isinstance(value, str):
        masked = redact(value)
    elif isinstance(value, bytes):
        masked = redact(value.decode("latin-1")).encode("latin-1")  # which any bytes survive unchanged
    elif isinstance(value, dict):
        masked = {_masked(k): _masked(v) for k, v in value.items()}
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):  # a named tuple takes other arguments
        masked = type(value)(_masked(x) for x in value)
    return cast("T", masked)


def _clean_headers(owner: object) -> None:
    """Mask the headers of an error's or an answer's request, which is not sent again."""
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # it has none
        headers = attrgetter("request.headers")(owner)
        for name in [name for name, value in headers.items() if name in _HEADERS or redact(value) != value]:
            headers[name] = MASK


class _Redact(logging.Filter):
    """Masks keys in a record's message, arguments and traceback, and remembers the SDK's last warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # a badly formatted record is shown by logging itself, without its arguments
            text, record.args = str(record.msg), ()
        masked = redact(text)
        if masked != text:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[1] is not None:
            clean(record.exc_info[1])
            record.exc_text = redact("".join(traceback.format_exception(*record.exc_info))).rstrip()
        if record.levelno >= logging.WARNING and record.name.partition(".")[0] == "tinker":
            global _warned  # noqa: PLW0603  # one for the process, as the SDK's loggers are
            _warned = (time.monotonic(), masked)
        return True


_filter = _Redact()


def watch_logs() -> None:
    """Mask keys in what the SDK and its HTTP client log, from now on; may be called again.

    Their loggers get a filter; those that are made later are met where records are made.
    """
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    for name in {*_LOGGERS, *names}:
        logging.getLogger(name).addFilter(_filter)  # which does nothing where the logger has it
    make = logging.getLogRecordFactory()
    if getattr(make, "rlkit_redacts", False):
        return

    def masking(*args: object, **options: object) -> logging.LogRecord:
        record = make(*args, **options)
        if record.name.partition(".")[0] in _LOGGERS:
            _filter.filter(record)
        return record

    masking.rlkit_redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(masking)


def last_warning(seconds: float) -> str | None:
    """Return what the SDK last warned of, such as a pause for capacity, unless that is longer ago than ``seconds``."""
    warning = _warned
    return warning[1] if warning is not None and time.monotonic() - warning[0] <= seconds else None


HEADER = "X-Rlkit-Connection"
DEDUPLICATES = "X-Rlkit-Deduplicates"  # of an answer of rlkit's own server: repeated requests are recognised
LOST = 424  # the status that the SDK is given for an answer that was lost: one that it does not try again after
SEAM = ("tinker.lib.internal_client_holder", "AsyncTinker")
_INTERVAL = 0.3  # seconds between requests to a server in trouble, and between questions for one result
_PATIENCE = 2  # failures in a row after which it is in trouble
_lock = threading.Lock()
_links: weakref.WeakValueDictionary[str, Link] = weakref.WeakValueDictionary()


class Trouble(NamedTuple):
    """What last went wrong: when (monotonic), the status or None for no answer, what was said of it."""

    time: float
    status: int | None
    text: str


class Client(Protocol):
    """What is used of an ``httpx.AsyncClient``, or replaced in it."""

    follow_redirects: bool
    _transport: object  # httpx's own, or the SDK's around pyqwest
    send: Callable[..., Awaitable[httpx.Response]]

    async def aclose(self) -> None:
        """Close its connections."""


class Link:
    """One connection of rlkit's: what its HTTP clients have in common.

    Args:
        resend: whether a training call that may have arrived is sent again; None: where the server says that it
            recognises repeated requests.

    Attributes:
        name: the value of ``HEADER`` that its clients are made with.
        trouble: what last went wrong, or None.
        closed: nothing is sent any more; what the SDK still tries in the background fails at once.
    """

    def __init__(self, *, resend: bool | None) -> None:
        self.name = uuid.uuid4().hex
        self.closed = False
        self.trouble: Trouble | None = None
        self._resend = resend
        self._clients: list[Client] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._next = 0.0
        _links[self.name] = self

    def guard(self, http: Client) -> None:
        """Make an ``httpx.AsyncClient`` send through this guard."""
        self._clients.append(http)
        http.follow_redirects = False
        transport = getattr(http, "_transport", None)
        if transport is not None and type(transport).__name__ == "AsyncPyqwestTransport":  # it follows redirects itself
            pyqwest = importlib.import_module("pyqwest")
            made = pyqwest.HTTPTransport(tls_include_system_certs=True, follow_redirects=False)
            http._transport = type(transport)(made)  # noqa: SLF001  # there is no other way to it
        http.send = partial(self.send, http.send)

    def close(self) -> None:
        """Send nothing any more, and close what is open; the SDK does not where connecting failed."""
        self.closed = True
        clients, self._clients, loop = self._clients, [], self._loop
        if loop is None or loop.is_closed():
            return

        async def close() -> None:
            await asyncio.gather(*(http.aclose() for http in clients), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), loop)

    async def send(
        self, send: Callable[..., Awaitable[httpx.Response]], request: httpx.Request, **options: object
    ) -> httpx.Response:
        """Return the answer to ``request``, by an HTTP client's own ``send``."""
        self._loop = asyncio.get_running_loop()
        if request.url.path.endswith("/telemetry"):  # the SDK reports the headers of requests that failed
            request = _redacted(request)
        await self._wait_for_turn()
        if self.closed:
            return _answer(request, "the connection is closed")
        started = time.monotonic()
        try:
            response = await send(request, **options)
        except Exception as error:
            self._failures += 1
            self.trouble = Trouble(time.monotonic(), None, f"{type(error).__name__}: {error}")
            if _arrived(error) and self._once(request):
                return _answer(request, f"the answer was lost ({self.trouble.text}), and {_WHY}")
            raise
        status = response.status_code
        trouble = status >= 500 or status in (409, 429)
        lost = trouble or _repeated(response)  # a 429, too: a proxy may answer so for a request that it passed on
        await self._note(response, trouble=trouble, lost=lost)
        if status == 408 or (trouble and request.url.path.endswith("/retrieve_future")):
            await asyncio.sleep(max(0.0, _INTERVAL - (time.monotonic() - started)))
        if lost and self._once(request):
            said = f": {self.trouble.text}" if self.trouble is not None and self.trouble.text else ""
            return _answer(request, f"the service answered {status}{said}, and {_WHY}")
        return response

    async def _note(self, response: httpx.Response, *, trouble: bool, lost: bool) -> None:
        """Keep what an answer tells of the service."""
        self._failures = self._failures + 1 if trouble else 0
        if lost:
            self.trouble = Trouble(time.monotonic(), response.status_code, await _detail(response))
        if self._resend is None and response.headers.get(DEDUPLICATES) == "1":
            self._resend = True

    async def _wait_for_turn(self) -> None:
        """After several failures let one request through an interval, and the others wait."""
        while self._failures >= _PATIENCE and not self.closed:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + _INTERVAL
                return
            await asyncio.sleep(self._next - now)

    def _once(self, request: httpx.Request) -> bool:
        return not self._resend and _trains(request)


_WHY = (
    "the call may have been carried out, so it is not sent again; connect with resend=True if the service recognises "
    "repeated requests"
)


def install() -> None:
    """Guard the HTTP clients of connections that send ``HEADER``; may be called again.

    Raises:
        UnsupportedError: the SDK has moved what this replaces.
    """
    module, name = importlib.import_module(SEAM[0]), SEAM[1]
    with _lock:
        make = getattr(module, name, None)
        if make is None:
            raise UnsupportedError(f"rlkit needs tinker 0.38, or a later one with {'.'.join(SEAM)}")
        if not getattr(make, "rlkit_guard", False):
            setattr(module, name, _guarding(make))


def _guarding(make: Callable[..., T]) -> Callable[..., T]:
    def guarded(**options: object) -> T:
        client = make(**options)
        name = cast("Mapping[str, str]", options.get("default_headers") or {}).get(HEADER)
        if name is not None:
            http = getattr(client, "_client", None)
            if http is None:
                raise UnsupportedError("rlkit needs tinker 0.38, or a later one whose clients have an HTTP client")
            (_links.get(name) or Link(resend=None)).guard(http)
        return client

    guarded.rlkit_guard = True  # type: ignore[attr-defined]
    guarded.__wrapped__ = make  # type: ignore[attr-defined]
    return guarded


def _arrived(error: Exception) -> bool:
    """Return whether the request may have reached the server although there is no answer."""
    import httpx

    return not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))


def _repeated(response: httpx.Response) -> bool:
    """Return whether the SDK takes the answer, no failure of the server's, as a reason to send the call again."""
    empty = response.status_code == 400 and response.headers.get("content-length", "0") == "0"
    return response.status_code in (402, 408) or empty


def _trains(request: httpx.Request) -> bool:
    """Return whether the request is an optimizer step or adds a gradient."""
    path = request.url.path
    if path.endswith("/optim_step"):
        return True
    if not path.endswith("/forward_backward"):
        return False
    try:
        messages = importlib.import_module("tinker.proto.tinker_public_pb2")
        body = request.content
        if request.headers.get("content-encoding") == "zstd":
            body = importlib.import_module("zstandard").ZstdDecompressor().decompress(body, max_output_size=2**30)
        return not messages.ForwardBackwardRequest.FromString(body).forward_only
    except Exception:  # noqa: BLE001  # of another form than is known: then it may
        return True


def _answer(request: httpx.Request, detail: str) -> httpx.Response:
    import httpx

    return httpx.Response(LOST, headers={"x-should-retry": "false"}, json={"detail": detail}, request=request)


def _redacted(request: httpx.Request) -> httpx.Request:
    """Return the request with keys masked in its JSON body."""
    import httpx

    text = request.content.decode("utf-8", "replace")
    masked = redact(text)
    if masked == text:
        return request
    headers = {name: value for name, value in request.headers.items() if name != "content-length"}
    return httpx.Request(
        request.method, request.url, headers=headers, content=masked.encode(), extensions=request.extensions
    )


async def _detail(response: httpx.Response) -> str:
    """Return what the answer says of itself; "" for nothing."""
    try:
        body = json.loads(await response.aread())
    except Exception:  # noqa: BLE001  # it may be anything
        return ""
    said = (body.get(key) for key in ("detail", "queue_state", "queue_state_reason")) if isinstance(body, dict) else ()
    return ": ".join(text for text in said if isinstance(text, str) and text)
