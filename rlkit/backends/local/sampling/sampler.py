"""``LocalSampler``: what a user holds of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit.backends.local.sampling.requests import SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import (
    SeedStream,
    Stop,
    checked_mask,
    checked_prompt,
    checked_request,
    checked_targets,
    streams,
)
from rlkit.errors import BackendError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["LocalSampler"]

T = TypeVar("T")


class Owner(Protocol):
    """The backend, as far as its samplers need it."""

    tokenizer: Tokenizer
    max_length: int
    about: str


@hinted("sampler")
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

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``. Requests made at about the same time are decoded in one batch.

        A request that was cancelled, whose future was forgotten, or whose waiting was ended by Ctrl-C, makes room
        within a token.
        """
        snapshot = self.snapshot
        tokens = checked_request(
            prompt, params, n, seed, vocab_size=self.tokenizer.vocab_size, max_length=self.max_length
        )
        seed = self._seeds.next() if seed is None else seed
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
        array = checked_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        temperature = _check.temperature("logprobs(temperature)", temperature, zero=False)
        return self._score(ScoreRequest(self.snapshot, array, array[:, None], temperature), lambda ids, lp: lp[:, 0])

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        array = checked_prompt("top_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        ids = np.zeros((array.size, k), np.int64)
        return self._score(ScoreRequest(self.snapshot, array, ids, top=k), lambda ids, logprobs: (ids, logprobs))

    def prompt_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """See ``PromptLogprobs``."""
        array = checked_prompt("prompt_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.integer("prompt_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        ids = np.zeros((array.size, 1 + k), np.int64)
        ids[:, 0] = array
        request = ScoreRequest(self.snapshot, array, ids, top=k)
        return self._score(request, lambda ids, logprobs: (logprobs[:, 0], ids[:, 1:], logprobs[:, 1:]))

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """See ``TargetLogprobs``."""
        array = checked_prompt("target_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        ids = checked_targets(targets, array.size, self.tokenizer.vocab_size)
        return self._score(ScoreRequest(self.snapshot, array, ids), lambda _, logprobs: logprobs)

    def masked_logprobs(self, tokens: TokenIds, mask: ArrayLike, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``MaskedLogprobs``."""
        array = checked_prompt("masked_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        ids = np.where(checked_mask(mask, array.size), array, -1)[:, None]
        temperature = _check.temperature("masked_logprobs(temperature)", temperature, zero=False)
        return self._score(ScoreRequest(self.snapshot, array, ids, temperature), lambda _, logprobs: logprobs[:, 0])

    def close(self) -> None:
        """Free the snapshot; what was asked for before is still answered."""
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
        """Bytes that the snapshot keeps, 0 once it is closed."""
        adapter = {} if self._snapshot is None else self._snapshot.adapter
        return sum(x.numel() * x.element_size() for pair in adapter.values() for x in pair)

    @property
    def snapshot(self) -> Snapshot:
        """The adapter that it samples from."""
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
