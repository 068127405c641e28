"""Sampling from a frozen toy policy."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit._resource import Resource
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import SeedStream, checked_prompt, checked_request, checked_targets, streams
from rlkit.backends.toy.completions import Completions
from rlkit.backends.toy.model import Distributions, Features
from rlkit.errors import BackendError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["ToySampler"]


@hinted("sampler")
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

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        weights = self._open()
        tokens = checked_request(
            prompt, params, n, seed, vocab_size=self.tokenizer.vocab_size, max_length=self.max_length
        )
        return Future.of(
            self._sampled(weights, tokens, params, streams(self._seeds.next() if seed is None else seed, n))
        )

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        weights = self._open()
        array = checked_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        temperature = _check.temperature("logprobs(temperature)", temperature, zero=False)
        return Future.of(self._scores(weights, array, array[:, None], temperature)[:, 0])

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        weights, size = self._open(), self.tokenizer.vocab_size
        array = checked_prompt("top_logprobs(tokens)", tokens, size, self.max_length)
        _check.integer("top_logprobs(k)", k, low=1, high=size, why="the vocabulary")
        whole = self._scores(weights, array, np.tile(np.arange(size), (array.size, 1)))
        ids = np.argsort(-whole, axis=1, kind="stable")[:, :k]
        ids[0] = 0
        return Future.of((ids, np.take_along_axis(whole, ids, 1)))

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """See ``TargetLogprobs``."""
        weights, size = self._open(), self.tokenizer.vocab_size
        array = checked_prompt("target_logprobs(tokens)", tokens, size, self.max_length)
        return Future.of(self._scores(weights, array, checked_targets(targets, array.size, size)))

    def _scores(self, weights: np.ndarray, tokens: np.ndarray, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return the logprobs [T, K] of ``ids`` [T, K]; 0 where an id is -1, and in row 0."""
        out = np.zeros(ids.shape, np.float32)
        if tokens.size > 1:
            logprobs = Distributions(self._features.all(tokens[:-1]), weights, temperature).logprobs
            out[1:] = np.where(ids[1:] < 0, 0.0, np.take_along_axis(logprobs, np.maximum(ids[1:], 0), 1))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshot keeps, 0 once it is closed."""
        return 0 if self._weights is None else self._weights.nbytes

    def close(self) -> None:
        """Frees the snapshot."""
        self._weights = None

    def __repr__(self) -> str:
        return f"<ToySampler version {self.version}{', closed' if self._weights is None else ''}>"

    def _open(self) -> np.ndarray:
        if self._weights is None:
            raise BackendError("this sampler is closed")
        return self._weights

    def _sampled(
        self, weights: np.ndarray, prompt: np.ndarray, params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> list[Sample]:
        limit = min(params.max_tokens, self.max_length - prompt.size)
        completions = Completions(self._features, self.tokenizer, prompt, params, rngs, limit)
        while not completions.done:
            completions.step(weights, self.version)
        return completions.samples()
