"""What stands between the SDK and the network, for the connections that rlkit makes and for no others.

The SDK follows redirects with the key attached, asks again at once when a result cannot be fetched for a fault of the
server, and sends a training call again whose answer was lost, which a server that does not recognise repeated requests
carries out twice. Here no redirect is followed, a server in trouble is asked slowly, and a training call that may have
arrived is sent again only where that is safe.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from rlkit.backends.tinker import secrets
from rlkit.errors import UnsupportedError

__all__ = ["DEDUPLICATES", "HEADER", "LOST", "Link", "Trouble", "install"]

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
        self._clients: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._next = 0.0
        _links[self.name] = self

    def guard(self, http: Any) -> None:
        """Have an ``httpx.AsyncClient`` send by way of this."""
        self._clients.append(http)
        http.follow_redirects = False
        transport: Any = getattr(http, "_transport", None)
        if type(transport).__name__ == "AsyncPyqwestTransport":  # it follows redirects itself
            pyqwest = importlib.import_module("pyqwest")
            made = pyqwest.HTTPTransport(tls_include_system_certs=True, follow_redirects=False)
            http._transport = type(transport)(made)  # noqa: SLF001  # there is no other way to it
        send = http.send
        http.send = lambda request, **options: self.send(send, request, **options)

    def close(self) -> None:
        """Send nothing any more, and close what is open; the SDK does not where connecting failed."""
        self.closed = True
        clients, self._clients, loop = self._clients, [], self._loop
        if loop is None or loop.is_closed():
            return

        async def close() -> None:
            await asyncio.gather(*(http.aclose() for http in clients), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), loop)

    async def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Return the answer to ``request``, by an HTTP client's own ``send``."""
        self._loop = asyncio.get_running_loop()
        if request.url.path.endswith("/telemetry"):  # the SDK reports the headers of requests that failed
            request = _redacted(request)
        while self._failures >= _PATIENCE and not self.closed:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + _INTERVAL
                break
            await asyncio.sleep(self._next - now)
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
        self._failures = self._failures + 1 if trouble else 0
        if trouble or _repeated(response):
            self.trouble = Trouble(time.monotonic(), status, await _detail(response))
        if self._resend is None and response.headers.get(DEDUPLICATES) == "1":
            self._resend = True
        if status == 408 or (trouble and request.url.path.endswith("/retrieve_future")):
            await asyncio.sleep(max(0.0, _INTERVAL - (time.monotonic() - started)))
        lost = (trouble and status != 429) or _repeated(response)  # by a 429 a server says that it did nothing
        if lost and self._once(request):
            said = f": {self.trouble.text}" if self.trouble is not None and self.trouble.text else ""
            return _answer(request, f"the service answered {status}{said}, and {_WHY}")
        return response

    def _once(self, request: Any) -> bool:
        return not self._resend and _trains(request)


_WHY = (
    "the call is not sent again, as it may have been carried out; connect with resend=True to a service that "
    "recognises repeated requests"
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


def _guarding(make: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(**options: Any) -> Any:
        client = make(**options)
        name = (options.get("default_headers") or {}).get(HEADER)
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
    httpx = importlib.import_module("httpx")
    return not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))


def _repeated(response: Any) -> bool:
    """Return whether the SDK takes the answer, no failure of the server's, as a reason to send the call again."""
    empty = response.status_code == 400 and response.headers.get("content-length", "0") == "0"
    return response.status_code in (402, 408) or empty


def _trains(request: Any) -> bool:
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


def _answer(request: Any, detail: str) -> Any:
    httpx = importlib.import_module("httpx")
    return httpx.Response(LOST, headers={"x-should-retry": "false"}, json={"detail": detail}, request=request)


def _redacted(request: Any) -> Any:
    """Return the request with keys masked in its JSON body."""
    text = request.content.decode("utf-8", "replace")
    masked = secrets.redact(text)
    if masked == text:
        return request
    httpx = importlib.import_module("httpx")
    headers = {name: value for name, value in request.headers.items() if name != "content-length"}
    return httpx.Request(
        request.method, request.url, headers=headers, content=masked.encode(), extensions=request.extensions
    )


async def _detail(response: Any) -> str:
    """Return what the answer says of itself; "" for nothing."""
    try:
        body = json.loads(await response.aread())
    except Exception:  # noqa: BLE001  # it may be anything
        return ""
    said = (body.get(key) for key in ("detail", "queue_state", "queue_state_reason")) if isinstance(body, dict) else ()
    return ": ".join(text for text in said if isinstance(text, str) and text)
