"""Requests and rows of the sampling scheduler."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Sequence
from typing import Literal, TypeVar

import attrs
import numpy as np
import torch

from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.penalties import TokenCounts
from rlkit.backends.sampling import Stop
from rlkit.types import Sample, SamplingParams

__all__ = ["SampleRequest", "SampleRow", "ScoreRequest"]

T = TypeVar("T")


def _settle(future: concurrent.futures.Future[T], value: T) -> None:
    """Set a future, unless it was cancelled, which may happen at any moment."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_result(value)


@attrs.define(eq=False)
class ScoreRequest:
    """Logprobs [T, K] at every place of a text: of its own tokens, of given ones, or of the most probable.

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
    dropped: bool = False  # nobody waits for it any more

    def __attrs_post_init__(self) -> None:
        self.logprobs = np.zeros(self.ids.shape, np.float32)

    @property
    def mask(self) -> np.ndarray:
        """Bool [T], the places that are asked for, of which the first is none."""
        asked = np.full(self.tokens.size, True) if self.top else np.any(self.ids >= 0, axis=1)
        return asked & (np.arange(asked.size) > 0)

    def drop(self) -> None:
        """Drop it; from any thread, at any time."""
        self.dropped = True

    def read(self, places: np.ndarray, logprobs: torch.Tensor, rows: np.ndarray) -> None:
        """Take in what is known of the tokens at ``places`` [m]: rows [m] of the logprobs [n, V] behind others."""
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
    dropped: bool = False  # nobody waits for it any more

    @property
    def end(self) -> int:
        """Tokens at most of a row, with its prompt."""
        return int(self.prompt.size) + self.limit

    def drop(self) -> None:
        """Drop it; from any thread, at any time."""
        self.dropped = True

    def finish(self, row: SampleRow, reason: Literal["stop", "length"]) -> None:
        """Take in a row that ended; the last one completes the request, if it was not given up."""
        mixed = row.versions[0] != row.versions[-1]  # they never fall
        self.samples[row.index] = Sample(
            self.prompt,
            row.tokens,
            row.logprobs,
            reason,
            version=row.versions[0],
            versions=np.array(row.versions) if mixed else None,
            **self.params.drawn_with,
        )
        if len(self.samples) == len(self.rngs):
            _settle(self.future, [self.samples[i] for i in range(len(self.rngs))])


@attrs.define(eq=False)
class SampleRow:
    """One completion on its way.

    Attributes:
        versions: of the policies that drew its tokens.
        cached_version: of the policy that computed its prompt's keys and values. Where that is not the snapshot's, they
            are of use to nobody else.
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
        """Where the last token stands."""
        return int(self.request.prompt.size) + len(self.tokens) - 1

    @property
    def computed(self) -> np.ndarray:
        """The tokens whose keys and values exist: all but the last."""
        return np.concatenate([self.request.prompt, np.array(self.tokens[:-1], np.int64)])

    @property
    def stale(self) -> bool:
        """Whether its keys and values, or a part of them, are of an older policy than the snapshot's."""
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
