"""Sampling spread over ranks: every request goes, whole, to the rank that has least to do.

A sample's seed is its request's, so that it does not depend on who draws it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit.backends.local.distributed.peer import Reply
from rlkit.backends.local.distributed.wire import Message
from rlkit.backends.local.distributed.world import World
from rlkit.backends.local.sampling.requests import SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import Stop, streams
from rlkit.errors import BackendError, RankLost, RequestCancelled
from rlkit.types import Sample, SamplingParams

__all__ = ["BASE", "SpreadSampling", "answer_of", "request_of"]

Request: TypeAlias = SampleRequest | ScoreRequest

BASE = 0  # the number of the snapshot without an adapter


@attrs.frozen(eq=False)
class _Sent:
    """A request that another rank has."""

    request: Request
    reply: Reply
    rank: int
    number: int
    size: int


class SpreadSampling:
    """Sends requests to ranks, and takes what they drew.

    Args:
        world: the ranks.
        backend: the number of the backend.
        here: decodes on this rank.
    """

    def __init__(self, world: World, backend: int, here: Callable[[Request], None]) -> None:
        self._world, self._backend, self._here = world, backend, here
        self._numbers = itertools.count(BASE + 1)
        self._requests = itertools.count(1)
        self._snapshots: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()
        self._dead: deque[int] = deque()  # numbers of snapshots that are no more; a collector of garbage locks nothing
        self._load = [0] * world.size  # tokens that each has to draw or to score
        self._sent: dict[int, _Sent] = {}
        self._held: dict[Snapshot, list[_Sent]] = {}  # what is done, of a live sampler that is being updated
        self._lock = threading.Lock()

    def base(self, snapshot: Snapshot) -> None:
        """Take note of the snapshot that every rank has from the start."""
        self._snapshots[snapshot] = BASE

    def take(self, snapshot: Snapshot) -> None:
        """Have every rank take the same snapshot of its adapter, which nothing changes meanwhile."""
        number = next(self._numbers)
        for rank in range(1, self._world.size):
            self._world.tell(rank, "take", self._fields(snapshot=number, version=snapshot.version))
        self._snapshots[snapshot] = number
        weakref.finalize(snapshot, self._dead.append, number).atexit = False

    def number(self, snapshot: Snapshot) -> int:
        """Return what ranks know a snapshot by that they were told of."""
        return self._snapshots[snapshot]

    def submit(self, request: Request) -> None:
        """Give a request to the rank that has least to do; from any thread.

        Raises:
            RankLost: a rank is gone.
        """
        self._world.check()
        number = self._snapshots.get(request.snapshot)
        size = _size(request)
        with self._lock:
            rank = 0 if number is None else min(range(self._world.size), key=self._load.__getitem__)
            self._load[rank] += size
        if rank == 0:
            request.future.add_done_callback(lambda _: self._unload(0, size))
            self._here(request)
            return
        key = next(self._requests)
        fields, arrays = _packed(request)
        reply = self._world.call(rank, fields.pop("kind"), self._fields(**fields, snapshot=number, request=key), arrays)
        with self._lock:
            self._sent[key] = _Sent(request, reply, rank, key, size)
        reply.add_done_callback(partial(self._arrived, key))

    @contextlib.contextmanager
    def holding(self, snapshot: Snapshot) -> Iterator[None]:
        """Give out nothing that other ranks draw for ``snapshot``, until the end: it becomes another there first.

        An answer would have the newer version before the live sampler does, whose ``version`` cannot be raised earlier
        either: a request that is made now may begin under the older one.
        """
        with self._lock:
            self._held[snapshot] = []
        try:
            yield
        finally:
            with self._lock:
                held = self._held.pop(snapshot)
            for sent in held:  # where ranks are lost, its version may be one that the live sampler will not have
                _settle(sent, self._world.broken)

    def tick(self) -> None:
        """Have ranks drop what nobody waits for any more."""
        while self._dead:
            number = self._dead.popleft()
            for rank in range(1, self._world.size):
                self._world.tell(rank, "forget", self._fields(snapshot=number))
        with self._lock:
            dropped = [sent for sent in self._sent.values() if sent.request.dropped]
        for sent in dropped:
            self._world.tell(sent.rank, "drop", self._fields(request=sent.number))

    def _arrived(self, key: int, _: Reply) -> None:
        with self._lock:
            sent = self._sent.pop(key)
            self._load[sent.rank] -= sent.size
            held = self._held.get(sent.request.snapshot)
            if held is not None:
                held.append(sent)
        if held is None:
            _settle(sent, None)

    def _unload(self, rank: int, size: int) -> None:
        with self._lock:
            self._load[rank] -= size

    def _fields(self, **fields: object) -> dict[str, Any]:
        return {"backend": self._backend, **fields}


def _settle(sent: _Sent, lost: RankLost | None) -> None:
    """Give a request what its rank has replied, or why that is lost."""
    future, reply = sent.request.future, sent.reply
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
        error = lost or reply.exception()
        if error is None:
            future.set_result(_unpacked(sent.request, reply.result()))
        elif sent.request.dropped:
            what = "nobody waited for this any more, so it was given up; ask for it again"
            future.set_exception(RequestCancelled(what))
        elif isinstance(error, BackendError):
            future.set_exception(error)
        else:
            future.set_exception(BackendError(f"rank {sent.rank}: {error}"))


def _size(request: Request) -> int:
    """Return how many tokens it takes at most, those of its prompt counted once."""
    if isinstance(request, SampleRequest):
        return int(request.prompt.size) + len(request.rngs) * request.limit
    return int(request.tokens.size)


def _packed(request: Request) -> tuple[dict[str, Any], list[np.ndarray]]:
    if isinstance(request, SampleRequest):
        fields = {"kind": "sample", "seed": request.seed, "n": len(request.rngs), "limit": request.limit}
        return {**fields, "params": attrs.asdict(request.params)}, [request.prompt]
    fields = {"kind": "score", "temperature": request.temperature, "top": request.top}
    return fields, [request.tokens, request.ids]


def _unpacked(request: Request, reply: Message) -> Any:
    """Return what the request's future is to hold."""
    if isinstance(request, ScoreRequest):
        ids, logprobs = reply.arrays
        return ids, logprobs
    parts = zip(reply.arrays[::3], reply.arrays[1::3], reply.arrays[2::3], reply.fields["reasons"], strict=True)
    return [_sample(request, *part) for part in parts]


def _sample(
    request: SampleRequest, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, reason: Any
) -> Sample:
    oldest, mixed = int(versions[0]), bool((versions != versions[0]).any())
    several = versions if mixed else None
    drawn = request.params.drawn_with
    return Sample(request.prompt, tokens, logprobs, reason, version=oldest, versions=several, **drawn)


def request_of(message: Message, snapshot: Snapshot, tokenizer: Tokenizer) -> Request:
    """Return the request that rank 0 sent."""
    fields: Mapping[str, Any] = message.fields
    if message.kind == "score":
        tokens, ids = message.arrays
        return ScoreRequest(snapshot, tokens, ids, fields["temperature"], fields["top"])
    params, seed = SamplingParams(**fields["params"]), int(fields["seed"])
    stop, rngs = Stop(params.stop, tokenizer), streams(seed, int(fields["n"]))
    return SampleRequest(snapshot, message.arrays[0], params, stop, rngs, int(fields["limit"]), seed)


def answer_of(request: Request) -> Message:
    """Return what a request that is done has drawn or scored."""
    if isinstance(request, ScoreRequest):
        return Message("", {}, request.future.result())
    samples = request.future.result()
    arrays = [array for x in samples for array in (x.tokens, x.logprobs, x.token_versions)]
    return Message("", {"reasons": [sample.stop_reason for sample in samples]}, arrays)
