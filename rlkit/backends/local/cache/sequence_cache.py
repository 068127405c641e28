"""A prefix cache of whole sequences, for layers whose state is known at a sequence's end alone.

A recurrent state at token t cannot be taken back to an earlier one. So what is kept is the cache at the end of each
prompt, and at the end of each completion, with which the next turn of an episode begins.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from rlkit.backends.local.cache.row_cache import RowCache
from rlkit.backends.local.cache.shared_lru import SharedLru

__all__ = ["CachedSequence", "SequenceCache"]


@attrs.frozen(eq=False)
class CachedSequence:
    """A sequence that was computed.

    Attributes:
        length: how many tokens it has.
        cache: of one row.
        logits: [1, V] behind its last token, where they are known.
    """

    length: int
    cache: RowCache
    logits: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return self.cache.nbytes + (0 if self.logits is None else self.logits.nbytes)


class SequenceCache(SharedLru[CachedSequence]):
    """Sequences of one snapshot."""

    def find(self, tokens: np.ndarray) -> CachedSequence | None:
        """Return the longest one that ``tokens`` begin with, of their own length only if its logits are known."""
        for length in sorted({x.length for x in self.entries.values()}, reverse=True):
            name = tokens[:length].tobytes()
            sequence = self.entries.get(name)
            if sequence is not None and (length < tokens.size or sequence.logits is not None):
                self.touch([name])
                return sequence
        return None

    def store(self, tokens: np.ndarray, cache: RowCache, logits: torch.Tensor | None = None) -> None:
        """Keep the cache of ``tokens``, a row."""
        self.keep(tokens.tobytes(), CachedSequence(tokens.size, cache, logits))
