"""Sampling from a frozen toy policy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._resource import Resource
from rlkit._rows import TokenIds
from rlkit.backends._penalties import TokenCounts
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import SeedStream, Stop, check_prompt, check_request, check_targets, streams
from rlkit.backends.toy.model import Distributions, Features
from rlkit.errors import BackendError, RequestCancelled
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["Completions", "LiveToySampler", "RunningRequests", "ToySampler", "drawn"]


def drawn(
    logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray, counts: Sequence[TokenCounts | None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return one token per row, and its logprob under the distribution that it was drawn from.

    Args:
        logits: float64 [n, V].
        params: of all rows.
        uniforms: float64 [n] in [0, 1): row i takes the first token whose cumulated probability exceeds its share.

        counts: one per row, of the penalized tokens; None where there is no penalty.

    Returns:
        int64 [n], float32 [n].

    >>> drawn(np.log([[0.5, 0.25, 0.25]] * 3), SamplingParams(), np.array([0.4, 0.6, 0.9]))[0]
    array([0, 1, 2])
    """
    greedy = params.temperature == 0
    if params.penalizes and counts is not None:
        logits = np.stack([_penalized(row, params, of) for row, of in zip(logits, counts, strict=True)])
    logprobs = _log_softmax(logits if greedy else logits / params.temperature)
    if params.truncates:
        logprobs = np.stack([_truncated(row, params) for row in logprobs])
    if greedy:
        tokens = logprobs.argmax(-1)
    else:
        cumulated = np.exp(logprobs).cumsum(-1)
        total = cumulated[:, -1]
        share = np.minimum(uniforms * total, np.nextafter(total, 0.0))
        tokens = (cumulated > share[:, None]).argmax(-1)
    return tokens, logprobs[np.arange(len(tokens)), tokens].astype(np.float32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits - logits.max(-1, keepdims=True)
    logprobs: np.ndarray = above - np.log(np.exp(above).sum(-1, keepdims=True))
    return logprobs


def _penalized(logits: np.ndarray, params: SamplingParams, counts: TokenCounts | None) -> np.ndarray:
    """Apply the repetition penalty, then the other two."""
    if counts is None:
        return logits
    out = logits.copy()
    seen = out[counts.ids]
    seen = np.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    seen -= params.frequency_penalty * counts.counts + params.presence_penalty * (counts.counts > 0)
    out[counts.ids] = seen
    return out


def _truncated(logprobs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Apply top_k, then keep the smallest set of most probable tokens that reaches top_p, at least one, then min_p.

    Tokens as probable as the last one that is kept stay, too.
    """
    descending = -np.sort(-logprobs)
    if params.top_k > 0:
        descending = descending[: params.top_k]
    mass = np.exp(descending)
    kept = (mass.cumsum() - mass < params.top_p * mass.sum()) & (mass >= params.min_p * mass[0])
    return _log_softmax(np.where(logprobs >= descending[kept][-1], logprobs, -np.inf))


class Completions:
    """The rows of one request.

    Args:
        features: of the model.
        tokenizer: for the end tokens and for text.
        prompt: int64 [P].
        params: of all rows.
        rngs: one per row.
        limit: tokens of a row at most.
    """

    def __init__(
        self,
        features: Features,
        tokenizer: Tokenizer,
        prompt: np.ndarray,
        params: SamplingParams,
        rngs: Sequence[np.random.Generator],
        limit: int,
    ) -> None:
        self._features, self._prompt, self._params, self._rngs, self._limit = features, prompt, params, rngs, limit
        self._stop = Stop(params.stop, tokenizer)
        self._read, self._state = np.zeros((len(rngs), features.size)), features.start(len(rngs))
        for token in prompt:
            self._read, self._state = features.read(self._state, np.full(len(rngs), token))
        self._tokens: list[list[int]] = [[] for _ in rngs]
        self._logprobs: list[list[float]] = [[] for _ in rngs]
        self._versions: list[int] = []  # of the first tokens, of the second ones, ...
        self._ended = [False] * len(rngs)
        self._counts = [TokenCounts.of(params, prompt) for _ in rngs]

    @property
    def done(self) -> bool:
        """Return whether every row has ended."""
        return all(self._ended) or len(self._versions) == self._limit

    def step(self, weights: np.ndarray, version: int) -> None:
        """Draw the next token of every row from the policy ``version``, whose ``weights`` these are."""
        logits = np.matmul(self._read[:, None, :], weights)[:, 0]  # a product per row: no row depends on another
        uniforms = np.array([rng.random() for rng in self._rngs])
        ids, lp = drawn(logits, self._params, uniforms, self._counts)
        for i in np.flatnonzero(~np.array(self._ended)):
            self._tokens[i].append(int(ids[i]))
            self._logprobs[i].append(float(lp[i]))
            self._ended[i] = self._stop(self._tokens[i])
            if (seen := self._counts[i]) is not None:
                seen.add(int(ids[i]))
        self._versions.append(version)
        if not self.done:
            self._read, self._state = self._features.read(self._state, ids)

    def samples(self) -> list[Sample]:
        """Return the rows, once they are done."""
        return [
            Sample(
                self._prompt,
                tokens,
                logprobs,
                "stop" if ended else "length",
                versions=np.array(self._versions[: len(tokens)]),
                **self._params.sampling_options,
            )
            for tokens, logprobs, ended in zip(self._tokens, self._logprobs, self._ended, strict=True)
        ]


@attrs.define(eq=False, repr=False, slots=False)
class ToySampler(Resource):
    """A frozen toy policy."""

    _instead = "open one in each process: rlkit.sampler('toy', path=...)"

    _weights: np.ndarray | None
    _features: Features
    _seeds: SeedStream
    tokenizer: Tokenizer = attrs.field(kw_only=True)
    max_length: int = attrs.field(kw_only=True)
    version: int = attrs.field(kw_only=True)

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        weights, completions = self._open(), self._begin(prompt, params, n, seed)
        while not completions.done:
            completions.step(weights, self.version)
        return Future.of(completions.samples())

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        weights = self._open()
        array = check_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        temperature = _check.temperature("logprobs(temperature)", temperature, zero=False)
        return Future.of(self._scores(weights, array, array[:, None], temperature)[:, 0])

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        weights, size = self._open(), self.tokenizer.vocab_size
        array = check_prompt("top_logprobs(tokens)", tokens, size, self.max_length)
        _check.integer("top_logprobs(k)", k, low=1, high=size, why="the vocabulary")
        whole = self._scores(weights, array, np.tile(np.arange(size), (array.size, 1)))
        ids = np.argsort(-whole, axis=1, kind="stable")[:, :k]
        ids[0] = 0
        return Future.of((ids, np.take_along_axis(whole, ids, 1)))

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """See ``TargetLogprobs``."""
        weights, size = self._open(), self.tokenizer.vocab_size
        array = check_prompt("target_logprobs(tokens)", tokens, size, self.max_length)
        return Future.of(self._scores(weights, array, check_targets(targets, array.size, size)))

    def _scores(self, weights: np.ndarray, tokens: np.ndarray, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return the logprobs [T, K] of ``ids`` [T, K]; 0 where an id is -1, and in row 0."""
        out = np.zeros(ids.shape, np.float32)
        if tokens.size > 1:
            logprobs = Distributions(self._features.all(tokens[:-1]), weights, temperature).logprobs
            out[1:] = np.where(ids[1:] < 0, 0.0, np.take_along_axis(logprobs, np.maximum(ids[1:], 0), 1))
        return out

    @property
    def nbytes(self) -> int:
        """Return the bytes that the snapshot keeps, 0 once it is closed."""
        return 0 if self._weights is None else self._weights.nbytes

    def close(self) -> None:
        """Free the snapshot."""
        self._weights = None

    def __repr__(self) -> str:
        return f"<ToySampler version {self.version}{', closed' if self._weights is None else ''}>"

    def _open(self) -> np.ndarray:
        if self._weights is None:
            raise BackendError("this sampler is closed")
        return self._weights

    def _begin(self, prompt: TokenIds, params: SamplingParams, n: int, seed: int | None) -> Completions:
        """Return the rows of a request, checked, before their first token."""
        most = self.max_length
        tokens = check_request(prompt, params, n, seed, vocab_size=self.tokenizer.vocab_size, max_length=most)
        rngs, limit = streams(self._seeds.of(seed, params), n), min(params.max_tokens, most - tokens.size)
        return Completions(self._features, self.tokenizer, tokens, params, rngs, limit)


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
    """What live samplers have been asked for; see ``rlkit.backends.trainer.Background``."""

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
                self._end(request, RequestCancelled("no caller waits for this request any more, so it was cancelled"))
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


@attrs.define(eq=False, repr=False, slots=False)
class LiveToySampler(ToySampler):
    """A ``LiveSampler`` of the toy backend."""

    _policy: Policy = attrs.field(kw_only=True)
    _requests: RunningRequests = attrs.field(kw_only=True)
    _update: Callable[[LiveToySampler], Future[int]] = attrs.field(kw_only=True)
    switches: Literal["token", "request"] = attrs.field(default="token", init=False)

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        self._open()
        request = _Request(self._policy, self._begin(prompt, params, n, seed))
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
