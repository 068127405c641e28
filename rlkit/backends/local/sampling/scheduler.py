"""The sampling scheduler: requests of many callers, decoded together.

It is the background work of the backend's one worker thread. Requests wait in a queue; those of one snapshot form a
wave, join it while it runs, and leave it row by row as they end.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch

from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.requests import SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.memory import telling
from rlkit.backends.worker import check_process
from rlkit.errors import BackendError

__all__ = ["Scheduler"]

Request: TypeAlias = SampleRequest | ScoreRequest

QUIET = 0.001  # an idle scheduler waits until no request came for this long,
PATIENCE = 0.010  # but not longer than this after the first


class Scheduler:
    """Decodes what is submitted; see ``rlkit.backends.worker.Background``.

    Args:
        make_decoder: builds what decodes, at first use.
        max_rows: rows decoded together at most.
    """

    def __init__(self, make_decoder: Callable[[], Decoder], max_rows: int) -> None:
        self._make_decoder = make_decoder
        self._max_rows = max_rows
        self.decoder: Decoder | None = None
        self._wave: weakref.ref[Snapshot] | None = None
        self._wave_began = 0.0
        self.waiting: deque[Request] = deque()
        self._lock = threading.Lock()
        self._last_arrival = 0.0
        self._stopped = False
        self._process = os.getpid()
        self.wake: Callable[[], None] = lambda: None

    def submit(self, request: Request) -> None:
        """Queue a request; from any thread."""
        check_process("local", self._process)
        with self._lock:
            if self._stopped:
                raise BackendError("the local backend is closed")
            self.waiting.append(request)
            self._last_arrival = request.arrived
        self.wake()

    def delay(self) -> float | None:
        """Seconds until there is work; None where there is none."""
        if self.decoder is not None and self.decoder.rows:
            return 0
        with self._lock:
            if not self.waiting:
                return None
            now = time.monotonic()
            due = min(self._last_arrival + QUIET, self.waiting[0].arrived + PATIENCE)
            return max(0.0, due - now)

    @torch.no_grad()
    def turn(self) -> None:
        """Admit what can be admitted, and decode one token of every row."""
        started: list[Request] = []
        try:
            if self.decoder is None:
                self.decoder = self._make_decoder()
            self._forget(self.decoder)
            self._admit(self.decoder, started)
            rows = self.decoder.rows
            if rows:
                with telling(lambda: self._describe(len(rows), max(row.position for row in rows) + 1)):
                    self.decoder.step()
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it; the scheduler goes on
            self._fail(started, error)

    def invariant(self, snapshot: Snapshot) -> bool:
        """See ``Decoder.invariant``; with the weights that are there, or else those of ``snapshot``."""
        if self.decoder is None:
            self.decoder = self._make_decoder()
        if self._wave is None:
            self.decoder.use(snapshot)
        return self.decoder.invariant()

    def stop(self) -> None:
        """Fail whatever is left."""
        with self._lock:
            self._stopped = True
            left = list(self.waiting)
            self.waiting.clear()
        self._fail(left, BackendError("the local backend was closed before this was sampled"))
        self.decoder = None

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        """Fail these and those being decoded; where there are none, all that wait, or they would fail for ever."""
        rows = self.decoder.abandon() if self.decoder is not None else []
        victims = [*requests, *(row.request for row in rows)]
        with self._lock:
            victims = victims or list(self.waiting)
            gone = {id(request) for request in victims}
            self.waiting = deque(request for request in self.waiting if id(request) not in gone)
        _refuse(victims, error)

    def _forget(self, decoder: Decoder) -> None:
        """Drop what nobody waits for any more."""
        gone: list[Request] = [row.request for row in decoder.rows if row.request.dropped]
        if gone:
            decoder.forget()
        with self._lock:
            gone += [request for request in self.waiting if request.dropped]
            if gone:
                self.waiting = deque(request for request in self.waiting if not request.dropped)
        _refuse(gone, BackendError("nobody waited for this any more, so it was given up; ask for it again"))

    def _describe(self, rows: int, longest: int) -> str:
        return f"{rows} completions of up to {longest} tokens; lower max_rows ({self._max_rows}) or prefix_mb"

    def _admit(self, decoder: Decoder, started: list[Request]) -> None:
        with self._lock:
            first = self.waiting[0].snapshot if self.waiting and not decoder.rows else None
            if first is not None:
                self._wave = weakref.ref(first)
                self._wave_began = time.monotonic()
        if first is not None:
            with telling(lambda: "weights to sample from; connect with merge=False, which needs no copy of them"):
                decoder.use(first)
        room = self._max_rows - len(decoder.rows) if decoder.mixes or not decoder.rows else 0
        admitted: list[tuple[SampleRequest, int]] = []
        while (request := self._next(room)) is not None:
            started.append(request)
            if isinstance(request, ScoreRequest):
                with telling(partial("logprobs of {} tokens; ask for shorter texts".format, request.tokens.size)):
                    decoder.score(request)
                request.finish()
                continue
            count = min(len(request.rngs) - request.started, room)
            admitted.append((request, count))
            room = room - count if decoder.mixes else 0
        if admitted:
            longest = max(request.prompt.size for request, _ in admitted)
            with telling(lambda: self._describe(len(decoder.rows) + sum(count for _, count in admitted), longest + 1)):
                decoder.start(admitted)

    def _next(self, room: int) -> Request | None:
        """Return the first request of the wave's snapshot with room for it; off the queue once all of it has begun.

        While requests of another snapshot wait, those that came after the wave began do not join it, so that it runs
        out.
        """
        with self._lock:
            wave = self._wave() if self._wave is not None else None
            others = any(request.snapshot is not wave for request in self.waiting)
            for i, request in enumerate(self.waiting):
                if request.snapshot is not wave or (others and request.arrived > self._wave_began):
                    continue
                if isinstance(request, ScoreRequest):
                    del self.waiting[i]
                    return request
                if room <= 0:
                    continue
                if len(request.rngs) - request.started <= room:
                    del self.waiting[i]
                return request
        return None


def _refuse(requests: Iterable[Request], error: BaseException) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_exception(error)
