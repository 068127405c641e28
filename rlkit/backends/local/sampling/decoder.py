"""What the two ways to decode have in common."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from rlkit.backends.local.model.forward import Forward
from rlkit.backends.local.sampling.requests import SampleRequest, SampleRow, ScoreRequest
from rlkit.backends.local.sampling.snapshots import Snapshot

__all__ = ["Decoder"]


class Decoder(ABC):
    """Rows of one snapshot, decoded a token at a time.

    Args:
        forward: the model.
        merge: whether adapters are merged into copies of its weights.

    Attributes:
        rows: what is being decoded.
        mixes: whether rows of several requests are decoded together.
    """

    mixes: bool

    def __init__(self, forward: Forward, *, merge: bool) -> None:
        self.rows: list[SampleRow] = []
        self.forward, self._merge = forward, merge
        self._current: weakref.ref[Snapshot] | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """Whose weights are there; None where its last sampler was closed."""
        return None if self._current is None else self._current()

    def use(self, snapshot: Snapshot) -> bool:
        """Take the weights of ``snapshot``, and return whether another's were there. There are no rows."""
        if self.snapshot is snapshot:
            return False
        self._load(snapshot)
        return True

    def reload(self, snapshot: Snapshot, *, recompute: bool) -> None:
        """Take the weights that ``snapshot`` has now, under rows of its that go on.

        Args:
            snapshot: a live sampler's, whose older weights were here.
            recompute: compute the rows' keys and values, or recurrent states, anew; else they stay as they are.
        """
        self._load(snapshot)
        if recompute:
            self._recompute()
            for row in self.rows:
                row.cached_version = snapshot.version

    def _load(self, snapshot: Snapshot) -> None:
        """Load weights, and forget what was computed with others, but for the rows."""
        self._current = None
        self.forward.load(snapshot.adapter, snapshot.scale, merge=self._merge)
        self._current = weakref.ref(snapshot)

    @abstractmethod
    def _recompute(self) -> None:
        """Compute anew what is kept of the rows' tokens but the last."""

    def capacity(self, length: int) -> int:
        """Return how many rows of ``length`` tokens there is memory for; more wait until others have ended."""
        del length
        return sys.maxsize

    @property
    def held(self) -> int:
        """Bytes of keys and values that it holds."""
        return 0

    @property
    @abstractmethod
    def reserved(self) -> int:
        """The same, or what its rows will take when they are as long as they may become."""

    def release(self) -> None:
        """Give back what it holds, where it has no rows."""
        if not self.rows:
            self.abandon()

    @abstractmethod
    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        """Begin the next ``count`` rows of each request, up to their first token."""

    @abstractmethod
    def step(self) -> None:
        """Decode one more token for every row."""

    @abstractmethod
    def forget(self) -> None:
        """Let the rows go whose request was dropped."""

    @abstractmethod
    def invariant(self) -> bool:
        """Return whether a row's logits have the same bits alone and in a batch: made so, and shown by some tokens."""

    @abstractmethod
    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        """Compute what the requests ask for and finish them, a part at a time; rows may be decoded in between."""

    @abstractmethod
    def abandon(self) -> list[SampleRow]:
        """Give up all rows and return them."""
