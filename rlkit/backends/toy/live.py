"""A toy policy that is updated while its requests run, which are drawn in the backend's thread, token by token."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Literal

import attrs
import numpy as np

from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit.backends.sampling import checked_request, streams
from rlkit.backends.toy.completions import Completions
from rlkit.backends.toy.sampler import ToySampler
from rlkit.errors import BackendError, RequestCancelled
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["LiveToySampler", "RunningRequests"]


@attrs.define(eq=False)
class Policy:
    """Weights, which an update replaces."""

    weights: np.ndarray
    version: int


@attrs.define(eq=False)
class _Request:
    policy: Policy
    completions: Completions
    future: concurrent.futures.Future[list[Sample]] = attrs.field(factory=concurrent.futures.Future)
    dropped: bool = False

    def drop(self) -> None:
        self.dropped = True


class RunningRequests:
    """What live samplers have been asked for; see ``rlkit.backends.worker.Background``."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._lock = threading.Lock()
        self._stopped = False
        self.wake: Callable[[], None] = lambda: None

    def submit(self, request: _Request) -> None:
        """Queue a request; from any thread."""
        with self._lock:
            if self._stopped:
                raise BackendError("the toy backend is closed")
            self._requests.append(request)
        self.wake()

    def delay(self) -> float | None:
        """Return 0 while something runs."""
        return 0 if self._requests else None

    def turn(self) -> None:
        """Draw a token of each."""
        with self._lock:
            running = list(self._requests)
        for request in running:
            if request.dropped:
                self._end(request, RequestCancelled("nobody waited for this any more, so it was given up"))
                continue
            try:
                request.completions.step(request.policy.weights, request.policy.version)
                if request.completions.done:
                    self._end(request, request.completions.samples())
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it; the others go on
                self._end(request, error)

    def stop(self) -> None:
        """Fail whatever is left."""
        with self._lock:
            self._stopped = True
            left = list(self._requests)
        for request in left:
            self._end(request, BackendError("the toy backend was closed before this was sampled"))

    def _end(self, request: _Request, outcome: list[Sample] | BaseException) -> None:
        with self._lock:
            self._requests.remove(request)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if isinstance(outcome, BaseException):
                request.future.set_exception(outcome)
            else:
                request.future.set_result(outcome)


@hinted("sampler")
@attrs.define(eq=False, repr=False, slots=False)
class LiveToySampler(ToySampler):
    """A ``LiveSampler`` of the toy backend."""

    _policy: Policy = attrs.field(kw_only=True)
    _requests: RunningRequests = attrs.field(kw_only=True)
    _update: Callable[[LiveToySampler], Future[int]] = attrs.field(kw_only=True)
    switches: Literal["token", "request"] = attrs.field(default="token", init=False)

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        self._open()
        vocab_size, most = self.tokenizer.vocab_size, self.max_length
        tokens = checked_request(prompt, params, n, seed, vocab_size=vocab_size, max_length=most)
        rngs = streams(self._seeds.next() if seed is None else seed, n)
        limit = min(params.max_tokens, most - tokens.size)
        completions = Completions(self._features, self.tokenizer, tokens, params, rngs, limit)
        request = _Request(self._policy, completions)
        self._requests.submit(request)
        return Future.wrap(request.future, convert=self._returned, on_drop=request.drop, on_cancel=request.drop)

    def update(self) -> Future[int]:
        """See ``LiveSampler.update``."""
        self._open()
        return self._update(self)

    def become(self, weights: np.ndarray, version: int) -> int:
        """Take other weights; called in the backend's thread, and so between two tokens."""
        self._policy.weights, self._policy.version = weights, version
        if self._weights is not None:
            self._weights = weights
        self.version = version
        return version

    def _returned(self, samples: list[Sample]) -> list[Sample]:
        return samples  # a bound method: a future that is waited for keeps its sampler
