"""What stands between the SDK and the network: no redirect is followed, and a server in trouble is asked slowly.

The SDK follows redirects with the key attached, and asks again at once when a result can not be fetched for a fault
of the server. Both are changed for the clients that rlkit makes, told by a header, and for no others.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from rlkit.errors import UnsupportedError

__all__ = ["HEADER", "install"]

HEADER = "X-Rlkit-Client"
SEAM = ("tinker.lib.internal_client_holder", "AsyncTinker")
_INTERVAL = 0.25  # seconds between requests to a server in trouble
_PATIENCE = 3  # failures in a row after which it is in trouble
_POLL = 0.25  # shortest time in which an answer "not yet" is believed
_lock = threading.Lock()


def install() -> None:
    """Guards the HTTP clients of connections that send ``HEADER``; may be called again.

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
        if HEADER in (options.get("default_headers") or {}):
            http = getattr(client, "_client", None)
            if http is None:
                raise UnsupportedError("rlkit needs tinker 0.38, or a later one whose clients have an HTTP client")
            http.follow_redirects = False
            http.send = _Paced(http.send)
        return client

    guarded.rlkit_guard = True  # type: ignore[attr-defined]
    return guarded


class _Paced:
    """``send`` of an HTTP client, at most four times a second while every answer is a failure."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send
        self._failures = 0
        self._next = 0.0

    async def __call__(self, request: Any, **options: Any) -> Any:
        if self._failures >= _PATIENCE:
            now = time.monotonic()
            self._next = max(now, self._next + _INTERVAL)
            await asyncio.sleep(self._next - now)
        started = time.monotonic()
        try:
            response = await self._send(request, **options)
        except Exception:
            self._failures += 1
            raise
        if response.status_code >= 500 or response.status_code == 429:
            self._failures += 1
        else:
            self._failures = 0
        if response.status_code == 408:  # "not yet", which a server says when it has waited for a while
            await asyncio.sleep(max(0.0, _POLL - (time.monotonic() - started)))
        return response
