"""``LocalSampler``: what a user holds of a snapshot; its requests, and the rows that are decoded for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, Protocol, Self, TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._seeds import SeedStream, streams
from rlkit.backends._drawing import TokenCounts
from rlkit.backends.local.products.linear import Adapter, adapter_of
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import Stop, check_mask, check_prompt, check_request, check_targets
from rlkit.backends.trainer import CallQueue
from rlkit.errors import BackendError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = [
    "LiveLocalSampler",
    "LocalSampler",
    "SampleRequest",
    "SampleRow",
    "ScoreRequest",
    "Snapshot",
    "Updated",
    "take_snapshot",
]


@attrs.define(eq=False, weakref_slot=True)
class Snapshot:
    """An adapter, frozen; empty for the base model. A live sampler has its own, which is updated."""

    version: int
    scale: float
    adapter: Adapter

    def switch_to(self, other: Snapshot) -> None:
        """Take the version and the tensors of another, which stays as it is."""
        self.version, self.scale, self.adapter = other.version, other.scale, other.adapter


def take_snapshot(peft_model: nn.Module, version: int, scale: float) -> Snapshot:
    """Return a copy of the adapter as it is."""
    pairs = adapter_of(peft_model)
    return Snapshot(version, scale, {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()})


T = TypeVar("T")


def _settle(future: concurrent.futures.Future[T], value: T) -> None:
    """Set a future, unless it was cancelled, which may happen at any moment."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_result(value)


@attrs.define(eq=False)
class ScoreRequest:
    """A request for logprobs [T, K] at every place of a text: its own tokens, given ones, or the most probable.

    Attributes:
        tokens: int64 [T], the text.
        ids: int64 [T, K], whose logprobs are asked for; -1 for none.
        top: fill as many of the last columns of ``ids`` with the most probable, the best first.
    """

    snapshot: Snapshot
    tokens: np.ndarray
    ids: np.ndarray
    temperature: float = 1.0
    top: int = 0
    future: concurrent.futures.Future[tuple[np.ndarray, np.ndarray]] = attrs.field(factory=concurrent.futures.Future)
    arrived: float = attrs.field(factory=time.monotonic)
    logprobs: np.ndarray = attrs.field(init=False)
    dropped: bool = False  # no one waits for it any more

    def __attrs_post_init__(self) -> None:
        self.logprobs = np.zeros(self.ids.shape, np.float32)

    @property
    def mask(self) -> np.ndarray:
        """Return bool [T], the places that are asked for, of which the first is none."""
        asked = np.full(self.tokens.size, True) if self.top else np.any(self.ids >= 0, axis=1)
        return asked & (np.arange(asked.size) > 0)

    def drop(self) -> None:
        """Drop it; from any thread, at any time."""
        self.dropped = True

    def read(self, places: np.ndarray, logprobs: torch.Tensor, rows: np.ndarray) -> None:
        """Take in what is known of the tokens at ``places`` [m]: rows [m] of the logprobs [n, V] after others."""
        where = torch.from_numpy(rows).to(logprobs.device)[:, None]
        if self.top:
            self.ids[places, -self.top :] = logprobs[where[:, 0]].topk(self.top).indices.cpu().numpy()
        ids = torch.from_numpy(self.ids[places]).to(logprobs.device)
        self.logprobs[places] = logprobs[where, ids.clamp(min=0)].masked_fill(ids < 0, 0.0).cpu().numpy()

    def finish(self) -> None:
        """Complete it, if it was not given up."""
        _settle(self.future, (self.ids, self.logprobs))


@attrs.define(eq=False)
class SampleRequest:
    """Completions of one prompt; ``rngs`` are the streams of ``seed``."""

    snapshot: Snapshot
    prompt: np.ndarray
    params: SamplingParams
    stop: Stop
    rngs: Sequence[np.random.Generator]
    limit: int  # tokens of a completion at most: max_tokens, or what the context leaves
    seed: int
    future: concurrent.futures.Future[list[Sample]] = attrs.field(factory=concurrent.futures.Future)
    arrived: float = attrs.field(factory=time.monotonic)
    started: int = 0  # rows that have begun
    samples: dict[int, Sample] = attrs.field(factory=dict)
    dropped: bool = False  # no one waits for it any more

    @property
    def end(self) -> int:
        """Return the most tokens of a row, with its prompt."""
        return int(self.prompt.size) + self.limit

    def drop(self) -> None:
        """Drop it; from any thread, at any time."""
        self.dropped = True

    def begin(self, count: int) -> list[SampleRow]:
        """Begin its next ``count`` rows."""
        rows = [SampleRow(self, self.started + i) for i in range(count)]
        self.started += count
        return rows

    def finish(self, row: SampleRow, reason: Literal["stop", "length"]) -> None:
        """Take in a row that ended; the last one completes the request, if it was not given up."""
        self.samples[row.index] = Sample(
            self.prompt,
            row.tokens,
            row.logprobs,
            reason,
            versions=np.array(row.versions),
            **self.params.sampling_options,
        )
        if len(self.samples) == len(self.rngs):
            _settle(self.future, [self.samples[i] for i in range(len(self.rngs))])


@attrs.define(eq=False)
class SampleRow:
    """One completion that is being decoded.

    Attributes:
        versions: of the policies that drew its tokens.
        cached_version: of the policy that computed its prompt's keys and values. Where that is not the snapshot's, they
            are useless to other requests.
    """

    request: SampleRequest
    index: int
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    counts: TokenCounts | None = attrs.field(init=False)
    cached_version: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.counts = TokenCounts.of(self.request.params, self.request.prompt)
        self.cached_version = self.request.snapshot.version

    @property
    def position(self) -> int:
        """Return the position of the last token."""
        return int(self.request.prompt.size) + len(self.tokens) - 1

    @property
    def computed(self) -> np.ndarray:
        """Return the tokens whose keys and values exist: all but the last."""
        return np.concatenate([self.request.prompt, np.array(self.tokens[:-1], np.int64)])

    @property
    def stale(self) -> bool:
        """Return whether its keys and values, or a part of them, are of an older policy than the snapshot's."""
        return self.cached_version != self.request.snapshot.version

    def uniform(self) -> float:
        """Return the next number of this row's own stream."""
        return float(self.request.rngs[self.index].random())

    def add(self, token: int, logprob: float) -> bool:
        """Append a token, and return whether it ended the row, which is then handed in."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(self.request.snapshot.version)
        if self.counts is not None:
            self.counts.add(token)
        stopped = self.request.stop(self.tokens)
        if stopped or len(self.tokens) == self.request.limit:
            self.request.finish(self, "stop" if stopped else "length")
            return True
        return False


class Owner(Protocol):
    """The backend, as far as its samplers need it."""

    tokenizer: Tokenizer
    max_length: int
    about: str


class LocalSampler:
    """A frozen policy of a local backend; its requests are decoded together with everybody's."""

    def __init__(
        self,
        owner: Owner,
        snapshot: Snapshot,
        seeds: SeedStream,
        submit: Callable[[SampleRequest | ScoreRequest], None],
    ) -> None:
        self.tokenizer = owner.tokenizer
        self.max_length = owner.max_length
        self.version = snapshot.version
        self._owner = owner  # keeps the worker alive
        self._snapshot: Snapshot | None = snapshot
        self._seeds = seeds
        self._submit = submit

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``. Requests made at about the same time are decoded in one batch.

        A request that was cancelled, forgotten, or no longer waited for after Ctrl-C makes room
        within a token.
        """
        snapshot = self.snapshot
        tokens = check_request(
            prompt, params, n, seed, vocab_size=self.tokenizer.vocab_size, max_length=self.max_length
        )
        seed = self._seeds.of(seed, params)
        request = SampleRequest(
            snapshot,
            tokens,
            params,
            Stop(params.stop, self.tokenizer),
            streams(seed, n),
            min(params.max_tokens, self.max_length - tokens.size),
            seed,
        )
        self._submit(request)
        return Future.wrap(request.future, convert=self._returned, on_drop=request.drop, on_cancel=request.drop)

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        array = check_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        temperature = _check.temperature("logprobs(temperature)", temperature, zero=False)
        return self._score(ScoreRequest(self.snapshot, array, array[:, None], temperature), lambda ids, lp: lp[:, 0])

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        array = check_prompt("top_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        ids = np.zeros((array.size, k), np.int64)
        return self._score(ScoreRequest(self.snapshot, array, ids, top=k), lambda ids, logprobs: (ids, logprobs))

    def prompt_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """See ``PromptLogprobs``."""
        array = check_prompt("prompt_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.integer("prompt_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        ids = np.zeros((array.size, 1 + k), np.int64)
        ids[:, 0] = array
        request = ScoreRequest(self.snapshot, array, ids, top=k)
        return self._score(request, lambda ids, logprobs: (logprobs[:, 0], ids[:, 1:], logprobs[:, 1:]))

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """See ``TargetLogprobs``."""
        array = check_prompt("target_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        ids = check_targets(targets, array.size, self.tokenizer.vocab_size)
        return self._score(ScoreRequest(self.snapshot, array, ids), lambda _, logprobs: logprobs)

    def masked_logprobs(self, tokens: TokenIds, mask: ArrayLike, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """Return float32 [T]: ``logprobs`` where ``mask`` [T] is true, for less work than for all of it; else 0."""
        array = check_prompt("masked_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        ids = np.where(check_mask(mask, array.size), array, -1)[:, None]
        temperature = _check.temperature("masked_logprobs(temperature)", temperature, zero=False)
        return self._score(ScoreRequest(self.snapshot, array, ids, temperature), lambda _, logprobs: logprobs[:, 0])

    def close(self) -> None:
        """Free the snapshot; earlier requests are still answered."""
        self._snapshot = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        of = self._owner.about.partition(",")[0]
        return f"<LocalSampler {of}, version {self.version}{', closed' if self._snapshot is None else ''}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LocalSampler belongs to its backend, and cannot be pickled or copied; open one in each process: "
            "rlkit.sampler('local', path=...)"
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes that the snapshot keeps, 0 once it is closed."""
        adapter = {} if self._snapshot is None else self._snapshot.adapter
        return sum(x.numel() * x.element_size() for pair in adapter.values() for x in pair)

    @property
    def snapshot(self) -> Snapshot:
        """Return the adapter that it samples from."""
        if self._snapshot is None:
            raise BackendError("this sampler is closed")
        return self._snapshot

    def _score(self, request: ScoreRequest, convert: Callable[[np.ndarray, np.ndarray], T]) -> Future[T]:
        self._submit(request)

        def returned(pair: tuple[np.ndarray, np.ndarray]) -> T:
            return self._returned(convert(*pair))

        return Future.wrap(request.future, convert=returned, on_drop=request.drop, on_cancel=request.drop)

    def _returned(self, result: T) -> T:
        return result  # a bound method: a future that is waited for keeps its sampler, and so the worker, alive


class Updated(Protocol):
    """What decodes: a ``Scheduler``, or several on other processes."""

    def submit(self, request: SampleRequest | ScoreRequest) -> None:
        """Queue a request; from any thread."""

    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """See ``Scheduler.update``."""


class LiveLocalSampler(LocalSampler):
    """A ``LiveSampler`` of a local backend, whose requests have their own decoder.

    Args:
        owner: the backend.
        newest: takes a snapshot of its policy; called in its thread.
        seeds: for requests that bring none.
        scheduler: decodes them.
        queue: of the backend's calls; updates keep its order.
        recompute: as for ``LiveSampling.live_sampler``.
    """

    switches: Literal["token", "request"] = "token"

    def __init__(
        self,
        owner: Owner,
        newest: Callable[[], Snapshot],
        seeds: SeedStream,
        scheduler: Updated,
        queue: CallQueue,
        *,
        recompute: bool,
    ) -> None:
        super().__init__(owner, attrs.evolve(newest()), seeds, scheduler.submit)
        self._newest, self._scheduler, self._queue, self._recompute = newest, scheduler, queue, recompute

    def update(self) -> Future[int]:
        """See ``LiveSampler.update``. Texts that are being scored are scored anew, so that no two policies mix."""
        snapshot = self.snapshot

        def became() -> None:
            self.version = snapshot.version

        def job() -> int:
            newest = self._newest()
            if newest.version != snapshot.version:
                self._scheduler.update(snapshot, newest, recompute=self._recompute, done=became)
            return snapshot.version

        return self._queue.enqueue("update", job)
