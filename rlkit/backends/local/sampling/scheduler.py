"""The sampling scheduler: requests of many callers and of several snapshots, decoded and scored together.

It is the background work of the backend's one worker thread. Requests wait in a queue. Those of one snapshot share a
``Decoder``, join its batch while it runs, and leave it row by row as they end. The snapshots used last have a decoder
each, with their weights and prefixes, and take turns by the token; only where there are more snapshots than decoders,
or more adapters than merged copies, does one wait until another has run out. Its weights are then made anew, with all
requests that wait for them begun at once. How an adapter is sampled never depends on the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import torch

from rlkit.backends._drawing import draw
from rlkit.backends._memory import telling
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.sampling.sampler import SampleRequest, SampleRow, ScoreRequest, Snapshot
from rlkit.backends.trainer import check_process
from rlkit.errors import BackendError, RequestCancelled

__all__ = [
    "Decoder",
    "Scheduler",
]


class Decoder(ABC):
    """Rows of one snapshot, decoded a token at a time.

    Args:
        forward: the model.
        merge: whether adapters are merged into copies of its weights.

    Attributes:
        rows: what is being decoded.
    """

    def __init__(self, forward: SamplingForward, *, merge: bool) -> None:
        self.rows: list[SampleRow] = []
        self.forward, self._merge = forward, merge
        self._current: weakref.ref[Snapshot] | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """Return the snapshot whose weights are loaded; None where its last sampler was closed."""
        return None if self._current is None else self._current()

    def use(self, snapshot: Snapshot) -> bool:
        """Take the weights of ``snapshot``, and return whether another's were there. There are no rows."""
        if self.snapshot is snapshot:
            return False
        self._load(snapshot)
        return True

    def reload(self, snapshot: Snapshot, *, recompute: bool) -> None:
        """Load the weights that ``snapshot`` has now; its rows go on with them.

        Args:
            snapshot: a live sampler's, whose older weights were here.
            recompute: compute the rows' keys and values, or recurrent states, anew; else they stay as they are.
        """
        self._load(snapshot)
        if recompute:
            self._recompute()
            for row in self.rows:
                row.cached_version = snapshot.version

    def _load(self, snapshot: Snapshot) -> None:
        """Load weights, and forget what was computed with others, but for the rows."""
        self._current = None
        self.forward.load(snapshot.adapter, snapshot.scale, merge=self._merge)
        self._current = weakref.ref(snapshot)

    @abstractmethod
    def _recompute(self) -> None:
        """Compute anew what is kept of the rows' tokens but the last."""

    def capacity(self, length: int) -> int:
        """Return how many rows of ``length`` tokens there is memory for; more wait until others have ended."""
        del length
        return sys.maxsize

    @property
    def held(self) -> int:
        """Return the bytes of keys and values that it holds."""
        return 0

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Return the same, or what its rows will take when they are as long as they may become."""

    def release(self) -> None:
        """Release what it holds, where it has no rows."""
        if not self.rows:
            self.abandon()

    @abstractmethod
    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        """Begin the next ``count`` rows of each request, up to their first token."""

    @abstractmethod
    def step(self) -> None:
        """Decode one more token for every row."""

    def forget(self) -> None:
        """Drop rows of requests that were dropped."""
        self.leave([slot for slot, row in enumerate(self.rows) if row.request.dropped])

    @abstractmethod
    def leave(self, slots: Sequence[int]) -> None:
        """Remove the rows in ``slots``, which are in ascending order."""

    @abstractmethod
    def invariant(self) -> bool:
        """Return whether a row's logits have the same bits alone and in a batch: made so, and shown by some tokens."""

    @abstractmethod
    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        """Compute what the requests ask for and finish them, a part at a time; rows may be decoded in between."""

    def abandon(self) -> list[SampleRow]:
        """Remove all rows and return them."""
        rows, self.rows = self.rows, []
        return rows


def begin_rows(admitted: Sequence[tuple[SampleRequest, int]]) -> list[tuple[np.ndarray, list[SampleRow]]]:
    """Begin the next ``count`` rows of each request, and return each prompt with its rows."""
    prompts: dict[bytes, tuple[np.ndarray, list[SampleRow]]] = {}
    for request, count in admitted:
        prompts.setdefault(request.prompt.tobytes(), (request.prompt, []))[1].extend(request.begin(count))
    return list(prompts.values())


def draw_tokens(rows: Sequence[SampleRow], logits: torch.Tensor) -> list[bool]:
    """Draw a token for each of ``rows`` from its logits [n, V], and return which of them it ended."""
    uniforms = np.array([row.uniform() for row in rows])
    tokens, logprobs = draw(logits, [row.request.params for row in rows], uniforms, [row.counts for row in rows])
    return [row.add(int(tokens[i]), float(logprobs[i])) for i, row in enumerate(rows)]


_log = logging.getLogger(__name__)

Request: TypeAlias = SampleRequest | ScoreRequest

QUIET = 0.001  # an idle scheduler waits until no request came for this long,
PATIENCE = 0.010  # but not longer than this after the first
_REMADE = 20  # merged copies of one snapshot, of which a warning is due


@attrs.define(eq=False)
class _Lane:
    """A decoder and the scores that it is computing."""

    decoder: Decoder
    scored: list[ScoreRequest] = attrs.field(factory=list)
    scoring: Iterator[None] | None = None
    merged: bool = False  # it holds a copy of the weights

    @property
    def busy(self) -> bool:
        return bool(self.decoder.rows or self.scored)

    def end_scoring(self) -> list[ScoreRequest]:
        """Remove the requests that are not computed yet, and return them."""
        scored, self.scored, self.scoring = self.scored, [], None
        return scored


class Scheduler:
    """Decodes and scores what is submitted; see ``rlkit.backends.trainer.Background``.

    Args:
        make_decoder: builds what decodes, at first use.
        max_rows: rows of a snapshot decoded together at most.
        max_decoders: snapshots at most whose weights are there at once.
        max_copies: of these, how many have an adapter merged into a copy of the weights; None: adapters are not merged.
    """

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        max_rows: int,
        max_decoders: int = 1,
        max_copies: int | None = None,
    ) -> None:
        self._make_decoder = make_decoder
        self._max_rows, self._max_decoders, self._max_copies = max_rows, max_decoders, max_copies
        self._warned = False
        self._copied: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()  # how often each was
        self._lanes: list[_Lane] = []  # the one that had its turn longest ago first
        self.waiting: deque[Request] = deque()
        self._lock = threading.Lock()
        self._last_arrival = 0.0
        self._stopped = False
        self._process = os.getpid()
        self.wake: Callable[[], None] = lambda: None

    @property
    def decoders(self) -> list[Decoder]:
        """Return the decoders; the one that had the last turn is at the end."""
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
        """Return the seconds until there is work; None where there is none."""
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
            with self._lock:
                waiting = list(self.waiting)
            self._fail(started or waiting, error)  # or they would fail for ever
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
        """Update a live sampler's snapshot to ``newer`` between two tokens of its rows, which go on under it.

        Texts that are being scored are begun again. What fails here changes nothing; only where the older weights
        cannot be loaded again either, the rows fail, too. Called in the worker's thread.

        Args:
            snapshot: the live sampler's.
            newer: what it becomes.
            recompute: see ``LiveSampling.live_sampler``.
            done: called once it has, before anything that ``newer`` drew is given out.
        """
        # A copy to go back to: lanes and requests find each other by the snapshot itself, which changes.
        older = attrs.evolve(snapshot)
        snapshot.switch_to(newer)
        lane = self._lane_of(snapshot)
        if lane is not None:
            self._reload(lane, snapshot, older, recompute=recompute)
        if done is not None:
            done()

    def _reload(self, lane: _Lane, snapshot: Snapshot, older: Snapshot, *, recompute: bool) -> None:
        """Make a lane decode with its updated snapshot, or with ``older`` where that fails."""
        lane.scored = [request for request in lane.scored if not request.future.done()]
        lane.scoring = None
        try:
            with telling(lambda: "weights to sample from; connect with merge=False, which needs no copy of them"):
                lane.decoder.reload(snapshot, recompute=recompute)
        except BaseException:
            snapshot.switch_to(older)
            try:
                lane.decoder.reload(snapshot, recompute=recompute)
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it
                self._fail([*(row.request for row in lane.decoder.abandon()), *lane.end_scoring()], error)
            raise

    def invariant(self, snapshot: Snapshot) -> bool:
        """See ``Decoder.invariant``; with the weights that are there, or else those of ``snapshot``."""
        if not self._lanes:
            self._lanes.append(_Lane(self._make_decoder()))
            self._use(self._lanes[0], snapshot)
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

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        gone = {id(request): request for request in requests}
        with self._lock:
            self.waiting = deque(request for request in self.waiting if id(request) not in gone)
        _refuse(gone.values(), error)

    def _forget(self) -> None:
        """Drop requests that no one waits for any more."""
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
        _refuse(gone, RequestCancelled("no caller waits for this request any more, so it was cancelled; send it again"))

    def _next_lane(self, started: list[Request]) -> _Lane | None:
        """Return the decoder whose turn it is, after those that wait got one as far as there are any."""
        with self._lock:
            asked = list(dict.fromkeys(request.snapshot for request in self.waiting))  # in order of arrival
        claimed: list[_Lane] = []
        for snapshot in asked:
            lane = self._lane_of(snapshot) or self._free_lane(claimed, merged=self._merges(snapshot))
            if lane is None:
                break
            claimed.append(lane)
            if lane.decoder.snapshot is not snapshot:
                # Loading takes seconds: without the lock, or ``submit`` would wait. Noted first is whom it is for,
                # since what fails must fail them and no others.
                with self._lock:
                    started += [request for request in self.waiting if request.snapshot is snapshot]
                with telling(lambda: "weights to sample from; connect with merge=False, which needs no copy of them"):
                    self._use(lane, snapshot)
                started.clear()
        for lane in self._lanes:
            if lane.busy or lane in claimed:
                # To the end: lanes take turns. The list may change within its loop, since this leaves it.
                self._lanes.remove(lane)
                self._lanes.append(lane)
                return lane
        return None

    def _lane_of(self, snapshot: Snapshot) -> _Lane | None:
        return next((lane for lane in self._lanes if lane.decoder.snapshot is snapshot), None)

    def _merges(self, snapshot: Snapshot) -> bool:
        return self._max_copies is not None and bool(snapshot.adapter)

    def _use(self, lane: _Lane, snapshot: Snapshot) -> None:
        """Load a snapshot's weights; warn where copies of the same ones are made again and again."""
        lane.decoder.use(snapshot)
        lane.merged = self._merges(snapshot)
        if not lane.merged:
            return
        self._copied[snapshot] = self._copied.get(snapshot, 0) + 1
        if self._copied[snapshot] >= _REMADE and not self._warned:
            self._warned = True
            _log.warning(
                "weights were merged %d times for one sampler, because %d samplers take turns with merged_copies=%d; "
                "connect with more merged_copies, or merge=False",
                *(_REMADE, len(self._copied), self._max_copies),
            )

    def _drop_closed(self, idle: list[_Lane]) -> list[_Lane]:
        """Remove the lanes whose samplers are closed, but for one that is returned: one with merged weights, if any."""
        closed = sorted((lane for lane in idle if lane.decoder.snapshot is None), key=lambda lane: not lane.merged)
        for lane in closed[1:]:  # nothing is lost with their weights
            self._lanes.remove(lane)
            idle.remove(lane)
        return closed[:1]

    def _free_lane(self, claimed: Sequence[_Lane], *, merged: bool) -> _Lane | None:
        """Return a lane for another snapshot: one whose samplers are closed, a new one, or the one used longest ago.

        Where there may be no more merged copies it is one that has such, to be written over.
        """
        idle = [lane for lane in self._lanes if not lane.busy and lane not in claimed]
        closed = self._drop_closed(idle)
        if merged and sum(lane.merged for lane in self._lanes) >= (self._max_copies or 0):
            copies = [lane for lane in idle if lane.merged]  # oldest turn first, as ``_lanes`` is; none: it waits
            return min(copies, key=lambda lane: lane not in closed, default=None)
        if closed:
            return closed[0]
        if len(self._lanes) < self._max_decoders:
            self._lanes.append(_Lane(self._make_decoder()))
            return self._lanes[-1]
        return min(idle, key=lambda lane: lane.merged and not merged, default=None)

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
        """Return requests that may join; none overtakes the first that waits for a free decoder."""
        if not lane.decoder.rows:  # all that wait for weights which were made for the first of them
            return (request for request in self.waiting if request.snapshot is lane.decoder.snapshot)
        snapshots = [lane.decoder.snapshot for lane in self._lanes]
        before = itertools.takewhile(lambda request: request.snapshot in snapshots, self.waiting)
        return (request for request in before if request.snapshot is lane.decoder.snapshot)


def _refuse(requests: Iterable[Request], error: BaseException) -> None:
    for request in requests:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled, or is done
            request.future.set_exception(error)
