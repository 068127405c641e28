"""The sampling scheduler: requests of many callers and of several snapshots, decoded and scored together.

It is the background work of the backend's one worker thread. Requests wait in a queue. Those of one snapshot share a
decoder, join its batch while it runs, and leave it row by row as they end. The snapshots used last have a decoder each,
with their weights and prefixes, and take turns by the token; only where there are more snapshots than decoders does one
wait until another has run out.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import attrs
import torch

from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.requests import SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.memory import telling
from rlkit.backends.worker import check_process
from rlkit.errors import BackendError, RequestCancelled

__all__ = ["Scheduler"]

Request: TypeAlias = SampleRequest | ScoreRequest

QUIET = 0.001  # an idle scheduler waits until no request came for this long,
PATIENCE = 0.010  # but not longer than this after the first


@attrs.define(eq=False)
class _Lane:
    """A decoder and the scores that it is computing."""

    decoder: Decoder
    scored: list[ScoreRequest] = attrs.field(factory=list)
    scoring: Iterator[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.decoder.rows or self.scored)

    def end_scoring(self) -> list[ScoreRequest]:
        """Give up what is not computed yet, and return it."""
        scored, self.scored, self.scoring = self.scored, [], None
        return scored


class Scheduler:
    """Decodes and scores what is submitted; see ``rlkit.backends.worker.Background``.

    Args:
        make_decoder: builds what decodes, at first use.
        max_rows: rows of a snapshot decoded together at most.
        max_decoders: snapshots at most whose weights are there at once.
    """

    def __init__(self, make_decoder: Callable[[], Decoder], max_rows: int, max_decoders: int = 1) -> None:
        self._make_decoder = make_decoder
        self._max_rows, self._max_decoders = max_rows, max_decoders
        self._lanes: list[_Lane] = []  # the one that had its turn longest ago first
        self.waiting: deque[Request] = deque()
        self._lock = threading.Lock()
        self._last_arrival = 0.0
        self._stopped = False
        self._process = os.getpid()
        self.wake: Callable[[], None] = lambda: None

    @property
    def decoders(self) -> list[Decoder]:
        """What is there, the one that had its turn last at the end."""
        return [lane.decoder for lane in self._lanes]

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
        if any(lane.busy for lane in self._lanes):
            return 0
        with self._lock:
            if not self.waiting:
                return None
            now = time.monotonic()
            due = min(self._last_arrival + QUIET, self.waiting[0].arrived + PATIENCE)
            return max(0.0, due - now)

    @torch.no_grad()
    def turn(self) -> None:
        """Give one snapshot its turn: admit what can be admitted, decode a token of every row, score a part."""
        self._forget()
        started: list[Request] = []
        try:
            lane = self._next_lane(started)
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it; the scheduler goes on
            self._fail(started or self._all_waiting(), error)  # or they would fail for ever
            return
        if lane is None:
            return
        try:
            self._decode(lane, started)
        except BaseException as error:  # noqa: BLE001  # as above: those being decoded get it
            self._fail([*started, *(row.request for row in lane.decoder.abandon())], error)
        try:
            self._score(lane)
        except BaseException as error:  # noqa: BLE001  # as above: those being scored get it
            self._fail(lane.end_scoring(), error)

    @torch.no_grad()
    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """Have a live sampler's snapshot become ``newer``: between two tokens of its rows, which go on under it.

        Texts that are being scored are begun again. What fails here changes nothing; only where the older weights
        cannot be loaded again either, the rows fail, too. Called in the worker's thread.

        Args:
            snapshot: the live sampler's.
            newer: what it becomes.
            recompute: see ``LiveSampling.live_sampler``.
            done: called once it has, before anything that ``newer`` drew is given out.
        """
        older = attrs.evolve(snapshot)
        snapshot.become(newer)
        lane = self._lane_of(snapshot)
        if lane is not None:
            self._reload(lane, snapshot, older, recompute=recompute)
        if done is not None:
            done()

    def _reload(self, lane: _Lane, snapshot: Snapshot, older: Snapshot, *, recompute: bool) -> None:
        """Have a lane decode with what its snapshot has become, or with ``older`` where that fails."""
        lane.scored = [request for request in lane.scored if not request.future.done()]
        lane.scoring = None
        try:
            with telling(lambda: "weights to sample from; connect with merge=False, which needs no copy of them"):
                lane.decoder.reload(snapshot, recompute=recompute)
        except BaseException:
            snapshot.become(older)
            try:
                lane.decoder.reload(snapshot, recompute=recompute)
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it
                self._fail([*(row.request for row in lane.decoder.abandon()), *lane.end_scoring()], error)
            raise

    def invariant(self, snapshot: Snapshot) -> bool:
        """See ``Decoder.invariant``; with the weights that are there, or else those of ``snapshot``."""
        if not self._lanes:
            self._lanes.append(_Lane(self._make_decoder()))
            self._lanes[0].decoder.use(snapshot)
        return self._lanes[-1].decoder.invariant()

    def stop(self) -> None:
        """Fail whatever is left."""
        with self._lock:
            self._stopped = True
            left = list(self.waiting)
            self.waiting.clear()
        for lane in self._lanes:
            left += [*(row.request for row in lane.decoder.abandon()), *lane.end_scoring()]
        self._lanes.clear()
        _refuse(left, BackendError("the local backend was closed before this was sampled"))

    def _all_waiting(self) -> list[Request]:
        with self._lock:
            return list(self.waiting)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        gone = {id(request): request for request in requests}
        with self._lock:
            self.waiting = deque(request for request in self.waiting if id(request) not in gone)
        _refuse(gone.values(), error)

    def _forget(self) -> None:
        """Drop what nobody waits for any more."""
        gone: list[Request] = []
        for lane in self._lanes:
            dropped = [row.request for row in lane.decoder.rows if row.request.dropped]
            if dropped:
                lane.decoder.forget()
            gone += dropped
            if lane.scored and all(request.dropped for request in lane.scored):
                gone += lane.end_scoring()
        with self._lock:
            gone += [request for request in self.waiting if request.dropped]
            if gone:
                self.waiting = deque(request for request in self.waiting if not request.dropped)
        _refuse(gone, RequestCancelled("nobody waited for this any more, so it was given up; ask for it again"))

    def _next_lane(self, started: list[Request]) -> _Lane | None:
        """Return the decoder whose turn it is, after those that wait got one as far as there are any."""
        with self._lock:
            asked = {id(request.snapshot): request.snapshot for request in self.waiting}  # in order of arrival
        claimed: list[_Lane] = []
        for snapshot in asked.values():
            lane = self._lane_of(snapshot) or self._free_lane(claimed)
            if lane is None:
                break
            claimed.append(lane)
            if lane.decoder.snapshot is not snapshot:
                with self._lock:
                    started += [request for request in self.waiting if request.snapshot is snapshot]
                with telling(lambda: "weights to sample from; connect with merge=False, which needs no copy of them"):
                    lane.decoder.use(snapshot)
                started.clear()
        for lane in self._lanes:
            if lane.busy or lane in claimed:
                self._lanes.remove(lane)
                self._lanes.append(lane)
                return lane
        return None

    def _lane_of(self, snapshot: Snapshot) -> _Lane | None:
        return next((lane for lane in self._lanes if lane.decoder.snapshot is snapshot), None)

    def _free_lane(self, claimed: Sequence[_Lane]) -> _Lane | None:
        """Return a lane for another snapshot: one whose samplers are closed, a new one, or the one used longest ago."""
        idle = [lane for lane in self._lanes if not lane.busy and lane not in claimed]
        closed = [lane for lane in idle if lane.decoder.snapshot is None]
        for lane in closed[1:]:  # nothing is lost with their weights
            self._lanes.remove(lane)
        if closed:
            return closed[0]
        if len(self._lanes) < self._max_decoders:
            self._lanes.append(_Lane(self._make_decoder()))
            return self._lanes[-1]
        return idle[0] if idle else None

    def _decode(self, lane: _Lane, started: list[Request]) -> None:
        decoder = lane.decoder
        admitted: list[tuple[SampleRequest, int]] = []
        while (chosen := self._next(lane, admitted)) is not None:
            started.append(chosen[0])
            admitted.append(chosen)
        if admitted:
            longest = max(request.prompt.size for request, _ in admitted)
            with telling(lambda: self._describe(len(decoder.rows) + sum(count for _, count in admitted), longest + 1)):
                decoder.start(admitted)
        rows = decoder.rows
        if rows:
            with telling(lambda: self._describe(len(rows), max(row.position for row in rows) + 1)):
                decoder.step()

    def _score(self, lane: _Lane) -> None:
        """Score a part of the texts at hand, or of those that wait once these are done."""
        if not lane.scored:
            with self._lock:
                lane.scored = [x for x in self._admissible(lane) if isinstance(x, ScoreRequest)]
                taken = {id(request) for request in lane.scored}
                self.waiting = deque(request for request in self.waiting if id(request) not in taken)
        if lane.scored:
            longest = max(request.tokens.size for request in lane.scored)
            with telling(partial("logprobs of texts of up to {} tokens; ask for shorter ones".format, longest)):
                lane.scoring = lane.scoring or lane.decoder.score(lane.scored)
                if next(lane.scoring, lane) is lane:  # it is at its end
                    lane.end_scoring()

    def _describe(self, rows: int, longest: int) -> str:
        return f"{rows} completions of up to {longest} tokens; lower max_rows ({self._max_rows}) or prefix_mb"

    def _next(self, lane: _Lane, admitted: Sequence[tuple[SampleRequest, int]]) -> tuple[SampleRequest, int] | None:
        """Return the first request and how many of its rows have room; off the queue once all of it has begun."""
        with self._lock:
            left = (x for x in self._admissible(lane) if isinstance(x, SampleRequest))
            request = next((x for x in left if all(x is not other for other, _ in admitted)), None)
            room = 0 if request is None else self._room(lane.decoder, request, admitted)
            if request is None or room <= 0:
                return None
            count = min(len(request.rngs) - request.started, room)
            if count == len(request.rngs) - request.started:
                self.waiting.remove(request)
            return request, count

    def _room(self, decoder: Decoder, request: SampleRequest, admitted: Sequence[tuple[SampleRequest, int]]) -> int:
        """Return how many rows of ``request`` may begin: all rows count as long as the longest may become."""
        running = len(decoder.rows) + sum(count for _, count in admitted)
        if running and not decoder.mixes:
            return 0
        requests = [request, *(other for other, _ in admitted), *(row.request for row in decoder.rows)]
        longest = max(other.end for other in requests)
        fitting = decoder.capacity(longest)
        if fitting < min(self._max_rows, running + len(request.rngs) - request.started):
            for lane in self._lanes:
                if not lane.busy and lane.decoder is not decoder:
                    lane.decoder.release()
            fitting = decoder.capacity(longest)
        return max(min(self._max_rows, fitting) - running, 0 if running else 1)  # one is tried in any case

    def _admissible(self, lane: _Lane) -> Iterator[Request]:
        """Requests that may join; not those behind the first that waits for a decoder, so that one becomes free."""
        snapshots = [lane.decoder.snapshot for lane in self._lanes]
        before = itertools.takewhile(lambda request: request.snapshot in snapshots, self.waiting)
        return (request for request in before if request.snapshot is lane.decoder.snapshot)


def _refuse(requests: Iterable[Request], error: BaseException) -> None:
    for request in requests:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled, or is done
            request.future.set_exception(error)
