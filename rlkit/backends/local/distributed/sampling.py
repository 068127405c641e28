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

from rlkit._seeds import streams
from rlkit.backends.local.distributed._world import World
from rlkit.backends.local.distributed.wire import Message, Reply
from rlkit.backends.local.sampling.sampler import SampleRequest, ScoreRequest, Snapshot
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import Stop
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
        base: the snapshot without an adapter, which every rank has from the start.
    """

    def __init__(self, world: World, backend: int, here: Callable[[Request], None], base: Snapshot) -> None:
        self._world, self._backend, self._here = world, backend, here
        self._numbers = itertools.count(BASE + 1)
        self._requests = itertools.count(1)
        self._snapshots: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary({base: BASE})
        self._dead: deque[int] = deque()  # freed snapshots; the garbage collector must not take locks
        self._load = [0] * world.size  # tokens that each has to draw or to score
        self._sent: dict[int, _Sent] = {}
        self._held: dict[Snapshot, list[_Sent]] = {}  # completed requests of a live sampler that is being updated
        self._lock = threading.Lock()

    def take(self, snapshot: Snapshot) -> None:
        """Make every rank take the same snapshot of its adapter, which does not change meanwhile."""
        number = next(self._numbers)
        for rank in range(1, self._world.size):
            self._world.tell(rank, "take", self._fields(snapshot=number, version=snapshot.version))
        self._snapshots[snapshot] = number
        weakref.finalize(snapshot, self._dead.append, number).atexit = False

    def number(self, snapshot: Snapshot) -> int:
        """Return what ranks know a snapshot by that they were told of."""
        return self._snapshots[snapshot]

    def submit(self, request: Request) -> None:
        """Send a request to the rank that has least to do; from any thread.

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
        kind, fields, arrays = _packed(request)
        reply = self._world.call(rank, kind, self._fields(**fields, snapshot=number, request=key), arrays)
        with self._lock:
            self._sent[key] = _Sent(request, reply, rank, key, size)
        reply.add_done_callback(partial(self._arrived, key))

    @contextlib.contextmanager
    def holding(self, snapshot: Snapshot) -> Iterator[None]:
        """Hold back what other ranks draw for ``snapshot`` until the end: they change to the newer one first.

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
        """Make ranks drop requests that no one waits for any more."""
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

    def _fields(self, **fields: object) -> dict[str, object]:
        return {"backend": self._backend, **fields}


def _settle(sent: _Sent, lost: RankLost | None) -> None:
    """Settle a request with its rank's reply, or with the reason why that is lost."""
    future, reply = sent.request.future, sent.reply
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
        error = lost or reply.exception()
        if error is None:
            future.set_result(_unpacked(sent.request, reply.result()))
        elif sent.request.dropped:
            what = "no caller waits for this request any more, so it was cancelled; send it again"
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


def _packed(request: Request) -> tuple[str, dict[str, object], list[np.ndarray]]:
    """Return the kind, fields and arrays of the message that ``request_of`` reads."""
    if isinstance(request, SampleRequest):
        fields = {"seed": request.seed, "n": len(request.rngs), "limit": request.limit}
        return "sample", {**fields, "params": attrs.asdict(request.params)}, [request.prompt]
    return "score", {"temperature": request.temperature, "top": request.top}, [request.tokens, request.ids]


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
    drawn = request.params.sampling_options
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
