"""Requests that are answered later: ids, order, repeated delivery, results.

A client numbers the requests of one model (``seq_id``). They are carried out in that order whatever order they arrive
in, and a request that arrives twice, because its first answer was lost, is carried out once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import attrs

from rlkit.errors import ConfigError, DataError, RlkitError, UnknownNameError, UnsupportedError
from rlkit.server.requests import ApiError, Response

__all__ = ["Entry", "Futures", "Line"]

Submit = Callable[[Callable[[], None]], object]  # has a job carried out: a worker's submit
_KEPT = 512  # results that were read and are kept for a client that did not get them
_LIMIT = 20_000  # requests that are kept in all


@attrs.define(eq=False)
class Entry:
    """A request that was accepted.

    Attributes:
        request_id: what the client asks for.
        operation: such as "optim_step".
        accepted: the answer to the request itself.
        future: set to the Response, or to the exception, once it was carried out.
        waits_for: the seq_id that has to come first, while it has not.
        since: when it was accepted (monotonic).
        key: its identity, the same for a request that arrives again.
    """

    request_id: str
    operation: str
    accepted: dict[str, object]
    future: concurrent.futures.Future[Response] = attrs.field(factory=concurrent.futures.Future)
    waits_for: int | None = None
    since: float = attrs.field(factory=time.monotonic)
    key: Hashable = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def carry_out(self, job: Callable[[], Response]) -> None:
        """Run ``job`` and keep what comes of it; nothing, if the request was cancelled or given up."""
        with self._lock:
            if self.future.done() or not self.future.set_running_or_notify_cancel():
                return
        try:
            self.future.set_result(job())
        except BaseException as error:  # noqa: BLE001  # whoever reads the result gets it
            self.future.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Fails a request that has not started."""
        with self._lock:
            if not self.future.done() and not self.future.running():
                self.future.set_exception(error)


class Futures:
    """All requests that were accepted.

    Args:
        dedupe: carry out a request that arrives twice once. False is a server without at-most-once delivery.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
    """

    def __init__(self, *, dedupe: bool = True, patience: float = 30.0) -> None:
        self.dedupe = dedupe
        self.patience = patience
        self._entries: dict[str, Entry] = {}
        self._keys: dict[Hashable, Entry] = {}
        self._read: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def known(self, key: Hashable) -> Entry | None:
        """Return the request of that identity, if it came before and repeats are recognised."""
        with self._lock:
            return self._keys.get(key) if self.dedupe else None

    def add(self, key: Hashable, operation: str, **accepted: object) -> Entry:
        """Add a request. ``key`` is its identity, ``accepted`` goes into the answer beside ``request_id``."""
        with self._lock:
            request_id = f"{operation}-{next(self._numbers):06d}"
            entry = Entry(request_id, operation, {"request_id": request_id, **accepted}, key=key)
            self._entries[request_id] = entry
            self._keys[key] = entry
            while len(self._entries) > _LIMIT and (oldest := next(iter(self._entries.values()))).future.done():
                self._forget(oldest)
            return entry

    def find(self, request_id: str) -> Entry:
        """Return the request of that id.

        Raises:
            ApiError: 410, it was read long ago; 404, there was none.
        """
        with self._lock:
            entry, gone = self._entries.get(request_id), request_id in self._gone
        if entry is None:
            raise ApiError(410 if gone else 404, f"request {request_id!r} is {'no longer kept' if gone else 'unknown'}")
        return entry

    def retrieve(self, request_id: str) -> Response:
        """Return the result of a request.

        Raises:
            ApiError: 408, not yet; otherwise as ``find``.
        """
        entry = self.find(request_id)
        if not entry.future.done() and entry.waits_for is not None and self.left(entry) <= 0:
            message = (
                f"{entry.operation}: the request with seq_id {entry.waits_for}, which comes before it, never arrived; "
                "make a new client from the last saved state"
            )
            entry.give_up(ApiError(400, message))
        if not entry.future.done():
            raise ApiError(408, "not yet", type="try_again", request_id=request_id, queue_state="active")
        if entry.future.cancelled():
            raise ApiError(410, f"request {request_id!r} was cancelled")
        self._mark_read(request_id)
        error = entry.future.exception()
        return entry.future.result() if error is None else failed(error)

    def left(self, entry: Entry) -> float:
        """Seconds until a request that waits for another fails."""
        return entry.since + self.patience - time.monotonic()

    def cancel(self, request_id: str) -> None:
        """Drop a request that has not started."""
        self.find(request_id).future.cancel()

    def _mark_read(self, request_id: str) -> None:
        with self._lock:
            self._read[request_id] = None
            while len(self._read) > _KEPT:
                old, _ = self._read.popitem(last=False)
                if old in self._entries:
                    self._forget(self._entries[old])

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        self._gone[entry.request_id] = None
        if len(self._gone) > _LIMIT:
            self._gone.popitem(last=False)
        if self._keys.get(entry.key) is entry:
            del self._keys[entry.key]


class Line:
    """The requests of one model, carried out in the order of their seq_ids from ``first`` on, one behind the other."""

    def __init__(self, run: Submit, first: int = 1) -> None:
        self._run = run
        self._next = first
        self._held: dict[int, tuple[Entry, Callable[[], Response]] | None] = {}  # None: refused
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def enter(self, seq_id: int | None, entry: Entry, job: Callable[[], Response]) -> None:
        """Has ``job`` carried out once its turn has come; without a seq_id, or with one that was had, at once."""
        with self._lock:
            if seq_id is None or seq_id < self._next:
                self._refused.discard(-1 if seq_id is None else seq_id)
                self._run(functools.partial(entry.carry_out, job))
                return
            self._held[seq_id] = (entry, job)
            entry.waits_for = self._next
            self._go_on()

    def skip(self, seq_id: int | None) -> None:
        """Skip the turn of a request that was refused."""
        with self._lock:
            if seq_id is not None and seq_id >= self._next and seq_id not in self._held:
                self._held[seq_id] = None
                self._refused.add(seq_id)
                self._go_on()

    def had(self, seq_id: int | None) -> bool:
        """Whether a request of that number was carried out, or will be."""
        with self._lock:
            return seq_id is not None and seq_id not in self._refused and (seq_id < self._next or seq_id in self._held)

    def _go_on(self) -> None:
        while self._next in self._held:
            request = self._held.pop(self._next)
            self._next += 1
            if request is not None:
                request[0].waits_for = None
                self._run(functools.partial(request[0].carry_out, request[1]))
        for request in self._held.values():
            if request is not None:
                request[0].waits_for = self._next


def failed(error: BaseException) -> Response:
    """Return the result of a request that failed: whose fault it was, and why."""
    users = isinstance(error, (ConfigError, DataError, UnknownNameError, UnsupportedError)) or (
        isinstance(error, ApiError) and error.status < 500
    )
    message = str(error) if isinstance(error, (RlkitError, ApiError)) else f"{type(error).__name__}: {error}"
    return Response.json({"error": message, "category": "user" if users else "server"})
