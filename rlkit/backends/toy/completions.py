"""Completions of one prompt, drawn from a toy policy a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.backends.penalties import TokenCounts
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import Stop
from rlkit.backends.toy.drawing import drawn
from rlkit.backends.toy.model import Features
from rlkit.types import Sample, SamplingParams

__all__ = ["Completions"]


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
        """Whether every row has ended."""
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
                **self._params.drawn_with,
            )
            for tokens, logprobs, ended in zip(self._tokens, self._logprobs, self._ended, strict=True)
        ]
