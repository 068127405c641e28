"""What waits at the sampling engine."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.sampling import Stop
from rlkit.types import Sample, SamplingParams

__all__ = ["Row", "SampleRequest", "ScoreRequest"]


@attrs.define(eq=False)
class ScoreRequest:
    """Logprobs of given tokens."""

    snapshot: Snapshot
    tokens: np.ndarray
    temperature: float
    future: concurrent.futures.Future[np.ndarray] = attrs.field(factory=concurrent.futures.Future)
    arrived: float = attrs.field(factory=time.monotonic)
    dropped: bool = False  # nobody waits for it any more

    def drop(self) -> None:
        """From any thread, at any time."""
        self.dropped = True


@attrs.define(eq=False)
class SampleRequest:
    """Completions of one prompt."""

    snapshot: Snapshot
    prompt: np.ndarray
    params: SamplingParams
    stop: Stop
    rngs: Sequence[np.random.Generator]
    limit: int  # tokens of a completion at most: max_tokens, or what the context leaves
    future: concurrent.futures.Future[list[Sample]] = attrs.field(factory=concurrent.futures.Future)
    arrived: float = attrs.field(factory=time.monotonic)
    started: int = 0  # rows that have begun
    samples: dict[int, Sample] = attrs.field(factory=dict)
    dropped: bool = False  # nobody waits for it any more

    def drop(self) -> None:
        """From any thread, at any time."""
        self.dropped = True

    def finish(self, row: Row, reason: Literal["stop", "length"]) -> None:
        """Takes in a row that ended; the last one completes the request."""
        self.samples[row.index] = Sample(
            self.prompt,
            row.tokens,
            row.logprobs,
            reason,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
            version=self.snapshot.version,
        )
        if len(self.samples) == len(self.rngs):
            self.future.set_result([self.samples[i] for i in range(len(self.rngs))])


@attrs.define(eq=False)
class Row:
    """One completion on its way."""

    request: SampleRequest
    index: int
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)

    @property
    def position(self) -> int:
        """Where the last token stands."""
        return int(self.request.prompt.size) + len(self.tokens) - 1

    @property
    def computed(self) -> np.ndarray:
        """The tokens whose keys and values exist: all but the last."""
        return np.concatenate([self.request.prompt, np.array(self.tokens[:-1], np.int64)])

    def uniform(self) -> float:
        """The next number of this row's own stream."""
        return float(self.request.rngs[self.index].random())

    def add(self, token: int, logprob: float) -> bool:
        """Appends a token; True where it ended the row, which is then handed in."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stopped = self.request.stop(self.tokens)
        if stopped or len(self.tokens) == self.request.limit:
            self.request.finish(self, "stop" if stopped else "length")
            return True
        return False
